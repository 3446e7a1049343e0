"""Coding agents from npm, in build/clients. Packages that are there are kept; `versions` says which they are.

python -m tests.clients.packages
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from lmkit.cli.agents import AGENTS

FOLDER = Path(os.environ.get("LMKIT_CLIENTS") or Path(__file__).resolve().parents[2] / "build" / "clients")
PROGRAMS = FOLDER / "node_modules" / ".bin"


def version(package: str) -> str | None:
    """The installed version of a package."""
    about = FOLDER / "node_modules" / package / "package.json"
    return str(json.loads(about.read_text())["version"]) if about.exists() else None


def main() -> None:
    """Raises SystemExit if npm is absent or fails."""
    packages = [agent.package for agent in AGENTS.values()]
    if missing := [package for package in packages if version(package) is None]:
        if shutil.which("npm") is None:
            raise SystemExit("npm installs the clients: install Node.js 20 or later")
        FOLDER.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(FOLDER), *missing]
        if subprocess.run(install, check=False).returncode:
            raise SystemExit(f"npm could not install {', '.join(missing)}")
    for package in packages:
        print(package, version(package))  # noqa: T201 - a command


if __name__ == "__main__":
    main()
