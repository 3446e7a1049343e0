"""Section "experts": a sparse layer of Qwen3-30B-A3B's shape, 4-bit weights. One product has all experts, inside a
graph; and a call for each expert, which the host makes once it knows the tokens of each."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.context import Context
from benchmarks.gpu.models import GROUP, random_qtensor
from benchmarks.gpu.timing import host_seconds_of, seconds_of, synchronize
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.blocks.moe import MoESpec
from lmkit.layers.linear import Weights
from lmkit.layers.moe import MoE

HIDDEN, SPEC = 2048, MoESpec(128, 8, MLPSpec(768))
TINY_HIDDEN, TINY = 128, MoESpec(4, 2, MLPSpec(128))
TOKENS = (1, 4, 16, 64, 256)
COPIES = 4  # inputs that choose different experts, in turn


def layer(spec: MoESpec, hidden: int, device: str, activations: str) -> MoE:
    weights: Weights = {"mlp.router": torch.randn(spec.num_experts, hidden, device=device).half() / 20}
    for role in spec.mlps:
        inner = spec.expert.intermediate_size
        for part, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            weights[f"{role}.{part}"] = random_qtensor(*shape, device)
    moe = MoE(spec, weights, "cuda")
    for linear in moe.linears:
        linear.pack(activations)
    return moe


def run(context: Context) -> None:
    device, spec = context.device, TINY if context.rehearsal else SPEC
    hidden = TINY_HIDDEN if context.rehearsal else HIDDEN
    for activations, what in (("exact", "sparse layer"), ("int8", "sparse layer, int8 inputs")):
        with context.attempt(what):
            _measure(context, what, layer(spec, hidden, device, activations), hidden)


def _measure(context: Context, what: str, moe: MoE, hidden: int) -> None:
    device, spec = context.device, moe.spec
    for tokens in (2,) if context.rehearsal else TOKENS:
        inputs = [torch.randn(tokens, hidden, device=device).half() for _ in range(COPIES)]
        seconds = seconds_of([partial(moe, x) for x in inputs], device, budget=0.1)
        apart = host_seconds_of(partial(_apart, moe, inputs[0]))
        bound = context.peak().seconds(*_work(spec, hidden, tokens))
        context.row(what, tokens=tokens, seconds=seconds, seconds_apart=apart, bound=bound)


def _apart(moe: MoE, x: Tensor) -> None:
    """A call for each expert."""
    weights, experts = moe._route(moe.router(x).float(), moe.routing, None)
    moe._computed_apart(x, weights, experts)
    synchronize(x.device.type)


def _work(spec: MoESpec, hidden: int, tokens: int) -> tuple[float, float]:
    """Bytes of the experts that have a token if all are equally liked, and operations."""
    weights, missed = 3 * hidden * spec.expert.intermediate_size, 1 - spec.experts_per_token / spec.num_experts
    active = spec.num_experts * (1 - missed**tokens)
    return active * weights * (0.5 + 3 / GROUP), 2.0 * tokens * spec.experts_per_token * weights
