"""Known prefixes are what prompts begin with, for each tenant alone, and those used most outlive a restart."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from lmkit.config import EngineConfig, ServerConfig
from lmkit.errors import ConfigError
from lmkit.serve import used_prefixes
from lmkit.serve.auth import owners
from lmkit.serve.used_prefixes import UsedPrefixes
from lmkit.serve.warm import read_lines, requests_of, warmed
from lmkit.serve.warm import used_prefixes as used_of
from lmkit.turbo.request import Request, SamplingParams
from lmkit.web.auth import tenant_of
from tests.serve.in_process import CHAT_PATH, TEXT_PATH, App, ScriptedEngine, one_model
from tests.serve.live import Server

SYSTEM = {"role": "system", "content": "You answer questions about the weather of the day, in one short sentence."}
TEXT = "A list of the rivers of Europe, in the order of their lengths:"
RULES = "You are a helpful assistant of a weather station. Answer in one short sentence, and name the place. " * 6


def written(folder: Path, *rows: Any) -> str:
    file = folder / "warm.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


class Engine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[Request] = []

    def prepare(self, request: Request) -> None:
        self.prepared.append(request)


def sent(engine: Engine, config: ServerConfig) -> list[Request]:
    """What the server lets its engine compute at the start."""
    app = App(engine, config)
    lines = read_lines(config)

    async def main() -> None:
        async with warmed(app.app.state.pool, config, lines):
            (task,) = (task for task in asyncio.all_tasks() if task is not asyncio.current_task())
            await task

    asyncio.run(main())
    return engine.prepared


def test_prompts_begin_with_what_a_file_says(tmp_path: Path) -> None:
    engine = Engine()
    config = ServerConfig(warm=written(tmp_path, {"messages": [SYSTEM]}, {"text": TEXT, "cache_salt": "s"}))
    chat, text = sent(engine, config)
    app = App(engine)
    app.post(CHAT_PATH, {"model": "model", "messages": [SYSTEM, {"role": "user", "content": "And today?"}]})
    app.post(TEXT_PATH, {"model": "model", "prompt": TEXT + " the Volga"})
    for known, request in zip((chat, text), engine.requests, strict=True):
        ids = known.prompt_ids
        assert request.prompt_ids[: len(ids)] == ids
        assert len(ids) >= 12
        assert (known.is_ahead, known.is_known, known.params.max_tokens, known.timeout) == (True, True, 0, 60.0)
    assert [request.cache_salt for request in (chat, text)] == ["", "s"]


def test_each_key_has_its_own_and_the_budget_holds_for_all(tmp_path: Path) -> None:
    file = written(tmp_path, {"text": TEXT}, {"messages": [SYSTEM], "model": "other"})
    keys = ServerConfig(warm=file, api_keys=("one", "two", "m role=metrics"))
    found = sent(Engine(), keys)
    assert [request.tenant for request in found] == [tenant_of("one"), tenant_of("two")]
    size = len(found[0].prompt_ids)
    assert len(sent(Engine(), ServerConfig(warm=file, api_keys=("one", "two"), warm_tokens=2 * size - 1))) == 1
    assert [owner.tenant for owner in owners(ServerConfig())] == [""]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (["x"], "line 1: expected an object"),
        ([{"text": "a"}, {"text": 1}], "line 2: Expected `str`"),
        ([{"text": "a", "extra": 1}], "line 1: .*extra"),
        ([{"messages": 1}], "line 1: .*messages"),
        ([], "has no prefix"),
        ([{"text": "\ud800"}], "line 1: .*surrogates"),
        ([{"messages": [{"role": "system", "content": "\udc00"}]}], "line 1: .*surrogates"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, rows: list[Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_lines(ServerConfig(warm=written(tmp_path, *rows)))


def test_a_missing_file_and_a_missing_folder_are_named() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_lines(ServerConfig(warm="/nowhere"))
    with pytest.raises(ConfigError, match="--kv-disk-path"):
        used_of(ServerConfig(warm="LAST"), ScriptedEngine())


def asked(ids: list[int], **fields: Any) -> Request:
    return Request(request_id="r", prompt_ids=ids, params=SamplingParams(), **fields)


def test_what_was_found_most_is_kept_and_nothing_of_a_salt(tmp_path: Path) -> None:
    used = UsedPrefixes(tmp_path / "a.used", 16)
    system = list(range(130))
    for number in range(5):
        used.note(asked([*system, number]), 130)  # its last full block ends at 128
        used.note(asked([1000 + number] * 200), 160)  # a conversation of its own
        used.note(asked(system, cache_salt="s"), 130)
        used.note(asked(system, adapter="a"), 130)
        used.note(asked(system[:20]), 16)
    used.note(asked([*system, 7], tenant="t"), 130)
    used.note(asked([*system, 8], tenant="t"), 130)
    used.save()
    assert (tmp_path / "a.used").stat().st_mode & 0o777 == 0o600
    again = UsedPrefixes(tmp_path / "a.used", 16)
    found = [(prefix.tenant, array("i", prefix.ids).tolist(), prefix.uses) for prefix in again.best()]
    assert found == [("", system[:128], 2.5), ("t", system[:128], 1.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["a.used"]


def test_it_is_bounded_and_what_was_found_once_leaves_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(used_prefixes, "MAX_TOKENS", 320)
    used = UsedPrefixes(tmp_path / "a.used", 16)
    for number in (1, 1, 2, 3, 4, 4):
        used.note(asked([number] * 128), 128)
    assert sorted(array("i", prefix.ids)[0] for prefix in used.best()) == [1, 4]
    used.note(asked([5] * 320), 320)  # it takes all the room
    assert [array("i", prefix.ids)[0] for prefix in used.best()] == [5]


@pytest.mark.parametrize("data", [b"", b"junk", b"\x91\x93\xa0\xc4\x03abc\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"])
def test_a_damaged_file_is_left_out(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.used").write_bytes(data)
    assert not UsedPrefixes(tmp_path / "a.used", 16).best()


def test_a_file_of_others_is_left_out(tmp_path: Path) -> None:
    used = UsedPrefixes(tmp_path / "a.used", 16)
    for _ in range(2):
        used.note(asked([1] * 64), 64)
    used.save()
    (tmp_path / "a.used").chmod(0o666)
    assert not UsedPrefixes(tmp_path / "a.used", 16).best()


def test_last_has_tokens_of_this_vocabulary_alone(tmp_path: Path) -> None:
    engine = Engine()
    engine.config = EngineConfig(kv_disk_path=str(tmp_path))
    config = ServerConfig(warm="LAST")
    pool = one_model(engine, config)
    app = App(engine, config)
    assert app.serving.used is not None
    pool.models[0].serving = app.serving
    for ids in ([5] * 64, [5] * 63 + [1 << 20], [5] * 63 + [-1]):
        for _ in range(2):
            app.serving.used.note(asked(ids, tenant="t"), 64)
    (request,) = requests_of(pool.models[0], [], [])
    assert (request.prompt_ids, request.tenant) == ([5] * 64, "t")


@pytest.mark.exhaustive
def test_a_server_finds_what_it_computed_at_its_start(tmp_path: Path) -> None:
    """First what a file says. Then, after a restart, what was found most."""
    chat = {"model": "demo", "messages": [{"role": "system", "content": RULES}], "max_tokens": 1}
    disk = ("--kv-disk-path", str(tmp_path / "kv"), "--engine", "lmkit.turbo.engine.engine:Engine")
    options = ("--max-batch-size", "2", "--max-model-len", "1024", "--num-threads", "1")

    def ask(server: Server, text: str) -> int:
        messages = [*chat["messages"], {"role": "user", "content": text}]
        usage = server.post(CHAT_PATH, chat | {"messages": messages}).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with Server(*options, *disk[2:], "--warm", written(tmp_path, {"messages": chat["messages"]})) as server:
        server.until(lambda: server.metric("lmkit:warm_tokens_total") > 100, 60)
        server.until(lambda: not server.metric("lmkit:warm_waiting"), 60)
        computed = server.metric("lmkit:warm_tokens_total")
        assert ask(server, "Rain?") >= computed
    with Server(*options, *disk, "--warm", "LAST") as server:
        for text in ("Rain?", "Snow?", "Wind?"):
            ask(server, text)
    with Server(*options, *disk, "--warm", "LAST") as server:
        server.wait_for_line("warm: 1 prefixes of")
        server.until(lambda: server.metric("lmkit:cached_blocks") > 0, 60)
        assert ask(server, "Hail?") > 100
