"""The clients that `make test-clients` runs, and their packages from npm and PyPI, in build/clients.

python -m tests.clients.packages

Packages that are there are kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from lmkit.cli.agents import AGENTS

FOLDER = Path(os.environ.get("LMKIT_CLIENTS") or Path(__file__).resolve().parents[2] / "build" / "clients")
PROGRAMS = FOLDER / "node_modules" / ".bin"
PYTHON = FOLDER / "python" / "bin" / "python"
NPM, PYPI = "npm", "PyPI"
CHAT, RESPONSES, MESSAGES, OLLAMA = "chat completions", "Responses", "Messages", "Ollama's"


class Client(NamedTuple):
    """A program or a library that speaks to the server."""

    registry: str
    packages: tuple[str, ...]
    api: str

    @property
    def missing(self) -> list[str]:
        return [package for package in self.packages if version(self.registry, package) is None]


def _agent(name: str, api: str) -> Client:
    return Client(NPM, (AGENTS[name].package,), api)


# Agents are started by `lmkit launch`. The loops of libraries have these names in loops.py and loops.mjs.
CLIENTS: Mapping[str, Client] = {
    "codex": _agent("codex", RESPONSES),
    "claude": _agent("claude", MESSAGES),
    "opencode": _agent("opencode", CHAT),
    "qwen": _agent("qwen", CHAT),
    "openai": Client(PYPI, ("openai",), CHAT),
    "openai-responses": Client(PYPI, ("openai",), RESPONSES),
    "anthropic": Client(PYPI, ("anthropic",), MESSAGES),
    "langchain-openai": Client(PYPI, ("langchain", "langchain-openai"), CHAT),
    "langchain-ollama": Client(PYPI, ("langchain", "langchain-ollama"), OLLAMA),
    "llama-index-ollama": Client(PYPI, ("llama-index-core", "llama-index-llms-ollama"), OLLAMA),
    "litellm": Client(PYPI, ("litellm",), CHAT),
    "ollama": Client(PYPI, ("ollama",), OLLAMA),
    "ollama-js": Client(NPM, ("ollama",), OLLAMA),
    "ai-sdk": Client(NPM, ("ai", "@ai-sdk/openai-compatible", "zod"), CHAT),
    "ai-sdk-openai": Client(NPM, ("ai", "@ai-sdk/openai", "zod"), RESPONSES),
    "ai-sdk-anthropic": Client(NPM, ("ai", "@ai-sdk/anthropic", "zod"), MESSAGES),
}


def version(registry: str, package: str) -> str | None:
    """The installed version of a package."""
    if registry == PYPI:
        site = [str(path) for path in (FOLDER / "python").glob("lib/python*/site-packages")]
        return next((found.version for found in metadata.distributions(name=package, path=site)), None)
    about = FOLDER / "node_modules" / package / "package.json"
    return str(json.loads(about.read_text())["version"]) if about.exists() else None


def install(registry: str, packages: list[str]) -> None:
    """Raises SystemExit if it fails."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if registry == NPM and shutil.which("npm") is None:
        raise SystemExit("npm installs the clients: install Node.js 20 or later")
    if registry == PYPI and not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER / "python"], check=True)
    command = {
        NPM: ["npm", "install", "--no-audit", "--no-fund", "--prefix", FOLDER],
        PYPI: [PYTHON, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"],
    }
    if subprocess.run([*command[registry], *packages], check=False).returncode:
        raise SystemExit(f"{registry}: {', '.join(packages)} could not be installed")


def main() -> None:
    for registry in (NPM, PYPI):
        clients = [client for client in CLIENTS.values() if client.registry == registry]
        if wanted := {package: None for client in clients for package in client.missing}:
            install(registry, list(wanted))
    for name, client in CLIENTS.items():
        print(name, *(f"{package} {version(client.registry, package)}" for package in client.packages))  # noqa: T201


if __name__ == "__main__":
    main()
