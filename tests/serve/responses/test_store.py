"""The store of responses: owners, bounds, time, conversations, and kills."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lmkit.errors import RequestError
from lmkit.web.response_store import LARGEST, ResponseStore, Stored

T = TypeVar("T")
ROOT = Path(__file__).parents[3]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(folder: Path, *, max_bytes: int = 1 << 20, ttl: float = 60, clock: Callable[[], float] = Clock()) -> Any:
    return ResponseStore(lambda: folder, max_bytes=max_bytes, ttl=ttl, clock=clock)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def row(id: str, previous: str | None = None, size: int = 10) -> Stored:
    return Stored(id, previous, b"i" * (size // 2), b"r" * (size - size // 2))


def ids(chain: list[Stored]) -> list[str]:
    return [stored.id for stored in chain]


def test_a_response_is_found_again_also_after_a_restart(tmp_path: Path) -> None:
    assert run(opened(tmp_path).put("me", row("a")))
    again = opened(tmp_path)
    assert run(again.get("me", "a")) == row("a")
    assert run(again.delete("me", "a"))
    assert run(again.get("me", "a")) is None
    assert not run(again.delete("me", "a"))


def test_nobody_sees_continues_or_deletes_the_responses_of_others(tmp_path: Path) -> None:
    store = opened(tmp_path)
    run(store.put("me", row("a")))
    run(store.put("you", row("b", "a")))
    assert run(store.get("you", "a")) is None
    assert run(store.chain("you", "a", 1000)) == []
    assert run(store.chain("you", "b", 1000)) == []  # it names mine as its first turn
    assert not run(store.delete("you", "a"))
    assert run(store.get("me", "a")) == row("a")


def test_a_conversation_comes_oldest_first_and_only_whole(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for id, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "b")):
        run(store.put("me", row(id, previous)))
    assert ids(run(store.chain("me", "c", 30))) == ["a", "b", "c"]
    with pytest.raises(RequestError, match="30 bytes"):
        run(store.chain("me", "c", 29))
    run(store.delete("me", "a"))
    assert run(store.chain("me", "c", 1000)) == []


def test_responses_end_when_they_were_not_used_for_long(tmp_path: Path) -> None:
    clock = Clock()
    store = opened(tmp_path, ttl=60, clock=clock)
    run(store.put("me", row("a")))
    run(store.put("me", row("b", "a")))
    run(store.put("me", row("unused")))
    clock.now += 59
    assert ids(run(store.chain("me", "b", 1000))) == ["a", "b"]
    clock.now += 59
    assert run(store.get("me", "unused")) is None
    assert ids(run(store.chain("me", "b", 1000))) == ["a", "b"]
    run(store.put("me", row("c")))
    assert store._opened is not None
    assert [id for (id,) in run_sql(store, "select id from responses order by id")] == ["a", "b", "c"]


def run_sql(store: ResponseStore, query: str) -> list[tuple[Any, ...]]:
    return store._thread.submit(lambda: store._database.execute(query).fetchall()).result()


def test_the_owner_that_holds_most_makes_room(tmp_path: Path) -> None:
    clock = Clock()
    store = opened(tmp_path, max_bytes=1000, clock=clock)
    run(store.put("small", row("mine", size=100)))
    for i in range(20):
        clock.now += 1
        assert run(store.put("large", row(f"{i}", size=100)))
    assert run(store.get("small", "mine")) is not None
    assert run(store.get("large", "10")) is None
    assert run(store.get("large", "11")) is not None
    assert run_sql(store, "select sum(bytes) from responses") == [(1000,)]
    assert not run(store.put("large", row("huge", size=1000 // LARGEST + 1)))


def test_the_bytes_are_known_after_a_restart(tmp_path: Path) -> None:
    for i in range(30):
        assert run(opened(tmp_path, max_bytes=1000).put("me", row(f"{i}", size=100)))
    assert run_sql(opened(tmp_path), "select count(*) from responses") == [(10,)]


def test_a_damaged_file_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "responses.sqlite").write_bytes(b"no database" * 1000)
    store = opened(tmp_path)
    assert run(store.put("me", row("a")))
    assert run(store.get("me", "a")) == row("a")
    assert (tmp_path / "responses.damaged").exists()


def test_a_folder_that_fails_loses_no_answer(tmp_path: Path) -> None:
    store = opened(tmp_path / "absent")
    assert not run(store.put("me", row("a")))
    assert run(store.get("me", "a")) is None


def test_what_was_stored_survives_kill_9(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from lmkit.web.response_store import ResponseStore, Stored\n"
        f"store = ResponseStore(lambda: Path({str(tmp_path)!r}), max_bytes=1 << 30, ttl=60)\n"
        "async def main():\n"
        "    for i in range(10 ** 9):\n"
        "        await store.put('me', Stored(f'{i}', None, b'i' * 1000, b'r' * 1000))\n"
        "        print(i, flush=True)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(20):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        last = max([last, *map(int, process.stdout.read().split())])
    found = [run_sql(opened(tmp_path), "select count(*), sum(length(input) + length(response)) from responses")][0][0]
    assert found[0] in (last + 1, last + 2)  # the last one perhaps before it was told
    assert found[1] == 2000 * found[0]
