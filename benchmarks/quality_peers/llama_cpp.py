"""llama.cpp by llama-cpp-python: its IQ-quants, weighted by an importance matrix as its own tool collects it.

The matrix has the mean square of each input of a linear over the calibration rows. As with the other tools, only the
linears of the layers are rounded. Dense models only.
"""

from __future__ import annotations

import ctypes
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as ll
import torch
from torch import Tensor

from benchmarks.peers.llama_cpp import add_sizes, finish, gguf_name
from benchmarks.quality_peers.dense import load_float32, save_dense
from benchmarks.quality_peers.protocol import Job, run

RECIPES = {
    "iq4_xs": ll.LLAMA_FTYPE_MOSTLY_IQ4_XS,
    "iq3_xxs": ll.LLAMA_FTYPE_MOSTLY_IQ3_XXS,
    "iq2_s": ll.LLAMA_FTYPE_MOSTLY_IQ2_S,
}
Linears = dict[str, torch.nn.Linear]  # by GGUF's name of the weight


def quantize(job: Job) -> tuple[str, str]:
    torch.set_num_threads(job.threads)
    model = load_float32(Path(job.model))
    linears = _linears(model)
    job.checkpoint.mkdir()
    full = job.checkpoint / "full.gguf"
    _write(json.loads((Path(job.model) / "config.json").read_text()), linears, full)
    squares = _mean_squares(model, linears, torch.tensor(job.load_rows()))
    matrix = (ll.llama_model_imatrix_data * (len(squares) + 1))()  # ends with an entry without a name
    for entry, (name, values) in zip(matrix, squares.items(), strict=False):
        entry.name, entry.size = name.encode(), len(values)
        entry.data = ctypes.cast(values.data_ptr(), ctypes.POINTER(ctypes.c_float))
    params = ll.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.imatrix = RECIPES[job.recipe], job.threads, matrix
    status = ll.llama_model_quantize(str(full).encode(), str(_result(job)).encode(), ctypes.byref(params))
    full.unlink()
    if status:
        raise RuntimeError(f"llama_model_quantize returned {status}")
    return metadata.version("llama-cpp-python"), f"{job.recipe}, importance matrix"


def _result(job: Job) -> Path:
    return job.checkpoint / "model.gguf"


def _linears(model: Any) -> Linears:
    named = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {gguf_name(f"{name}.weight"): module for name, module in named.items() if ".layers." in name}


def _write(config: dict[str, Any], linears: Linears, out: Path) -> None:
    """A GGUF of the linears alone. Every architecture is called a Llama here: the rounding of a weight does not depend
    on it."""
    writer = gguf.GGUFWriter(out, "llama")
    add_sizes(writer, config)
    for name, linear in linears.items():
        writer.add_tensor(name, linear.weight.detach().half().numpy())
    finish(writer)


@torch.inference_mode()
def _mean_squares(model: Any, linears: Linears, rows: Tensor) -> dict[str, Tensor]:
    """float32 [in] of each linear."""
    sums = {name: torch.zeros(linear.in_features) for name, linear in linears.items()}
    for name, linear in linears.items():

        def add(module: Any, inputs: tuple[Tensor], total: Tensor = sums[name]) -> None:
            total += inputs[0].square().flatten(0, -2).sum(0)

        linear.register_forward_pre_hook(add)
    for batch in rows.split(4):
        model(batch, use_cache=False)
    return {name: total / rows.numel() for name, total in sums.items()}


def decode(job: Job) -> float:
    model = load_float32(Path(job.model))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(_result(job)).tensors}
    linears = _linears(model)
    for name, linear in linears.items():
        values = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        linear.weight.data.copy_(torch.from_numpy(values))
    save_dense(model, Path(job.model), job.dense)
    stored = sum(int(tensors[name].n_bytes) for name in linears)
    return 8 * stored / sum(linear.weight.numel() for linear in linears.values())


if __name__ == "__main__":
    run(quantize, decode)
