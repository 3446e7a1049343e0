"""The Dockerfile, the systemd unit and their page agree with the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.config import ServerConfig
from lmkit.environment import VARIABLES
from lmkit.turbo.transport.async_engine import STOP_SECONDS
from tests.serve.live import Server

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "deploy"
PAGE = (ROOT / "docs" / "operate.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
COMMANDS: Any = typer.main.get_command(app)
OURS = {
    *VARIABLES,
    *(f"LMKIT_{p.name.upper()}" for p in COMMANDS.commands["serve"].params if p.name not in ("print_config", "engine")),
    *(f"LMKIT_PROXY_{param.name.upper()}" for param in COMMANDS.commands["proxy"].params),
}


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n", " ", (FOLDER / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def last(name: str) -> str:
    return [rest for instruction, rest in instructions() if instruction == name][-1]


def image_environment() -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(last("ENV")))


def test_the_pages_name_every_variable_and_no_other() -> None:
    rows = [line for page in (PAGE, REFERENCE) for line in page.splitlines() if line.startswith("|")]
    assert set(re.findall(r"`(LMKIT_[A-Z_]+)`", "\n".join(rows))) == OURS
    assert set(re.findall(r"LMKIT_[A-Z_]+", PAGE.replace("LMKIT_`", ""))) <= OURS


def test_what_the_image_copies_exists_and_suffices() -> None:
    copied = {
        word for name, rest in instructions() if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    }
    assert all((ROOT / path).exists() for path in copied)
    links = {path.resolve().relative_to(ROOT).parts[0] for path in (ROOT / "lmkit" / "data").iterdir()}
    assert copied >= {"pyproject.toml", "README.md", "LICENSE", "lmkit", *links}


def test_the_image_is_run_by_a_user_without_rights() -> None:
    assert last("USER") == "lmkit"
    assert "--uid 10001" in next(rest for name, rest in instructions() if "useradd" in rest)
    assert last("STOPSIGNAL") == "SIGTERM"
    assert json.loads(last("ENTRYPOINT")) == ["lmkit"]  # no shell, which would keep the signal to itself


def test_the_image_s_variables_are_ours_and_its_drain_ends_before_docker_kills() -> None:
    environment = image_environment()
    assert {name for name in environment if name.startswith("LMKIT_")} <= OURS
    assert float(environment["LMKIT_DRAIN_SECONDS"]) < 10
    assert environment["LMKIT_PORT"] == environment["LMKIT_PROXY_PORT"] == last("EXPOSE")


def test_the_health_check_sees_a_server() -> None:
    command = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert command[0] == "python"

    def healthy(port: str) -> bool:
        check = [sys.executable, *command[1:]]
        return (
            subprocess.run(check, env=os.environ | {"LMKIT_PORT": port}, capture_output=True, check=False).returncode
            == 0
        )

    with Server() as server:
        assert healthy(server.url.rpartition(":")[2])
    assert not healthy(server.url.rpartition(":")[2])


def unit() -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(FOLDER / "lmkit.service")
    return parser


def test_the_unit_starts_a_command_that_exists() -> None:
    program, *words = shlex.split(unit()["Service"]["ExecStart"])
    assert program.endswith("/bin/lmkit")
    words = [str(FOLDER / "serve.yaml") if word == "/etc/lmkit/serve.yaml" else word for word in words]
    result = CliRunner().invoke(app, [*words, "--print-config"])
    assert result.exit_code == 0, result.exception


def test_the_unit_waits_for_the_drain() -> None:
    service = unit()["Service"]
    assert float(service["TimeoutStopSec"]) > ServerConfig().drain_seconds + STOP_SECONDS
    assert service["KillMode"] == "mixed"  # the engine's process ends after the drain, not with it
    assert set(re.findall(r"LMKIT_[A-Z_]+", service["Environment"])) <= OURS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_no_mistake(tmp_path: Path) -> None:
    text = (FOLDER / "lmkit.service").read_text().replace("/opt/lmkit/bin/lmkit", "/bin/true")
    (tmp_path / "lmkit.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "lmkit.service")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "lmkit.service" not in result.stderr, result.stderr


def test_the_page_s_commands_and_links_exist() -> None:
    for command in re.findall(r"`lmkit ([a-z]+)", PAGE):
        assert command in COMMANDS.commands, command
    for link in re.findall(r"\]\((deploy/[^)#]+)\)", PAGE):
        assert (ROOT / "docs" / link).is_file(), link
