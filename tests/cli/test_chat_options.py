"""The options of `lmkit chat` beside those of a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lmkit
from lmkit.cli.chat_models import RemoteModel
from lmkit.cli.main import app
from tests.cli.commands import mistake
from tests.cli.test_chat_terminal import Echo
from tests.models import tiny
from tests.turbo.engine.test_whole_texts import tokenizer

URL = "http://127.0.0.1:1"
PIPED = "a\n\nb\n/retry\n/reset\nc\n/exit\nd\n"


@pytest.mark.slow
def test_options_of_a_folder_reach_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer at temperature 50 is the greedy one if min_p leaves the likeliest token alone."""
    infos, make = [], lmkit.pipeline

    def pipeline(*arguments: Any, **options: Any) -> lmkit.Pipeline:
        made = make(*arguments, **options)
        infos.append(made.engine.info)
        return made

    monkeypatch.setattr(lmkit, "pipeline", pipeline)
    words = ["chat", "demo", "--prompt", "class Queue:", "--max-tokens", "8", "--seed", "1"]
    words += ["--kv-dtype", "int8", "--max-model-len", "64"]
    sampling = (["--temperature", "0"], ["--temperature", "50", "--min-p", "1"], ["--temperature", "50"])
    greedy, kept, free = (CliRunner().invoke(app, [*words, *options]).stdout for options in sampling)
    assert greedy == kept != free
    assert {(info.kv_dtype, info.max_model_len) for info in infos} == {("int8", 64)}


@pytest.mark.parametrize("option", [("--kv-dtype", "int8"), ("--max-model-len", "64"), ("--kv-memory", "1M")])
def test_options_of_a_folder_are_refused_for_a_server(option: tuple[str, str]) -> None:
    assert mistake("chat", URL, *option) == f"{option[0]} is for a folder; {URL} has its own"


class Remote(Echo):
    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--lines"], ["1:a", "3:b", "3:b", "forgotten", "1:c"]),
        ([], [f"1:{PIPED}"]),
        (["--lines", "--prompt", "a\nb"], ["1:a\nb"]),
    ],
)
def test_lines_of_a_piped_text_are_messages_and_commands(
    monkeypatch: pytest.MonkeyPatch, options: list[str], told: list[str]
) -> None:
    monkeypatch.setattr(RemoteModel, "connect", lambda *arguments: Remote())
    result = CliRunner().invoke(app, ["chat", URL, *options], input=PIPED)
    assert result.stdout == "".join(f"{line}\n" for line in told)


def test_an_encoder_does_not_chat(tmp_path: Path) -> None:
    tiny.make_encoder(tmp_path, "Bert")
    tokenizer(tmp_path)
    said = mistake("chat", tmp_path, "--prompt", "Hi")
    assert said == f"{tmp_path} generates no text; `lmkit serve {tmp_path}` serves its embeddings or classes"
