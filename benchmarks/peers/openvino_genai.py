"""OpenVINO GenAI: int4 asymmetric in groups of 128, its continuous batching, dynamic quantization of activations."""

from __future__ import annotations

import itertools
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.peers.protocol import KV_GIB, Facts, Options, main

GROUP = 128


class OpenVino:
    def __init__(self, options: Options) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = KV_GIB
        scheduler.max_num_seqs = options.max_batch
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        properties = {
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
            "INFERENCE_NUM_THREADS": options.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "KV_CACHE_PRECISION": "u8",
        }
        self.pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
        self.params = genai.GenerationConfig(max_new_tokens=options.max_context, ignore_eos=True)
        self.ids = itertools.count()
        self.handles: list[Any] = []
        self.facts = Facts(
            metadata.version("openvino-genai"),
            "int4 asymmetric g128, dynamic quantization g128, u8 KV, latency hint, no prefix cache",
            _read_bytes(options.model),
            1.0,
            _read_bytes(options.model, "lm_head"),
        )

    def prefill(self, prompts: list[list[int]]) -> None:
        for handle in self.handles:
            handle.stop()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        tensors = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        self.handles = [self.pipeline.add_request(next(self.ids), tensor, self.params) for tensor in tensors]
        waiting = list(self.handles)
        while waiting:
            self.pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]

    def step(self) -> int:
        self.pipeline.step()
        return len(self.handles)


def prepare(source: Path, out: Path) -> None:
    """Export with NNCF's weight compression. The output head and the embedding have 8 bits, as by its default."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    scheme = OVWeightQuantizationConfig(bits=4, sym=False, group_size=GROUP, ratio=1.0)
    model = OVModelForCausalLM.from_pretrained(source, export=True, quantization_config=scheme, compile=False)
    partial = out.with_suffix(".partial")
    model.save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(partial)
    for converted, name in zip(_tokenizers(tokenizer), ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
        ov.save_model(converted, partial / f"{name}.xml")
    partial.rename(out)


def _tokenizers(tokenizer: Any) -> Any:
    import openvino_tokenizers

    return openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)


def _read_bytes(folder: Path, part: str = "") -> int:
    """Bytes of all constants with `part` in their names except those of the embedding. A token reads only one row of
    it."""
    model = ov.Core().read_model(folder / "openvino_model.xml")
    constants = {
        op.get_friendly_name(): op.get_byte_size() for op in model.get_ops() if op.get_type_name() == "Constant"
    }
    return sum(size for name, size in constants.items() if part in name and "embed_tokens" not in name)


if __name__ == "__main__":
    main(OpenVino, prepare)
