"""`python -m lmkit` is the `lmkit` command."""

from lmkit.cli.main import main

main()
