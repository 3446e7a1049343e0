"""Measures on a GPU which plans compute the products of a model fastest. Engines on such a GPU then use these plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from lmkit.errors import ConfigError, UnsupportedError
from lmkit.kernels.cuda import gemm, gemm_table, linear
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.gemm_table import BUCKETS, Entry, Key
from lmkit.kernels.cuda.module import Kernel
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load_model
from lmkit.turbo.runners.device import CudaDevice


@torch.inference_mode()
def tune_model(path: str | Path, device: CudaDevice, *, num_plans: int) -> tuple[list[Entry], Path]:
    """Measure the `num_plans` most promising plans of each shape and number of tokens. Returns the best ones and the
    file that has them now. Raises UnsupportedError or ConfigError."""
    if not device.has_kernels:
        raise UnsupportedError("lmkit tune needs CUDA kernels; `lmkit doctor` says what is missing")
    decoder = load_model(path, device=device.name)
    weights = list(tunable(decoder))
    if not weights:
        raise UnsupportedError(f"{path}: no linear has 4- or 8-bit weights that csrc/gemm.cu multiplies")
    device.compile(_kernels(weights, decoder.dtype, num_plans))
    table = gemm_table.table(weights[0].codes.device.type)
    try:
        return gemm_table.tune(weights, decoder.dtype, linear.library, num_plans=num_plans), table.path
    except OSError as error:
        raise ConfigError(f"{table.path} cannot be written: {error.strerror}; LMKIT_CACHE_DIR sets another") from error


def tunable(decoder: Decoder) -> Iterator[PackedWeight]:
    """A packed weight of each shape and format."""
    seen: set[Key] = set()
    for each in (*(part for layer in decoder.layers for part in layer.linears), decoder.lm_head):
        for packed in each.packed or ():
            if isinstance(packed.weight, PackedWeight):
                key = Key.of(packed.weight, decoder.dtype)
                if key not in seen:
                    seen.add(key)
                    yield packed.weight


def _kernels(weights: list[PackedWeight], dtype: torch.dtype, num_plans: int) -> Iterator[Kernel]:
    for weight in weights:
        for tokens in BUCKETS:
            for plan in gemm_table.promising(tokens, weight, num_plans):
                yield from gemm.kernels_of(weight, plan, dtype, tokens)
