"""`lmkit proxy` as a process of its own: how it starts, is managed, is killed, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from lmkit.cli.proxy import app
from lmkit.errors import LMKitError
from lmkit.web.running import running as running_processes
from tests.proxy.fakes import Exchange, FakeNode, eventually, nodes, streamed

pytestmark = pytest.mark.anyio

PROGRAM = """
import atexit, sys
from lmkit.cli.proxy import app
from lmkit.errors import LMKitError
atexit.register(lambda: print("modules:", *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr))
try:
    app(prog_name="lmkit proxy")
except LMKitError as error:
    print(f"lmkit: {error}", file=sys.stderr)
    sys.exit(2)
"""


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *arguments, stdout=pipe, stderr=pipe)


async def lmkit_proxy(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command that ends; in this process, which is faster."""
    result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
    if isinstance(result.exception, LMKitError):
        return 2, result.stdout, f"lmkit: {result.exception}\n"
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    root = logging.getLogger("lmkit")
    before = list(root.handlers), root.level, root.propagate
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


@contextlib.asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await start("--port", "0", *arguments)
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
        assert line.startswith("proxy on http://127.0.0.1:"), line
        yield process, line.removeprefix("proxy on ").strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_nodes_are_managed_and_survive_kill_9(tmp_path: Path) -> None:
    state = str(tmp_path / "state.json")
    async with nodes(FakeNode("a"), FakeNode("b", models=("n",))) as (a, b):
        async with running("--node", a.url, "--state-file", state) as (process, url):
            async with httpx.AsyncClient(base_url=url, verify=False, trust_env=False) as http:
                assert (
                    await http.post("/v1/completions", json={"model": "m"})
                ).status_code == 200  # ready means usable
            code, out, _ = await lmkit_proxy("add", b.url, "--proxy", url)
            assert (code, out) == (0, f"added {b.url}, n\n")
            code, out, _ = await lmkit_proxy("remove", a.url, "--proxy", url)
            assert (code, out) == (0, f"removed {a.url}\n")
            process.kill()
            await process.wait()
        async with running("--node", a.url, "--state-file", state) as (_, url):
            code, out, _ = await lmkit_proxy("status", "--json", "--proxy", url)
            assert [(node["url"], node["healthy"]) for node in json.loads(out)["data"]] == [(b.url, True)]
            code, out, _ = await lmkit_proxy("status", "--proxy", url)
            assert code == 0
            assert "up" in out
            code, _, err = await lmkit_proxy("remove", a.url, "--proxy", url)
            assert code == 2
            assert "there is no node" in err


async def test_keys_from_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "proxy.yaml"
    config.write_text("api_keys: [user]\nadmin_keys: [admin]\ndrain_seconds: 0\n")
    monkeypatch.delenv("LMKIT_API_KEY", raising=False)
    async with running("--config", str(config)) as (_, url):
        code, _, err = await lmkit_proxy("status", "--proxy", url)
        assert (code, err.count("\n")) == (2, 1)
        assert "API key" in err
        code, _, _ = await lmkit_proxy(
            "add", "http://127.0.0.1:9", "--proxy", url, "--admin-key", "admin", "--model", "x"
        )
        assert code == 0
        monkeypatch.setenv("LMKIT_API_KEY", "admin")
        code, out, _ = await lmkit_proxy("status", "--json", "--proxy", url)
        assert json.loads(out)["data"][0]["models"] == ["x"]


async def test_nodes_are_managed_with_a_key_that_only_this_user_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No header tells a local program from a page or a relay on this machine, so an address proves nothing."""
    monkeypatch.setenv("LMKIT_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("LMKIT_API_KEY", raising=False)
    async with running() as (_, url), httpx.AsyncClient(base_url=url, verify=False, trust_env=False) as http:
        body = {"url": "http://127.0.0.1:9", "models": ["x"]}
        assert (await http.post("/admin/nodes", json=body)).status_code == 401
        assert (await http.get("/admin/nodes", headers={"authorization": "Bearer x"})).status_code == 401
        code, _, _ = await lmkit_proxy("add", body["url"], "--model", "x", "--proxy", url)
        assert code == 0
        (file,) = (tmp_path / "run").glob("*.json")
        assert file.stat().st_mode & 0o077 == 0
        (entry,) = running_processes()
        assert entry.admin_key is not None
        assert len(entry.admin_key) > 40
        code, _, err = await lmkit_proxy("status", "--proxy", url.replace("127.0.0.1", "127.0.0.1.example.invalid"))
        assert (code, "no proxy answers" in err) == (2, True)  # the key goes to this machine only
        monkeypatch.setenv("LMKIT_STATE_DIR", str(tmp_path / "of another user"))
        code, _, err = await lmkit_proxy("status", "--proxy", url)
        assert (code, "API key" in err) == (2, True)


async def test_sigterm_lets_requests_finish_and_exits_0() -> None:
    release = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        await exchange.chunk(b"data: 1\n\n")
        await release.wait()
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    async with nodes(FakeNode(script=script)) as (node,), running("--node", node.url) as (process, url):
        async with httpx.AsyncClient(base_url=url, verify=False, trust_env=False, timeout=10) as http:
            request = asyncio.create_task(http.post("/v1/completions", json={"model": "m"}))
            await eventually(lambda: len(node.requests) == 1)
            process.send_signal(signal.SIGTERM)

            async def refuses() -> None:
                while True:
                    try:
                        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                    except ConnectionError:  # refused; reset, if it was in the listening socket's queue as that closed
                        return
                    writer.close()
                    await asyncio.sleep(0.01)

            await asyncio.wait_for(refuses(), 5)
            assert process.returncode is None
            release.set()
            assert (await request).content == b"data: 1\n\ndata: [DONE]\n\n"
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert process.stderr is not None
        modules = (await process.stderr.read()).decode().partition("modules:")[2].split()
    assert {"httpx", "uvicorn", "lmkit"} <= set(modules)
    assert not {"torch", "numpy", "transformers", "numba", "fastapi"} & set(modules)


async def test_drain_ends_after_its_time(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.until_left()

    config = tmp_path / "proxy.json"
    async with nodes(FakeNode(script=script)) as (node,):
        config.write_text(json.dumps({"drain_seconds": 0.2, "nodes": [{"url": node.url}]}))
        async with running("--config", str(config)) as (process, url):
            async with httpx.AsyncClient(base_url=url, verify=False, trust_env=False, timeout=10) as http:
                begun = asyncio.Event()
                request = asyncio.create_task(streamed(http, begun))
                await begun.wait()
                process.send_signal(signal.SIGTERM)
                body = await request
            assert json.loads(body.split(b"\n\n")[1][6:])["error"]["code"] == "shutting_down"
            assert await asyncio.wait_for(process.wait(), 5) == 0


async def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    config, state = tmp_path / "proxy.yaml", tmp_path / "state.json"
    config.write_text("prot: 1\n")
    state.write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (("--config", str(config)), f"{config}:1: Object contains unknown field `prot`; did you mean port?"),
            (("--config", str(tmp_path / "none")), "No such file"),
            (("--node", "nonsense"), "--node: 'nonsense' is not a node's URL"),
            (("--policy", "fastest"), "--policy 'fastest': expected prefix, least_tokens,"),
            (("--state-file", str(state), "--port", "0"), "repair or delete it"),
            (("--port", port), f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            (("--host", "no.such.host.invalid", "--port", "0"), "cannot listen on no.such.host.invalid:0"),
            (("--port", port, "status"), "options come after the command"),
        ]
        for arguments, message in cases:
            code, out, err = await lmkit_proxy(*arguments)
            assert (code, out, err.count("\n")) == (2, "", 1), (arguments, err)
            assert message in err
        process = await start("--port", port)
        out_bytes, err_bytes = await asyncio.wait_for(process.communicate(), 20)
        assert (process.returncode, out_bytes) == (2, b"")
        assert b"cannot listen" in err_bytes
    code, _, err = await lmkit_proxy("status", "--proxy", f"http://127.0.0.1:{port}")
    assert (code, err.count("\n")) == (2, 1)
    assert "no proxy answers" in err


async def test_keys_teams_and_usage_by_commands(tmp_path: Path) -> None:
    store = str(tmp_path / "keys.db")
    async with nodes(FakeNode("a")) as (a,), running("--node", a.url, "--key-store", store) as (_, url):

        async def run(*arguments: str) -> str:
            status, out, error = await lmkit_proxy(*arguments, "--proxy", url)
            assert status == 0, error
            return out

        await run("teams", "set", "shop", "--limit", "money/month=2.5", "--model", "m*")
        secret = (await run("keys", "create", "till", "--team", "shop", "--limit", "tokens/day=99000")).strip()
        made = json.loads(await run("keys", "create", "b", "--expires", "30d", "--json"))
        assert secret.startswith("lmk-")
        shown = await run("keys", "list")
        assert "till" in shown
        assert "tokens/day=99000" in shown
        assert secret not in shown
        changed = await run("keys", "update", made["id"], "--name", "c", "--expires", "never", "--team", "shop")
        assert changed == f"changed {made['id']} (c)\n"
        await run("keys", "revoke", made["id"])
        listed = json.loads(await run("keys", "list", "--json"))["data"]
        assert [(key["name"], key["team"], key["revoked"]) for key in listed] == [
            ("till", "shop", False), ("c", "shop", True),
        ]  # fmt: skip
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as http:
            body, headers = {"model": "m"}, {"authorization": f"Bearer {secret}"}
            assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 403
            await run("teams", "set", "shop", "--limit", "money/month=")  # the model has no price
            assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        (row,) = json.loads(await run("usage", "--by", "team,model", "--format", "json"))["data"]
        assert (row["team"], row["model"], row["requests"]) == ("shop", "m", 1)
        assert (await run("usage", "--by", "team", "--format", "csv")).splitlines()[1].startswith("shop,1,")
        assert "till" in await run("usage")
        assert json.loads(await run("teams", "list", "--json"))["data"][0]["limits"] == {}
        for wrong in (
            ("keys", "create", "a", "--limit", "tokens/day"), ("keys", "create", "a", "--expires", "soon"),
            ("keys", "create", "a", "--limit", "tokens/hour=1"), ("teams", "remove", "shop"),
            ("keys", "revoke", "none"),
        ):  # fmt: skip
            status, out, error = await lmkit_proxy(*wrong, "--proxy", url)
            assert (status, out, error.count("\n")) == (2, "", 1), wrong
