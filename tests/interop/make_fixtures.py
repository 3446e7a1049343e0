"""Make the checkpoints in fixtures/: a tiny random Llama, quantized and run by another tool in that tool's own Python.

    PYTHON -m tests.interop.make_fixtures FIXTURE        one of FIXTURES

expected.safetensors lies beside the tool's files. It holds token ids and the logits that the tool itself computes for
them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "fixtures"
GROUP, VOCAB = 32, 128
KEPT = ("config.json", "quantize_config.json", "quantization_config.json")


def tiny_model() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, initializer_range=0.2,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def rows() -> torch.Tensor:
    """Random calibration rows, int64 [16, 32]."""
    return torch.randint(0, VOCAB, (16, 32), generator=torch.Generator().manual_seed(4))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(rows()[:1, :16]).logits[0].float()


def llm_compressor(out: Path, symmetric: bool) -> torch.Tensor:
    import datasets
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP}
    recipe = GPTQModifier(ignore=["lm_head"], config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
    source = str(out.parent / "source")  # the tool reads the model's origin from it
    tiny_model().save_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    data = datasets.Dataset.from_dict(
        {"input_ids": rows().tolist(), "attention_mask": torch.ones_like(rows()).tolist()}
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(_tokenizer()))
    oneshot(
        model=model, tokenizer=tokenizer, dataset=data, recipe=recipe, max_seq_length=32, num_calibration_samples=16
    )
    model.save_pretrained(out, save_compressed=True)
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    dense = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=config)
    return logits_of(dense.eval())


def gptqmodel(out: Path, version: str) -> torch.Tensor:
    os.cpu_count = lambda: 4  # it does not start with fewer than three
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.config import FORMAT, AWQConfig, GPTQConfig

    grid: dict[str, Any] = {
        "bits": 4,
        "group_size": GROUP,
        "device": "cpu",
        "offload_to_disk": False,
        "pack_impl": "original",
    }
    config = {
        "v1": lambda: GPTQConfig(format=FORMAT.GPTQ, sym=True, **grid),
        "v2": lambda: GPTQConfig(format=FORMAT.GPTQ_V2, sym=False, **grid),
        "act-order": lambda: GPTQConfig(format=FORMAT.GPTQ, sym=True, desc_act=True, **grid),
        "head": lambda: GPTQConfig(format=FORMAT.GPTQ, sym=True, lm_head=True, **grid),
        "awq": lambda: AWQConfig(format=FORMAT.GEMM, sym=False, **grid),
    }[version]()
    with tempfile.TemporaryDirectory() as source:
        tiny_model().save_pretrained(source)
        shutil.copyfile(_tokenizer(), Path(source) / "tokenizer.json")
        model = GPTQModel.load(source, config, dtype=torch.float32, backend=BACKEND.TORCH)
        model.quantize([{"input_ids": row, "attention_mask": [1] * 32} for row in rows().tolist()], batch_size=4)
        model.save(str(out))
    return logits_of(GPTQModel.load(str(out), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model.eval())


def auto_round(out: Path, form: str) -> torch.Tensor:
    from auto_round import AutoRound

    rounder = AutoRound(
        tiny_model(),
        tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_file=str(_tokenizer())),
        scheme="W4A16", sym=form == "auto_gptq", group_size=GROUP, nsamples=16, seqlen=32, batch_size=8, iters=20,
        dataset=[{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in rows().split(8)],
        amp=False, device_map="cpu", enable_torch_compile=False,
    )  # fmt: skip
    model, _ = rounder.quantize()
    logits = logits_of(model)
    rounder.save_quantized(str(out), format=form)
    return logits


def _tokenizer() -> Path:
    return Path(__file__).parents[2] / "lmkit" / "demo" / "model" / "tokenizer.json"


FIXTURES: dict[str, Callable[[Path], torch.Tensor]] = {
    "llm-compressor-sym": lambda out: llm_compressor(out, True),
    "llm-compressor-asym": lambda out: llm_compressor(out, False),
    "gptqmodel-v1": lambda out: gptqmodel(out, "v1"),
    "gptqmodel-v2": lambda out: gptqmodel(out, "v2"),
    "gptqmodel-act-order": lambda out: gptqmodel(out, "act-order"),
    "gptqmodel-head": lambda out: gptqmodel(out, "head"),
    "gptqmodel-awq": lambda out: gptqmodel(out, "awq"),
    "auto-round-gptq": lambda out: auto_round(out, "auto_gptq"),
    "auto-round-awq": lambda out: auto_round(out, "auto_awq"),
}


def main() -> None:
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            logits = FIXTURES[name](Path(folder) / "made")
            weights = next((Path(folder) / "made").rglob("*.safetensors"))
            target = FOLDER / name
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            shutil.copy(weights, target / "model.safetensors")
            for file in KEPT:
                if (weights.parent / file).exists():
                    shutil.copy(weights.parent / file, target)
        save_file({"token_ids": rows()[0, :16].clone(), "logits": logits.contiguous()}, target / "expected.safetensors")
        sys.stderr.write(f"made {name}\n")


if __name__ == "__main__":
    main()
