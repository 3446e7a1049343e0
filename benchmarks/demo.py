"""The main job end to end, offline, on the bundled model or another: quantize, evaluate, serve both, route, talk.

    python -m benchmarks.demo [--model MODEL] [--keep DIR]

Each part is the command that a user would type. It runs in a process of its own, and no process is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.table import Table

from benchmarks.english import english

console = Console()
LMKIT = [sys.executable, "-m", "lmkit"]
READY_SECONDS = 120
CODE = "import os\nimport sys\n\n\ndef main("


@dataclass(frozen=True)
class Job:
    """What the demo does with a model."""

    model: str = "demo"
    question: str = "Write a Python function `is_empty`: Return True if the queue is empty, False otherwise."
    prompt: str = CODE
    quantize: tuple[str, ...] = ("--recipe", "awq_w4a16_g128")

    @property
    def source(self) -> str:
        """The name of the original."""
        return Path(self.model).stem

    @property
    def quantized(self) -> str:
        return f"{self.source}-awq-w4-kv8"


# Its rows are few, so that two cores are done in some minutes.
REAL = ("--recipe", "awq_w4a16_g128", "--num-samples", "16")


@dataclass(frozen=True)
class Talk:
    """The answers of one model, and their speed."""

    chat: str
    completion: str
    ttft_ms: float  # median time to first token
    tokens_per_s: float  # of one stream, after its first token


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a checkpoint or a GGUF file in place of the bundled model")
    parser.add_argument("--keep", type=Path, help="keep the quantized checkpoint in this new folder")
    arguments = parser.parse_args()
    job = Job()
    if arguments.model is not None:
        job = Job(arguments.model, "What is the capital of France?", "The capital of France is", REAL)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkit-demo-"))
        quantized = arguments.keep or Path(scratch) / job.quantized
        options = [*job.quantize, "--kv-bits", "8"]
        if arguments.model is not None:
            text = Path(scratch) / "english.txt"
            text.write_text(english()[0])
            options += ["--calibration", str(text)]
        step(f"lmkit quantize {job.model} {' '.join(options)}; a server of the original starts meanwhile")
        servers = {job.source: stack.enter_context(started(*serve(job.source, job.model)))}
        subprocess.run([*LMKIT, "quantize", job.model, "-o", str(quantized), *options, "--no-eval"], check=True)
        step("lmkit eval, the quantized model against the original, on held-out text; its server starts meanwhile")
        servers[job.quantized] = stack.enter_context(started(*serve(job.quantized, str(quantized))))
        quality = run_json("eval", str(quantized), "--against", job.model)
        sizes = {job.source: run_json("inspect", job.model), job.quantized: run_json("inspect", str(quantized))}
        step("lmkit serve (twice) behind lmkit proxy, and the openai client")
        nodes = [option for server in servers.values() for option in ("--node", wait_for_address(server))]
        proxy = stack.enter_context(started("proxy", "--port", "0", *nodes))
        talks = talk_to(job, list(servers), wait_for_address(proxy))
    for name, talk in talks.items():
        console.print(
            f"[bold]{name}[/bold] completes {job.prompt!r} with\n  {talk.completion!r}\nand answers\n  {talk.chat!r}"
        )
    console.print(table(job, sizes, quality, talks))
    console.print(f"done in {time.perf_counter() - start:.0f} s")


def step(title: str) -> None:
    console.print(f"\n[bold]{title}", highlight=False)


def run_json(*command: str) -> dict[str, Any]:
    result = subprocess.run([*LMKIT, *command, "--json"], check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(result.stdout))


def serve(name: str, path: str) -> list[str]:
    return ["serve", path, "--port", "0", "--served-model-name", name]


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Start an lmkit process, and end it."""
    process = subprocess.Popen([*LMKIT, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_address(process: subprocess.Popen[str]) -> str:
    """The address in the process's "... on http://..." line. Ends the demo if the process ends before."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(r"on (http://\S+)", line):
            threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would stop the process
            return found[1]
    raise SystemExit("a process ended before it was ready:\n" + "".join(seen))


def talk_to(job: Job, models: list[str], proxy: str) -> dict[str, Talk]:
    client = openai.OpenAI(base_url=f"{proxy}/v1", api_key="none", max_retries=0)
    served = sorted(model.id for model in client.models.list())
    console.print(f"proxy on {proxy} routes {served}")
    assert served == sorted(models), served
    return {name: talk(job, client, name) for name in models}


def talk(job: Job, client: openai.OpenAI, model: str) -> Talk:
    """Chat and completions, with and without streaming. Both ways must give the same text."""
    messages: list[Any] = [{"role": "user", "content": job.question}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=96, temperature=0)
    streamed = ""
    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=96, temperature=0, stream=True
    ):
        streamed += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    answer = chat.choices[0].message.content or ""
    assert streamed == answer, (streamed, answer)
    completion = client.completions.create(model=model, prompt=job.prompt, max_tokens=24, temperature=0)
    first, rate = zip(*(time_stream(client, model) for _ in range(5)), strict=True)
    return Talk(answer, completion.choices[0].text, 1000 * sorted(first)[2], sorted(rate)[2])


def time_stream(client: openai.OpenAI, model: str, num_tokens: int = 128) -> tuple[float, float]:
    """(seconds to the first token, tokens/s after it) of one streamed completion."""
    start = time.perf_counter()
    first = 0.0
    count = 0
    stream = client.completions.create(
        model=model, prompt=CODE, max_tokens=num_tokens, temperature=0, stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "cache_salt": uuid.uuid4().hex},  # the prompt is computed each time
    )  # fmt: skip
    for chunk in stream:
        if chunk.choices and not first:
            first = time.perf_counter() - start
        if chunk.usage:
            count = chunk.usage.completion_tokens
    return first, (count - 1) / (time.perf_counter() - start - first)


def table(job: Job, sizes: dict[str, Any], quality: dict[str, Any], talks: dict[str, Talk]) -> Table:
    """A column for each model, so that the table fits 80 characters."""
    result = Table(title=f"{job.source}, held-out text; one request at a time", title_justify="left")
    result.add_column("")
    columns = []
    for name, talk in talks.items():
        weights, far = sizes[name]["weights"], quality["divergence"]
        original = name == job.source
        result.add_column(name, justify="right")
        columns.append(
            {
                "bits of a weight": f"{weights['bits_per_linear_weight']:.2f}",
                "weights, MB": f"{weights['file_bytes'] / 1e6:.1f}",
                "perplexity": f"{far['reference_perplexity'] if original else quality['perplexity']:.3f}",
                "KL to the original, nats": "-" if original else f"{far['kl_mean']:.4f}",
                "same most likely token": "-" if original else f"{far['same_top']:.1%}",
                "time to first token, ms": f"{talk.ttft_ms:.0f}",
                "tokens/s": f"{talk.tokens_per_s:.0f}",
            }
        )
    for figure in columns[0]:
        result.add_row(figure, *(column[figure] for column in columns))
    return result


if __name__ == "__main__":
    main()
