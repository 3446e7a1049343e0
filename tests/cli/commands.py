"""Running the `lmkit` command in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.errors import LMKitError


def mistake(*arguments: object) -> str:
    """The one line that a command in this process answers a mistake with, without `lmkit: `."""
    error = CliRunner().invoke(app, [str(argument) for argument in arguments]).exception
    assert isinstance(error, LMKitError), error
    assert "\n" not in str(error)
    return str(error)
