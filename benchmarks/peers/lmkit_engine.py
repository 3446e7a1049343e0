"""lmkit: AWQ weights, int8 activations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmkit
from benchmarks.peers.protocol import KV_GIB, Facts, Options, main
from benchmarks.random_llama import make_awq
from lmkit.config import EngineConfig
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.kernels.cpu import isa
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams


class LmkitEngine:
    def __init__(self, options: Options, **config: Any) -> None:
        defaults: dict[str, Any] = {"kv_memory": KV_GIB << 30, "prefix_cache": False}
        if options.drafts:
            defaults |= {"speculate": "ngram", "max_draft_tokens": options.drafts}
        settings = EngineConfig(
            num_threads=options.threads,
            max_batch_size=options.max_batch,
            max_model_len=options.max_context,
            max_queue=max(1024, options.max_batch),
            **defaults | config,
        )
        self.engine = Engine(str(options.model), settings)
        self.facts = self._facts(options, settings)
        self.running: list[str] = []
        self.names = itertools.count()

    def _facts(self, options: Options, settings: EngineConfig) -> Facts:
        with CheckpointReader(options.model) as reader:
            head = reader.nbytes("lm_head.")
            layers = reader.nbytes() - reader.nbytes("model.embed_tokens.") - head
        if settings.lm_head == "int8":  # one byte a weight and three for each group of 128, not two
            head = head // 2 * 131 // 128
        kv = self.engine.info.kv_dtype
        note = f"AWQ g128, int8 activations, {kv} KV, {settings.lm_head} head, no prefix cache, {isa.describe()}"
        return Facts(lmkit.__version__, note, layers + head, 1.0 if kv == "int8" else 2.0, head)

    def prefill(self, prompts: list[list[int]]) -> None:
        for name in self.running:
            self.engine.abort(name)
        while self.engine.has_work():
            self.engine.step()
        self.running = [str(next(self.names)) for _ in prompts]
        params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
        for name, ids in zip(self.running, prompts, strict=True):
            self.engine.add(Request(request_id=name, prompt_ids=ids, params=params))
        started: set[str] = set()
        while len(started) < len(prompts):
            started |= {output.request_id for output in self.engine.step() if output.token_ids}

    def step(self) -> int:
        outputs = self.engine.step()
        failed = next((output.error for output in outputs if output.error), None)
        if failed:
            raise RuntimeError(failed)
        return sum(len(output.token_ids) for output in outputs)

    def answer(self, prompt: list[int], count: int) -> Iterator[list[int]]:
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0)
        self.engine.add(Request(request_id=str(next(self.names)), prompt_ids=prompt, params=params))
        while self.engine.has_work():
            yield from (output.token_ids for output in self.engine.step() if output.token_ids)


def prepare(source: Path, out: Path) -> None:
    make_awq(source, out)


if __name__ == "__main__":
    main(LmkitEngine, prepare)
