"""Section "machine": the peak rates of this GPU. Everything else is compared with these figures."""

from __future__ import annotations

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.timing import seconds_of
from lmkit.errors import LMKitError
from lmkit.kernels.cuda import module

NODES = 200  # of the graph that is timed


def run(context: Context) -> None:
    with context.attempt("machine"):
        _describe(context)
    for measure in (_copy, _read, _matmul, _launch):
        with context.attempt(measure.__name__.strip("_")):
            measure(context)


def _describe(context: Context) -> None:
    if context.rehearsal:
        context.row("GPU", name="none: emulated on the CPU, times mean nothing")
        return
    properties = torch.cuda.get_device_properties()
    context.row(
        "GPU", name=properties.name, sms=properties.multi_processor_count, memory=properties.total_memory,
        l2=properties.L2_cache_size, capability=list(torch.cuda.get_device_capability()), missing=module.missing(),
    )  # fmt: skip


def _buffer(context: Context) -> torch.Tensor:
    return torch.ones(1 << (12 if context.rehearsal else 29), device=context.device)  # 2 GiB


def _copy(context: Context) -> None:
    source = _buffer(context)
    target = torch.empty_like(source)
    seconds = seconds_of([lambda: target.copy_(source)] * 4, context.device)
    context.row("copy bandwidth", value=2 * source.nbytes / seconds, unit="bytes/s")


def _read(context: Context) -> None:
    """Measure the read bandwidth by a sum over rows, whose result is small."""
    source = _buffer(context).view(-1, 4096)
    out = torch.empty(len(source), device=context.device)
    seconds = seconds_of([lambda: torch.sum(source, 1, out=out)] * 4, context.device)
    context.row("read bandwidth", value=source.nbytes / seconds, unit="bytes/s")


def _matmul(context: Context) -> None:
    size = 64 if context.rehearsal else 8192
    a, b = (torch.randn(size, size, device=context.device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    seconds = seconds_of([lambda: torch.mm(a, b, out=out)] * 8, context.device, budget=0.5)
    context.row("bfloat16 matmul", value=2 * size**3 / seconds, unit="flops")


def _launch(context: Context) -> None:
    """Measure the least cost of one more kernel in a graph."""
    x = torch.zeros(1, device=context.device)
    seconds = seconds_of([lambda: x.add_(1)] * NODES, context.device)
    context.row("kernel in a graph", value=seconds, unit="s")


def install(context: Context) -> None:
    """Make kernels run on the device of the tensors. Raises LMKitError if they cannot run there."""
    if context.rehearsal:
        from tests import emulator

        emulator.install()
    elif (problem := module.missing()) is not None:
        raise LMKitError(f"nothing can be measured here: {problem}")
