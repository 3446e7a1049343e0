"""Several models in one server: which is loaded when, within a budget, and what requests see of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import httpx
import pytest

from lmkit.config import EngineConfig, ServerConfig
from lmkit.errors import CheckpointError, RequestError
from lmkit.serve import pool as pool_module
from lmkit.serve.app import create_app
from lmkit.serve.pool import ASLEEP_BYTES, ModelPool, PooledModel
from lmkit.turbo.request import StepOutput
from lmkit.turbo.transport.async_engine import AsyncEngine
from tests.serve.fake_engine import DEMO
from tests.serve.in_process import INFO, TEXT_PATH, TOKENIZER, ScriptedEngine

SIZE = 1 << 30


class Engine(ScriptedEngine):
    """Sleeps and wakes without a process, and says when."""

    def __init__(self, name: str, log: list[str], **options: Any) -> None:
        super().__init__(**options)
        self.state, self.name, self.log = "asleep", name, log
        self.has = False
        self.failure: Exception | None = None
        self.loads, self.answers = asyncio.Event(), asyncio.Event()  # a load, and each token, wait for these
        self.loads.set()
        self.answers.set()

    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[StepOutput]:
        async for output in super().generate(*args, **options):
            await self.answers.wait()
            yield output

    @property
    def has_process(self) -> bool:
        return self.has

    async def wake(self) -> None:
        self.state = "starting"
        await self.loads.wait()
        if self.failure is not None:
            self.state = "asleep"
            raise self.failure
        self.state, self.info, self.has = "ready", INFO, True
        self.log.append(f"wake {self.name}")

    async def sleep(self, *, keep_process: bool = True) -> None:
        self.state, self.has = "asleep", keep_process
        self.log.append(f"{'sleep' if keep_process else 'stop'} {self.name}")


class Setting:
    """A server of three models, within a budget for `room` of them."""

    def __init__(self, room: float, names: str = "abc", config: ServerConfig | None = None, **options: Any) -> None:
        self.log: list[str] = []
        self.engines = {name: Engine(name, self.log, **options) for name in names}
        models = [PooledModel(name, engine, nbytes=SIZE) for name, engine in self.engines.items()]
        self.pool = ModelPool(models, int(room * SIZE))
        self.app = create_app(self.pool, [TOKENIZER] * len(models), config or ServerConfig())
        transport = httpx.ASGITransport(self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def ask(self, model: str | None, **fields: Any) -> httpx.Response:
        named = {} if model is None else {"model": model}
        return await self.client.post(TEXT_PATH, json={"prompt": "Hi", **named, **fields})

    @property
    def resident(self) -> int:
        return sum(model.resident for model in self.pool.models)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "TURN_SECONDS", 0.02)
    monkeypatch.setattr(pool_module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(pool_module, "RETRY_SECONDS", (60.0, 60.0))  # tests say when the time has come


def test_many_requests_load_a_model_once() -> None:
    async def main() -> None:
        here = Setting(room=1)
        here.engines["a"].loads.clear()
        asked = [asyncio.ensure_future(here.ask("a")) for _ in range(16)]
        await until(lambda: here.pool.find("a").waiting == 16)
        here.engines["a"].loads.set()
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * 16
        assert here.log == ["wake a"]
        assert {answer.json()["model"] for answer in answers} == {"a"}

    run(main())


def test_the_model_that_was_used_least_recently_goes_to_sleep() -> None:
    async def main() -> None:
        here = Setting(room=2.5)
        for name in ("a", "b", "a", "c", "a"):
            assert (await here.ask(name)).status_code == 200
        assert here.log == ["wake a", "wake b", "sleep b", "wake c"]

    run(main())


def test_a_sleeping_process_ends_if_the_budget_has_no_room_for_it() -> None:
    async def main() -> None:
        here = Setting(room=1 + ASLEEP_BYTES / SIZE / 2)
        for name in ("a", "b"):
            await here.ask(name)
        assert here.log == ["wake a", "sleep a", "stop a", "wake b"]

    run(main())


def test_the_budget_holds_at_every_moment() -> None:
    async def main() -> None:
        here = Setting(room=1.7)
        over = []

        async def watch() -> None:
            while True:
                over.append(here.resident > here.pool.budget)
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        answers = await asyncio.gather(*(here.ask("abc"[i * i % 3]) for i in range(48)))
        watching.cancel()
        assert [answer.status_code for answer in answers] == [200] * 48
        assert not any(over)

    run(main())


def test_a_model_with_a_request_does_not_sleep_and_gives_way_after_it() -> None:
    """Its later requests wait for their turn. Nothing fails, and none waits for ever."""

    async def main() -> None:
        here = Setting(room=1)
        model, engine = here.pool.find("a"), here.engines["a"]
        engine.answers.clear()
        long = asyncio.ensure_future(here.ask("a"))
        await until(lambda: model.users)
        other = asyncio.ensure_future(here.ask("b"))
        await until(lambda: model.gives_way)
        later = asyncio.ensure_future(here.ask("a"))
        await until(lambda: model.waiting)
        assert here.log == ["wake a"]
        engine.answers.set()
        answers = [await request for request in (long, other, later)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert [line for line in here.log if "stop" not in line] == [
            "wake a", "sleep a", "wake b", "sleep b", "wake a"
        ]  # fmt: skip

    run(main())


def test_a_load_that_fails_is_told_to_all_and_tried_again_later() -> None:
    async def main() -> None:
        here = Setting(room=1)
        here.engines["a"].failure = CheckpointError("/secret/model.safetensors is truncated")
        here.engines["a"].loads.clear()
        asked = [asyncio.ensure_future(here.ask("a")) for _ in range(3)]
        await until(lambda: here.pool.find("a").waiting == 3)
        here.engines["a"].loads.set()
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [503] * 3
        assert {answer.json()["error"]["message"] for answer in answers} == {
            "the model does not load; the server's log says why"
        }
        assert "tried again in" in (await here.ask("a")).text  # at once, and without a load
        assert (await here.ask("b")).status_code == 200
        here.engines["a"].failure = None
        here.pool.find("a").retry_at = 0.0
        assert (await here.ask("a")).status_code == 200

    run(main())


def test_a_request_has_its_deadline_while_it_waits() -> None:
    async def main() -> None:
        here = Setting(room=1)
        here.engines["a"].loads.clear()
        answer = await here.ask("a", timeout=0.05)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        here.engines["a"].loads.set()
        assert (await here.ask("a")).status_code == 200
        assert here.log == ["wake a"]  # the load went on

    run(main())


def test_names() -> None:
    async def main() -> None:
        here = Setting(room=1)
        unknown, none = await here.ask("x"), await here.ask(None)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert none.status_code == 400
        assert here.log == []
        tokens = await here.client.post("/tokenize", json={"prompt": "Hi"})
        assert (tokens.status_code, tokens.json()["error"]["param"]) == (400, "model")

    run(main())


def test_what_the_server_says_of_its_models() -> None:
    async def main() -> None:
        here = Setting(room=1)
        await here.ask("b")
        cards = (await here.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["state"]) for card in cards] == [("a", "asleep"), ("b", "ready"), ("c", "asleep")]
        health = (await here.client.get("/health")).json()
        assert health == {"status": "ready", "models": {"asleep": 2, "ready": 1}}
        lines = (await here.client.get("/metrics")).text.splitlines()
        assert 'lmkit:engine_up{model_name="b"} 1.0' in lines
        assert 'lmkit:engine_up{model_name="a"} 0.0' in lines
        described = [line for line in lines if line.startswith("# TYPE")]
        assert len(described) == len(set(described))

    run(main())


def test_a_model_sleeps_after_its_keep_alive() -> None:
    async def main() -> None:
        here = Setting(room=3)
        here.pool.find("a").keep_alive = 0.05
        tending = asyncio.ensure_future(here.pool.tend())
        await asyncio.gather(here.ask("a"), here.ask("b"))
        while "sleep a" not in here.log:
            await asyncio.sleep(0.01)
        assert "sleep b" not in here.log
        assert (await here.ask("a")).status_code == 200
        tending.cancel()

    run(main())


def test_the_end_of_one_engine_does_not_touch_the_others() -> None:
    async def main() -> None:
        here = Setting(room=3)
        await asyncio.gather(here.ask("a"), here.ask("b"))
        here.engines["a"].state = "dead"
        tending = asyncio.ensure_future(here.pool.tend())
        while "stop a" not in here.log:
            assert (await here.ask("b")).status_code == 200
        here.pool.find("a").retry_at = 0.0
        assert (await here.ask("a")).status_code == 200
        assert not here.pool.is_dead
        tending.cancel()

    run(main())


def test_waiting_requests_are_told_of_a_shutdown() -> None:
    async def main() -> None:
        here = Setting(room=1)
        here.engines["a"].loads.clear()
        asked = asyncio.ensure_future(here.ask("a"))
        await until(lambda: here.engines["a"].state == "starting")
        await here.pool.shutdown()
        assert (await asked).json()["error"]["code"] == "shutting_down"

    run(main())


def test_too_many_waiting_requests_are_refused() -> None:
    async def main() -> None:
        engine = AsyncEngine(DEMO, EngineConfig(max_queue=1, max_batch_size=1))
        model = PooledModel("a", engine)
        model.waiting = 3
        with pytest.raises(RequestError, match="too many"):
            await ModelPool([model]).until_awake(model)

    run(main())


def test_the_routes_of_an_operator() -> None:
    async def main() -> None:
        here = Setting(room=2)

        async def post(path: str, **body: Any) -> Any:
            answer = await here.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        assert await post("/wake_up", model="a") == {"model": "a", "state": "ready"}
        assert await post("/sleep", model="a") == {"model": "a", "state": "asleep"}
        assert (await here.client.get("/is_sleeping?model=a")).json() == {"is_sleeping": True}
        assert (await here.ask("a")).status_code == 200
        await post("/sleep", model="a", level=2)
        assert here.log == ["wake a", "sleep a", "wake a", "stop a"]
        for body in ({}, {"model": "x"}, {"model": "a", "level": 3}):
            assert (await here.client.post("/sleep", json=body)).status_code in (400, 404)

    run(main())


def test_a_model_sleeps_when_its_requests_have_ended() -> None:
    async def main() -> None:
        here = Setting(room=2)
        model, engine = here.pool.find("a"), here.engines["a"]
        engine.answers.clear()
        asked = asyncio.ensure_future(here.ask("a"))
        await until(lambda: model.users)
        sleeping = asyncio.ensure_future(here.client.post("/sleep", json={"model": "a"}))
        await until(lambda: model.gives_way)
        assert here.log == ["wake a"]
        engine.answers.set()
        assert [answer.status_code for answer in await asyncio.gather(asked, sleeping)] == [200, 200]
        assert here.log == ["wake a", "sleep a"]

    run(main())


def test_a_reload_takes_new_files_and_keeps_the_old_if_they_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        here = Setting(room=2)
        await here.ask("a")
        broken = True

        async def measure(models: list[PooledModel]) -> None:
            if broken:
                raise CheckpointError("/secret/config.json is damaged")

        monkeypatch.setattr(here.pool, "measure", measure)
        before = here.pool.find("a").serving
        fingerprint = before.system_fingerprint
        answer = await here.client.post("/reload", json={"model": "a"})
        assert (answer.status_code, "secret" in answer.text) == (400, False)
        assert here.pool.find("a").serving is before
        assert here.pool.find("a").serving.system_fingerprint == fingerprint
        broken = False
        assert (await here.client.post("/reload", json={"model": "a"})).json() == {"model": "a", "state": "ready"}
        assert here.log == ["wake a", "sleep a", "wake a"]
        assert here.pool.find("a").serving.tokenizer is not before.tokenizer
        assert here.pool.find("a").serving.system_fingerprint != fingerprint
        assert (await here.ask("a")).status_code == 200

    run(main())


def test_only_an_administrator_puts_models_to_sleep() -> None:
    async def main() -> None:
        here = Setting(room=2, config=ServerConfig(api_keys=("user", "boss role=admin")))
        for key, status in (("user", 403), ("boss", 200), ("nobody", 401)):
            headers = {"authorization": f"Bearer {key}"}
            for path in ("/wake_up", "/sleep"):
                answer = await here.client.post(path, json={"model": "a"}, headers=headers)
                assert answer.status_code == status

    run(main())


def test_a_page_of_another_site_cannot_put_a_model_to_sleep() -> None:
    """It can post forms and plain text without asking."""

    async def main() -> None:
        here = Setting(room=2)
        answer = await here.client.post("/sleep", content='{"model": "a"}', headers={"content-type": "text/plain"})
        assert answer.status_code == 400
        assert here.log == []

    run(main())
