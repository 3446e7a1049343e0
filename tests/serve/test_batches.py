"""/v1/batches: every request of a file once, at the lowest priority, whatever ends meanwhile."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from lmkit.config import ServerConfig
from lmkit.serve.auth import Owner
from lmkit.serve.batches import batch as records
from lmkit.serve.batches.batch import ENDED, Batch
from lmkit.serve.batches.runner import Batches
from lmkit.turbo.request import Request, StepOutput
from lmkit.turbo.transport.steps import Rest
from lmkit.web.budget import Budget
from tests.serve.in_process import App, ScriptedEngine, app_of
from tests.serve.live import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def line(name: str, prompt: str = "Hi", url: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 3, "seed": 0, **fields}
    body |= {"prompt": prompt} if url == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def send(client: openai.OpenAI, lines: Sequence[Any], url: Any = COMPLETIONS, **options: Any) -> Any:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", **options)


def ended(client: openai.OpenAI, batch: Any, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while (batch := client.batches.retrieve(batch.id)).status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """By custom_id, each of which stands once."""
    rows = [json.loads(row) for row in client.files.content(file_id).text.splitlines()] if file_id else []
    assert max(Counter(row["custom_id"] for row in rows).values(), default=1) == 1
    return {row["custom_id"]: row for row in rows}


def connect(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_the_openai_client(client: openai.OpenAI, url: str) -> None:
    lines = [line(f"r{i}", url=url, seed=i) for i in range(20)] + [line("bad", url=url, temprature=1)]
    batch = send(client, lines, url, metadata={"of": "mine"})
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", url, {"of": "mine"})
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 21, "completed": 20, "failed": 1}
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert good.keys() == {f"r{i}" for i in range(20)}
    for i in range(20):
        response = good[f"r{i}"]["response"]
        alone = client.post(url.removeprefix("/v1"), body=lines[i]["body"], cast_to=object)
        assert response["status_code"] == 200
        assert response["body"]["choices"] == alone["choices"]  # type: ignore[index]
        assert response["body"]["usage"] == alone["usage"]  # type: ignore[index]
    assert bad["bad"]["response"]["status_code"] == 400
    assert bad["bad"]["response"]["body"]["error"]["param"] == "temprature"
    assert batch.id in [each.id for each in client.batches.list(limit=1)]


@pytest.mark.parametrize(
    ("lines", "number", "param", "says"),
    [
        ([line("a"), line("a")], 2, "custom_id", "stands twice"),
        ([line("a"), line("b", url=CHAT)], 2, "url", "the batch's endpoint"),
        ([line("a", stream=True)], 1, "body", "not streamed"),
        ([line("a", priority=-5)], 1, "body", "leave it out"),
        ([line("")], 1, "custom_id", "1 to 512"),
        ([line("a") | {"method": "GET"}], 1, "url", "method POST"),
        ([line("a") | {"more": 1}], 1, None, "no request of a batch"),
        ([[1]], 1, None, "no request of a batch"),
        ([], None, None, "no requests"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_its_line(
    client: openai.OpenAI, lines: list[Any], number: int | None, param: str | None, says: str
) -> None:
    batch = ended(client, send(client, lines))
    assert (batch.status, batch.output_file_id, batch.request_counts.completed) == ("failed", None, 0)
    (error,) = batch.errors.data
    assert (error.line, error.param) == (number, param)
    assert says in error.message


def test_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl([line("a"), line("b", prompt="x" * 5000), line("c")]) + b"\n\n" + b"[" * 9000)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())  # as editors of other systems begin a file
    total, errors = records.check_file(path, COMPLETIONS, 1000)
    assert (total, [error["line"] for error in errors]) == (2, [2, 6])
    monkeypatch.setattr(records, "MAX_LINES", 1)
    assert records.check_file(path, COMPLETIONS, 10_000)[1][-1]["code"] == "too_many_requests"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "1 day"}, "completion_window"),
        ({"completion_window": "999h"}, "completion_window"),
        ({"input_file_id": "file-0"}, "file_id"),
        ({"metadata": {"a": "x" * 600}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "expires_after"),
        ({"wibble": 1}, "wibble"),
    ],
)
def test_a_field_is_honoured_or_refused(fields: dict[str, Any], param: str) -> None:
    app = App(ScriptedEngine())
    form = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
    file = app.request("POST", "/v1/files", **form).json()["id"]
    body = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"} | fields
    answer = app.post("/v1/batches", body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


# ---- in this process


class Gated(ScriptedEngine):
    """Counts the requests under way, which wait for `gate`."""

    def __init__(self) -> None:
        super().__init__(lambda request: [70])
        self.gate = asyncio.Event()
        self.num_running = self.most_running = 0

    async def generate(self, request: Request, rest: Rest = None) -> AsyncGenerator[StepOutput]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.gate.wait()
            async for step in super().generate(request):
                yield step
        finally:
            self.num_running -= 1


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


class Here:
    """Batches in this event loop, with a clock of their own."""

    def __init__(self, engine: ScriptedEngine, answer_bytes: int = 1 << 20) -> None:
        app = app_of(engine, ServerConfig())
        self.clock = Clock()
        self.store = Batches(
            app,
            app.state.data,
            answers=Budget(answer_bytes, what="answers"),
            space=1 << 20,
            quota=1.0,
            max_line_bytes=1 << 20,
            max_running=lambda: engine.config.sequences_per_step,
            is_ending=lambda: False,
            clock=self.clock,
        )

    async def send(self, lines: Sequence[Any], owner: Owner = Owner("me", "", 2.0, 0), hours: int = 24) -> Batch:
        files = self.store.files
        name = files.new_id()
        files.path(name).write_bytes(jsonl(lines))
        files.add(files.make(name, owner.own(owner.tenant), "batch", "in", 86400))
        fields = {"endpoint": COMPLETIONS, "input_file_id": name, "completion_window": f"{hours}h"}
        return await self.store.create(owner, 3600 * hours, 86400, **fields)

    async def until_ended(self, batch: Batch) -> None:
        if (task := self.store._tasks.get(batch.id)) is not None:  # otherwise it has ended
            await asyncio.wait_for(task, 20)

    def content(self, file_id: str | None) -> list[Any]:
        return [json.loads(row) for row in self.store.files.path(file_id or "").read_text().splitlines()]


def own(name: str, **fields: Any) -> dict[str, Any]:
    return line(name, **{"model": "model", **fields})


def test_requests_run_after_all_others_as_their_client() -> None:
    async def main() -> None:
        engine = Gated()
        engine.gate.set()
        here = Here(engine)
        batch = await here.send([own("a"), own("b", timeout=5.0)])
        await here.until_ended(batch)
        assert batch.status == "completed"
        assert {request.priority for request in engine.requests} == {1000}
        assert {(request.tenant, request.weight) for request in engine.requests} == {("me", 2.0)}
        assert sorted(request.timeout or 0 for request in engine.requests) == [5.0, 86400.0]

    asyncio.run(main())


def test_a_batch_fills_the_engine_and_not_its_queue() -> None:
    async def main() -> None:
        engine = Gated()
        here = Here(engine)
        most = engine.config.sequences_per_step
        two = [await here.send([own(f"{i}") for i in range(most)]) for _ in range(2)]
        while engine.num_running < most:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert engine.most_running == most
        engine.gate.set()
        for batch in two:
            await here.until_ended(batch)
        assert engine.most_running == most
        assert len(engine.requests) == 2 * most

    asyncio.run(main())


def test_answers_take_bounded_memory() -> None:
    async def main() -> None:
        engine = Gated()
        engine.gate.set()
        here = Here(engine, answer_bytes=1000)
        batch = await here.send([*(own(f"{i}") for i in range(20)), own("large", n=20)])
        await here.until_ended(batch)
        assert (batch.status, batch.completed, batch.failed) == ("completed", 20, 1)  # small ones wait for room
        (row,) = here.content(batch.error_file_id)
        assert (row["custom_id"], row["response"]["status_code"]) == ("large", 413)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_batch_that_ends_early_says_so_for_each_request(how: str) -> None:
    async def main() -> None:
        engine = Gated()
        here = Here(engine)
        batch = await here.send([own(f"{i}") for i in range(100)], hours=1)
        while not engine.num_running:
            await asyncio.sleep(0.01)
        if how == "cancelled":
            await here.store.cancel(batch)
            assert batch.status == "cancelling"
        here.clock.now += 3601 if how == "expired" else 0
        await here.until_ended(batch)
        assert engine.num_running == 0
        assert (batch.status, batch.failed, batch.completed) == (how, 100, 0)
        rows = here.content(batch.error_file_id)
        assert sorted(row["custom_id"] for row in rows) == sorted(f"{i}" for i in range(100))
        assert {(row["response"], row["error"]["code"]) for row in rows} == {(None, f"batch_{how}")}
        assert batch.output_file_id is None

    asyncio.run(main())


def test_a_full_disk_ends_the_batch_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = Gated()
        engine.gate.set()
        here = Here(engine)
        write = os.write

        def full(descriptor: int, data: Any) -> int:
            if b"custom_id" in bytes(data):
                raise OSError(28, "No space left on device")
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", full)
        batch = await here.send([own(f"{i}") for i in range(200)])
        await here.until_ended(batch)
        assert batch.status == "failed"
        assert batch.errors[0]["message"] == "the server's disk: No space left on device"

    asyncio.run(main())


def test_a_result_that_a_kill_cut_off_is_none(tmp_path: Path) -> None:
    path = tmp_path / "results"
    whole = records.result("batch_1", 1, "a", {}) + records.result("batch_1", 2, "b", {})
    path.write_bytes(whole + records.result("batch_1", 3, "c", {})[:-9])
    assert records.recorded(path) == {"a", "b"}
    assert path.read_bytes() == whole


def test_a_record_that_cannot_be_read_stops_no_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    config = ServerConfig(data_dir=str(tmp_path))
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "batch_0.json").write_text('{"id": 5}')
    app = App(ScriptedEngine(), config)
    assert app.request("GET", "/v1/batches").json()["data"] == []
    app.app.state.data.close()


# ---- kills


def test_nothing_is_lost_or_done_twice_when_the_server_is_killed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    names = {f"r{i}" for i in range(120)}
    with Server("--data-dir", str(tmp_path), "--max-batch-size", "16") as server:
        client = connect(server)
        batch = send(client, [line(name, "SLOW", max_tokens=5) for name in sorted(names)])
        server.until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 20)
        server.process.kill()
        server.process.wait()
    kept = next(path for path in (tmp_path / "files").glob("file-*") if b"custom_id" in path.read_bytes()
                and b"batch_req" in path.read_bytes())  # fmt: skip
    before = kept.read_bytes()
    assert 20 < before.count(b"\n") < 120
    with kept.open("ab") as file:
        file.write(b'{"id": "batch_req_x", "custom_id": "r')  # as a kill in a write leaves it
    with Server("--data-dir", str(tmp_path)) as server:
        client = connect(server)
        batch = ended(client, batch)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": 120, "completed": 120, "failed": 0}
        assert results(client, batch.output_file_id).keys() == names
        assert client.files.content(batch.output_file_id).read().startswith(before)


def test_a_drain_does_not_wait_for_batches(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with Server("--data-dir", str(tmp_path), "--drain-seconds", "600") as server:
        client = connect(server)
        batch = send(client, [line("short"), *(line(f"r{i}", "SLOW", max_tokens=3500) for i in range(9))])
        server.until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)
        assert server.terminate(seconds=60) == 0
    with Server("--data-dir", str(tmp_path)) as server:
        client = connect(server)
        server.until(lambda: server.metric("lmkit:num_requests_running") == 9)  # it goes on
        client.batches.cancel(batch.id)
        batch = ended(client, batch)
        assert batch.request_counts.model_dump() == {"total": 10, "completed": 1, "failed": 9}


def test_a_killed_engine_costs_no_request() -> None:
    with Server("--max-batch-size", "8") as server:
        client = connect(server)
        batch = send(client, [line(f"r{i}", "SLOW", max_tokens=5) for i in range(60)])
        server.until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 5)
        server.worker().kill()
        batch = ended(client, batch)
        assert batch.request_counts.model_dump() == {"total": 60, "completed": 60, "failed": 0}
        assert len(results(client, batch.output_file_id)) == 60


@pytest.mark.slow
def test_a_request_that_ends_the_engine_is_found() -> None:
    with Server() as server:
        client = connect(server)
        lines = [line(f"r{i}") for i in range(10)]
        batch = ended(client, send(client, [*lines[:5], line("deadly", "KILL"), *lines[5:]]))
        assert batch.request_counts.model_dump() == {"total": 11, "completed": 10, "failed": 1}
        (found,) = results(client, batch.error_file_id).values()
        assert (found["custom_id"], found["response"]["status_code"]) == ("deadly", 503)


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16, "store": False}, "response"),
        ("/v1/embeddings", {"input": ["Hi", "there"]}, "list"),
    ],
)
def test_other_routes_go_through_a_batch(client: openai.OpenAI, url: str, body: dict[str, Any], kind: str) -> None:
    request = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "demo", **body}}
    batch = ended(client, send(client, [request], url))
    assert batch.status == "completed"
    answer = results(client, batch.output_file_id)["a"]["response"]
    assert (answer["status_code"], answer["body"]["object"]) == (200, kind)


def test_a_batch_is_its_client_s_alone() -> None:
    with Server("--api-key", "one tokens_per_minute=100", "--api-key", "two") as server:
        one, two = connect(server, "one"), connect(server, "two")
        batch = ended(one, send(one, [line(name, max_tokens=90) for name in "abc"]))
        assert batch.request_counts.completed == 3  # it runs without the key, and beside its limits
        assert one.completions.create(model="demo", prompt="Hi", max_tokens=1).usage
        assert list(two.batches.list()) == []
        for call in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        with pytest.raises(openai.NotFoundError):
            two.files.content(batch.output_file_id)
        with pytest.raises(openai.NotFoundError):
            two.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")


def test_a_file_that_a_batch_reads_stays(client: openai.OpenAI) -> None:
    batch = send(client, [line(f"r{i}", "SLOW", max_tokens=400) for i in range(3)])
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    assert ended(client, batch).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="the batch is cancelled"):
        client.batches.cancel(batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_metrics_count_batches_and_their_lines() -> None:
    app = App(ScriptedEngine())
    fields: dict[str, Any] = {
        "owner": Owner(), "endpoint": COMPLETIONS, "input_file_id": "file", "completion_window": "24h", "created_at": 0,
        "expires_at": 1, "results_id": "r", "failures_id": "f", "kept_seconds": 1,
    }  # fmt: skip
    kept = app.app.state.batches._batches
    kept["a"] = Batch(id="a", status="in_progress", total=10, completed=4, failed=1, **fields)
    kept["b"] = Batch(id="b", status="cancelled", total=10, completed=3, **fields)
    text = app.request("GET", "/metrics").text
    for status, count in (("in_progress", 1), ("cancelled", 1), ("completed", 0)):
        assert f'lmkit:batches{{status="{status}"}} {count}.0\n' in text
    for state, count in (("open", 5), ("completed", 7), ("failed", 1)):
        assert f'lmkit:batch_lines{{state="{state}"}} {count}.0\n' in text
