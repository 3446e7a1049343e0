"""transformers: bfloat16, scaled dot product attention, a static batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.peers.protocol import Facts, Options, main


class Transformers:
    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        embedding = self.model.get_input_embeddings().weight
        read = sum(p.nbytes for p in self.model.parameters()) - embedding.nbytes
        head = self.model.get_output_embeddings().weight.nbytes
        self.facts = Facts(transformers.__version__, "bfloat16, torch " + torch.__version__, read, head_bytes=head)
        self.cache: Any = None
        self.last = torch.empty(0)  # int64 [batch, 1]

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> None:
        """Run the first prompt and copy its cache to the other sequences. They get memory of their own, and preparation
        is shorter."""
        self.cache = transformers.DynamicCache(config=self.model.config)
        self._run(torch.tensor(prompts[:1]))
        if len(prompts) > 1:
            self.cache.batch_repeat_interleave(len(prompts))
            self.last = self.last.repeat(len(prompts), 1)

    @torch.inference_mode()
    def step(self) -> int:
        self._run(self.last)
        return len(self.last)

    def _run(self, ids: torch.Tensor) -> None:
        logits = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.last = logits[:, -1].argmax(-1, keepdim=True)


def prepare(source: Path, out: Path) -> None:
    raise NotImplementedError("transformers reads the checkpoint as it is")


if __name__ == "__main__":
    main(Transformers, prepare)
