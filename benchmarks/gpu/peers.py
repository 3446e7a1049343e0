"""4-bit products of other projects: torch's own, and kernels from wheels in a folder (`--peers`).

A wheel is unpacked, and only the library of its kernels is loaded; nothing is installed. If a kernel does not load, a
row says why. Weights are random and are not packed: the time of a product does not depend on their values.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.context import Context

GROUP = 128
# vLLM's number of the type "unsigned 4 bits, 8 subtracted": bits of the fraction, the bias, and the encoding of NaN.
UINT4_LESS_8 = 4 << 8 | 8 << 17 | 1 << 50
Product = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Peer:
    name: str
    dtype: torch.dtype
    make: Callable[[], Product]


def gemms(context: Context, n: int, k: int) -> Iterator[Peer]:
    """The kernels that load. Each of the others gets a row."""
    sources: dict[str, Callable[[Context, int, int], Peer]] = {
        "torch tinygemm": _tinygemm, "vLLM Marlin": _marlin, "TurboMind": _turbomind,
    }  # fmt: skip
    for name, source in sources.items():
        with context.attempt(name, n=n, k=k):
            yield source(context, n, k)


def _tinygemm(context: Context, n: int, k: int) -> Peer:
    if context.device == "cpu":
        raise RuntimeError("needs a GPU")

    def make() -> Product:
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=context.device)
        packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
        scales = torch.rand(k // GROUP, n, 2, device=context.device).bfloat16()
        return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)

    return Peer("torch tinygemm", torch.bfloat16, make)


def _marlin(context: Context, n: int, k: int) -> Peer:
    """Marlin in its lightest form: symmetric, with float16 scales."""
    _load_vllm(_unpacked(context, "vllm"))
    op = torch.ops._C.marlin_gemm.default
    sms = torch.cuda.get_device_properties().multi_processor_count

    def make() -> Product:
        known: dict[str, Any] = {
            "b_q_weight": torch.randint(-(2**31), 2**31 - 1, (k // 16, n * 2), device=context.device).int(),
            "b_scales": torch.rand(k // GROUP, n, device=context.device).half(),
            "workspace": torch.zeros(4 * sms, dtype=torch.int32, device=context.device),
            "b_q_type": UINT4_LESS_8, "b_type_id": UINT4_LESS_8, "b_q_type_id": UINT4_LESS_8,
            "size_n": n, "size_k": k, "is_k_full": True, "use_atomic_add": False, "use_fp32_reduce": True,
            "is_zp_float": False, "has_zp": False,
        }  # fmt: skip

        def product(x: Tensor) -> Any:
            given = known | {"a": x, "size_m": len(x)}
            return op(*(given.get(argument.name) for argument in op._schema.arguments))

        return product

    return Peer("vLLM Marlin", torch.float16, make)


def _turbomind(context: Context, n: int, k: int) -> Peer:
    folder = _unpacked(context, "turbomind")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    linear: Any = importlib.import_module("turbomind").Linear

    def make() -> Product:
        layer = linear(in_features=k, out_features=n, bias=False, quant_method="awq", w_bit=4, group_size=GROUP)
        for name, rows in (("qweight", k), ("qzeros", k // GROUP)):
            words = torch.randint(-(2**31), 2**31 - 1, (rows, n // 8), device=context.device)
            setattr(layer, name, words.int())
        layer.scales = torch.rand(k // GROUP, n, device=context.device).half()
        layer.post_init()
        product: Product = layer
        return product

    return Peer("TurboMind", torch.float16, make)


@cache
def _load_vllm(folder: Path) -> None:
    libraries = sorted(folder.glob("vllm/_C*.so"), key=lambda path: "stable" not in path.name)
    errors = []
    for library in libraries:
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            errors.append(f"{library.name}: {error}")
        if hasattr(torch.ops._C, "marlin_gemm"):
            return
    raise RuntimeError("; ".join(errors) or f"no library with marlin_gemm in {folder.name}")


def _unpacked(context: Context, name: str) -> Path:
    if context.peers is None:
        raise RuntimeError("not asked for (--peers)")
    return _unzip(context.peers, name)


@cache
def _unzip(folder: Path, name: str) -> Path:
    wheels = sorted(folder.glob(f"{name}-*.whl"))
    if not wheels:
        raise RuntimeError(f"no wheel of {name} in {folder}")
    target = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    with zipfile.ZipFile(wheels[-1]) as wheel:
        wheel.extractall(target)
    return target
