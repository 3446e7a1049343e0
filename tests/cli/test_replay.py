"""What `lmkit replay` says of an answer that parts, and of one that an adapter gave."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from lmkit.cli.replay import replay
from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.formats.fingerprint import content_digest
from lmkit.models import load_spec
from lmkit.serve.receipts import _choice
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.web.receipt import Record, Signer
from tests.models import peft_folder

pytest.importorskip("cryptography")

SALT = bytes(range(32))
PROMPT = [257, 300, 411, 58, 900]
COUNT = 12
Asked = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def adapter(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layer = load_spec(json.loads((demo_model / "config.json").read_text())).layers[0]
    folder = tmp_path_factory.mktemp("adapters") / "one"
    peft_folder.write(
        folder, {f"model.layers.{i}.mlp.down_proj": layer.linears["mlp.down"] for i in range(4)}, 0, size=2
    )
    return folder


@pytest.fixture(scope="module")
def engine(demo_model: Path, adapter: Path) -> Iterator[Engine]:
    config = EngineConfig(max_model_len=64, max_batch_size=2, kv_memory=8 << 20, adapters=(f"a={adapter}",))
    made = Engine(str(demo_model), config)
    yield made
    made.close()


@pytest.fixture
def asked(engine: Engine, demo_model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Asked:
    """Replays a signed receipt: of an answer of the engine, changed as told."""
    signer, prompt, file = Signer(tmp_path / "key"), tmp_path / "prompt", tmp_path / "receipt"
    prompt.write_text(json.dumps(PROMPT))
    digests = {"": "", "a": content_digest(adapter)}
    weights = content_digest(demo_model)

    def outcome(name: str = "", other_at: int | None = None, **given: Any) -> tuple[int, str]:
        params = SamplingParams(temperature=0.8, seed=5, max_tokens=COUNT, ignore_eos=True)
        request = Request(request_id=f"r{name}", prompt_ids=PROMPT, params=params, adapter=name)
        engine.add(request)
        ids: list[int] = []
        while engine.has_work():
            ids += [token for output in engine.step() for token in output.token_ids]
        assert len(ids) == COUNT
        if other_at is not None:
            ids[other_at] ^= 1
        choice = msgspec.structs.replace(_choice(SALT, request, ids, 0, None), adapter=digests[name])
        computed = engine.info.computed | given.pop("computed", {})
        record = Record(
            id="answer",
            created=1,
            model="m",
            weights=given.pop("weights", weights),
            computed=computed,
            choices=[choice],
        )
        file.write_bytes(msgspec.json.encode(signer.sign(record, SALT)))
        with pytest.raises(typer.Exit) as end:
            replay(file, **({"prompt": prompt, "model": str(demo_model), "key": signer.public} | given))
        return int(end.value.exit_code), capsys.readouterr().out

    return outcome


@pytest.mark.slow
def test_equal_and_parting_answers(asked: Asked) -> None:
    status, said = asked()
    assert (status, f"equal, {COUNT} tokens" in said, "another" in said) == (0, True, False)
    status, said = asked(other_at=7)
    assert (status, f"parts at token 7 of {COUNT}" in said, "another" in said) == (1, True, False)


@pytest.mark.slow
def test_what_else_differs_is_named_in_any_case(asked: Asked) -> None:
    changed: dict[str, Any] = {"weights": "00", "computed": {"isa": "none"}}
    for at, status, words in ((None, 0, "equal"), (3, 3, "parts at token 3")):
        got, said = asked(other_at=at, **changed)
        assert got == status
        assert words in said
        assert "another isa: " in said
        assert "and none in the receipt" in said
        assert "another weights: " in said


@pytest.mark.slow
def test_an_adapters_answer_needs_the_adapter(asked: Asked, adapter: Path) -> None:
    status, said = asked("a", adapter=str(adapter))
    assert (status, "equal" in said, "another" in said) == (0, True, False)
    status, said = asked("a")
    assert (status, "parts at" in said, "another adapter: " in said) == (3, True, True)


@pytest.mark.slow
def test_a_receipt_chooses_no_option_but_those_that_change_bits(asked: Asked, tmp_path: Path) -> None:
    """Anybody can sign a receipt with a key of their own, and let another replay it."""
    folder = tmp_path / "kv"
    options = {"kv_disk_path": str(folder), "prefix_cache": True, "dtype": "bfloat16"}
    assert asked(computed={"options": options})[0] == 0
    assert not folder.exists()
    for wrong, words in (({"tp": "two"}, "receipt's options"), ([1], "receipt's options")):
        with pytest.raises(ConfigError, match=words):
            asked(computed={"options": wrong})


@pytest.mark.slow
def test_mistakes_are_told_from_forgeries(asked: Asked, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    for data in ("{}", '{"key": 1}', "{", "AAAA", "\xff"):
        wrong.write_bytes(data.encode("latin-1"))
        with pytest.raises(ConfigError, match="neither a file nor"):
            asked(key=str(wrong))
    for key in (str(tmp_path / "missing"), str(tmp_path), "k" * 5000):
        with pytest.raises(ConfigError, match="neither a file nor"):
            asked(key=key)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [[[1]], [-1], [1 << 31], [1.5], {"input": "def f("}, {"messages": 5}])
def test_what_is_no_prompt(asked: Asked, tmp_path: Path, prompt: Any) -> None:
    file = tmp_path / "other"
    file.write_text(json.dumps(prompt))
    with pytest.raises(ConfigError, match="the prompt's file"):
        asked(prompt=file)


@pytest.mark.slow
def test_what_differs_is_told_before_the_prompts_mistake(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another model's tokenizer makes another prompt of the same text."""
    file = tmp_path / "other"
    file.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="another prompt"):
        asked(weights="00", prompt=file)
    assert "another weights: " in capsys.readouterr().out
