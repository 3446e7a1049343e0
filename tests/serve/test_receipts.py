"""Receipts of every route: who gets one, what is in it, and that nothing of the texts is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmkit.config import ServerConfig
from lmkit.errors import UnsupportedError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.serve import receipts
from lmkit.serve.receipts import MAX_KEPT
from lmkit.web.receipt import Receipt, commit, is_signed
from tests.serve.in_process import TOKENIZER, App, ScriptedEngine
from tests.serve.live import Server

SECRET = "xylophone"
ANSWER = TOKENIZER.encode("a secret answer")
ASKED = {"x-lmkit-receipt": "1"}
CHAT = {
    "model": "model",
    "messages": [{"role": "user", "content": SECRET}],
    "stop": ["zebra"],
    "logit_bias": {"300": 1, "5": -1},
}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "model", "prompt": SECRET, "n": 2, "temperature": 1.0},
    "/v1/responses": {"model": "model", "input": SECRET},
    "/v1/messages": {"model": "model", "messages": CHAT["messages"], "max_tokens": 9},
    "/api/chat": {"model": "model", "messages": CHAT["messages"]},
    "/api/generate": {"model": "model", "prompt": SECRET},
    "/generate": {"model": "model", "text": SECRET},
    "/completion": {"model": "model", "prompt": SECRET},
}


def scripted() -> ScriptedEngine:
    engine = ScriptedEngine(lambda request: ANSWER)
    assert engine.info is not None
    engine.info = msgspec.structs.replace(engine.info, model_path=str(DEMO_FOLDER))
    return engine


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(scripted(), ServerConfig(receipt_key=str(tmp_path / "key")))


def fetched(app: App, id: str, **options: Any) -> Receipt:
    answer = app.request("GET", f"/receipts/{id}", **options)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=Receipt)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_every_route_has_receipts(app: App, path: str, stream: bool) -> None:
    answer = app.request("POST", path, json=ROUTES[path] | {"stream": stream}, headers=ASKED)
    assert answer.status_code == 200, answer.text
    receipt = fetched(app, answer.headers["x-lmkit-receipt"])
    public = app.request("GET", "/receipts/key").json()
    assert (public["algorithm"], is_signed(receipt, public["key"])) == ("Ed25519", True)
    assert receipt.salt is not None
    salt = bytes.fromhex(receipt.salt)
    engine = app.serving.engine
    assert isinstance(engine, ScriptedEngine)
    assert len(receipt.record.choices) == len(engine.requests) == ROUTES[path].get("n", 1)
    for choice, request in zip(receipt.record.choices, engine.requests, strict=True):
        assert request.tells_kv
        assert choice.prompt == commit(salt, request.prompt_ids)
        assert choice.answer == commit(salt, ANSWER)
        assert (choice.answer_tokens, choice.finish) == (len(ANSWER), "length")
        assert choice.sampling.get("seed") == request.params.seed
    assert len(receipt.record.weights) == 64
    text = json.dumps(msgspec.to_builtins(receipt))
    for secret in (SECRET, "secret", "zebra", *(str(ids)[1:-1] for ids in (ANSWER, engine.requests[0].prompt_ids))):
        assert secret not in text


def test_nobody_gets_one_who_does_not_ask(app: App) -> None:
    answer = app.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 200, answer.text
    assert "x-lmkit-receipt" not in answer.headers
    assert app.request("GET", f"/receipts/{answer.json()['id']}").status_code == 404
    wrong = app.request("POST", "/v1/chat/completions", json=CHAT, headers={"x-lmkit-receipt": "yes"})
    assert wrong.status_code == 400
    assert "x-lmkit-receipt" in wrong.text


def test_all_answers_by_an_option(tmp_path: Path) -> None:
    app = App(scripted(), ServerConfig(receipt_key=str(tmp_path / "key"), receipts=True))
    assert (tmp_path / "key").exists()  # made at the start
    answer = app.post("/v1/chat/completions", CHAT)
    assert fetched(app, answer.headers["x-lmkit-receipt"]).record.id == answer.json()["id"]
    none = app.request("POST", "/v1/chat/completions", json=CHAT, headers={"x-lmkit-receipt": "0"})
    assert "x-lmkit-receipt" not in none.headers


def test_a_receipt_is_for_the_client_whose_answer_it_was(tmp_path: Path) -> None:
    config = ServerConfig(receipt_key=str(tmp_path / "key"), api_keys=("one", "two"))
    app = App(scripted(), config)
    keys = [{"authorization": f"Bearer {key}"} for key in ("one", "two")]
    answer = app.request("POST", "/v1/chat/completions", json=CHAT, headers=keys[0] | ASKED)
    path = f"/receipts/{answer.headers['x-lmkit-receipt']}"
    assert [app.request("GET", path, headers=key).status_code for key in keys] == [200, 404]


def test_salts_are_new_each_time(app: App) -> None:
    made = []
    for _ in range(2):
        answer = app.request("POST", "/v1/chat/completions", json=CHAT | {"seed": 1}, headers=ASKED)
        made.append(fetched(app, answer.headers["x-lmkit-receipt"]))
    first, second = (receipt.record.choices[0] for receipt in made)
    assert first.prompt != second.prompt
    assert first.answer != second.answer
    assert first.sampling["stop"] != second.sampling["stop"]


def test_the_oldest_leave(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_KEPT > 1
    monkeypatch.setattr(receipts, "MAX_KEPT", 1)
    ids = [
        app.request("POST", "/v1/chat/completions", json=CHAT, headers=ASKED).headers["x-lmkit-receipt"]
        for _ in range(2)
    ]
    assert [app.request("GET", f"/receipts/{id}").status_code for id in ids] == [404, 200]


def test_without_the_package_a_request_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Any) -> Any:
        raise UnsupportedError("a receipt needs cryptography: pip install 'lmkit[receipts]'")

    app = App(scripted(), ServerConfig())
    monkeypatch.setattr(receipts, "Signer", missing)
    answer = app.request("POST", "/v1/chat/completions", json=CHAT, headers=ASKED)
    assert answer.status_code == 400
    assert "lmkit[receipts]" in answer.text


@pytest.mark.slow
def test_a_real_answer_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal from a cache and without one; a changed receipt, another prompt and another model are told apart."""
    import typer

    from lmkit.cli.replay import replay
    from lmkit.errors import ConfigError

    body = CHAT | {"model": "demo", "temperature": 0.9, "seed": 11, "max_tokens": 24, "stop": [], "logit_bias": {}}
    paths = {name: tmp_path / name for name in ("receipt", "prompt", "changed", "other")}
    engine = "lmkit.turbo.engine.engine:Engine"
    with Server(
        "--receipt-key", str(tmp_path / "key"), "--kv-memory", "8M", "--block-size", "4", engine=engine
    ) as server:
        for _ in range(2):
            answer = server.post("/v1/chat/completions", body, headers=ASKED)
        receipt = server.get(f"/receipts/{answer.headers['x-lmkit-receipt']}").json()
        key = f"{server.url}/receipts/key"
        (choice,) = receipt["record"]["choices"]
        assert [source for _, source in choice["kv"]] == ["cache", "computed"]
        paths["receipt"].write_text(json.dumps(receipt, indent=1))
        paths["prompt"].write_text(json.dumps(body))

        def outcome(name: str = "receipt", prompt: str = "prompt", **options: Any) -> int:
            with pytest.raises(typer.Exit) as end:
                replay(paths[name], prompt=paths[prompt], **({"model": str(DEMO_FOLDER), "key": key} | options))
            return int(end.value.exit_code)

        assert outcome() == 0
        assert f"equal, {choice['answer_tokens']} tokens" in capsys.readouterr().out
        ids = server.post("/tokenize", {"model": "demo", "messages": body["messages"]}).json()["tokens"]
        paths["other"].write_text(json.dumps(ids))
        assert outcome(prompt="other", model=None, server=server.url) == 0
        paths["other"].write_text(json.dumps([*ids[:-1], 7]))
        with pytest.raises(ConfigError, match="another prompt"):
            replay(paths["receipt"], prompt=paths["other"], model=str(DEMO_FOLDER))
    capsys.readouterr()
    changed = json.loads(paths["receipt"].read_text())
    changed["record"]["choices"][0]["answer_tokens"] -= 1
    paths["changed"].write_text(json.dumps(changed))
    assert outcome("changed", key=None) == 4
