"""`lmkit serve --dp N`: replicas behind one address give what one engine gives, and lose nothing when one is killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from lmkit import GenerationConfig, pipeline
from lmkit.cli import replicas
from lmkit.cli.main import app
from lmkit.cluster.config import ClusterConfig
from tests.cli.commands import mistake
from tests.serve.live import ROOT, Server

PROMPTS = [f"Tell me about the number {i} and a pirate." for i in range(12)]
TOKENS = 400  # so many that a stream still runs when its replica is killed
OPTIONS = ("--dp", "2", "--num-threads", "2", "--kv-memory", "64M", "--max-model-len", "2048")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["other"], "replicas are of one model"),
        (["--grpc-port", "0"], "no gRPC"),
        (["--tls-cert", "x.pem"], "use `lmkit up`"),
        (["--api-key-file", "keys"], "give the keys by --api-key"),
        (["--data-dir", "d"], "cannot share a folder"),
        (["--kv-disk-path", "d"], "use --kv-host-memory"),
        (["--proxy", "http://10.0.0.1:1"], "start servers without --dp"),
        (["--kv-events", "tcp://*:5557"], "port 0"),
        (["--api-key", "k requests_per_minute=3"], "no limits per minute"),
        (["--dp", "0"], "--dp"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], part: str) -> None:
    assert part in mistake("serve", "demo", "--dp", "2", *words)


def test_several_models_are_refused(tmp_path: Path) -> None:
    assert "describe their replicas in a file" in mistake("serve", tmp_path / "models.yaml", "--dp", "2")


def test_options_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ClusterConfig] = []
    monkeypatch.setattr(replicas, "run", found.append)
    monkeypatch.setenv("LMKIT_MAX_QUEUE", "7")
    words = ["--num-threads", "9", "--kv-memory", "3G", "--kv-host-memory", "30M", "--served-model-name", "a,b,c"]
    words += ["--api-key", "k", "--port", "0", "--kv-dtype", "int8", "--no-overlap", "--max-body", "1M"]
    assert CliRunner().invoke(app, ["serve", "demo", "--dp", "3", *words]).exception is None
    (config,) = found
    (group,) = config.models
    assert (group.called, group.bounds.min, group.bounds.max, group.cores) == ("a", 3, 3, 3)
    assert group.options == {
        "kv_memory": 1 << 30, "kv_host_memory": 10 << 20, "kv_dtype": "int8", "overlap": False, "max_queue": 7,
        "max_body": 1 << 20,
    }  # fmt: skip
    proxy = config.proxy
    assert (proxy.port, proxy.api_keys, proxy.aliases, proxy.max_body_bytes) == (
        0,
        ("k",),
        {"b": "a", "c": "a"},
        1 << 20,
    )


def test_a_replica_that_cannot_start_ends_it() -> None:
    command = [sys.executable, "-m", "lmkit", "serve", "demo", "--dp", "2", "--port", "0", "--kv-memory", "2K"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "holds no block" in ended.stdout
    assert "before it was ready; its lines above say why" in ended.stderr


def body(prompt: str, i: int, **fields: Any) -> dict[str, Any]:
    """Every other request draws."""
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": i % 2,
        "seed": i,
        "ignore_eos": True,
    } | fields


def replicas_of(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "serve" in child.cmdline()]


@pytest.mark.slow
def test_replicas_give_the_tokens_of_one_engine_and_a_killed_one_loses_nothing() -> None:
    with pipeline("demo", num_threads=1, max_model_len=2048) as pipe:
        configs = [
            GenerationConfig(max_new_tokens=TOKENS, temperature=i % 2, seed=i, ignore_eos=True)
            for i in range(len(PROMPTS))
        ]
        expected = [answer.text for answer in pipe(PROMPTS, configs, do_preprocess=False)]

    async def ask(http: httpx.AsyncClient, i: int, begun: asyncio.Semaphore) -> str:
        """One stream's text. It tells when it has begun."""
        text = ""
        async with http.stream("POST", "/v1/completions", json=body(PROMPTS[i], i, stream=True)) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                assert '"error":' not in line
                if line.startswith("data: {"):
                    begun.release()
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def all_answers(server: Server, victim: psutil.Process | None) -> list[str]:
        begun = asyncio.Semaphore(0)
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            asking = [asyncio.create_task(ask(http, i, begun)) for i in range(len(PROMPTS))]
            if victim is not None:
                for _ in range(len(PROMPTS)):
                    await begun.acquire()
                victim.kill()
            return await asyncio.gather(*asking)

    with Server(*OPTIONS, engine="lmkit.turbo.engine.engine:Engine") as server:
        assert asyncio.run(all_answers(server, None)) == expected
        assert len(replicas_of(server)) == 2
        for killed in range(4):  # a replica may have no stream at that moment: then the next one is killed
            assert asyncio.run(all_answers(server, replicas_of(server)[killed % 2])) == expected
            server.wait_for_line(rf"demo-{killed + 3} \| serving", 120)
            if "broke off in the middle of an answer" in server.log:
                break
        assert "broke off in the middle of an answer" in server.log, "one had streams when it was killed"
        assert asyncio.run(all_answers(server, None)) == expected
        turns = [{"role": "user", "content": "hello " * 60}]
        for turn in range(3):
            fields = {"model": "demo", "messages": turns, "max_tokens": 8}
            answer = server.post("/v1/chat/completions", json=fields).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= 60 * turn, "a conversation returns to the replica that has its KV"
            turns += [answer["choices"][0]["message"], {"role": "user", "content": "hello " * 60}]
