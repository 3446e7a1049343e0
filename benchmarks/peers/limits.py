"""The tokens per second that no engine can exceed at a point."""

from __future__ import annotations

from benchmarks.ceilings import Ceilings
from benchmarks.peers.catalog import Point
from benchmarks.peers.protocol import Facts
from benchmarks.random_llama import Shape

LAST_TOKEN_ONLY = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def prompt_linear(shape: Shape) -> int:
    """Parameters of the matrices that every token of a prompt needs. In the last layer that is K and V alone."""
    sizes = shape.linears()
    return shape.num_linear - sum(n * k for n, k in (sizes[name] for name in LAST_TOKEN_ONLY))


def possible(ceilings: Ceilings, shape: Shape, facts: Facts, point: Point) -> float:
    """Weights and the prompts' KV are read once, and linears take two operations for each parameter and token. All else
    is left out: attention's operations, the head, activations."""
    if point.steps:
        tokens, parameters, kv_tokens = point.batch, shape.num_linear, point.prompt_tokens
    else:
        tokens, parameters, kv_tokens = point.prompt_tokens, prompt_linear(shape), 0
    read = facts.weight_bytes + kv_tokens * shape.kv_token_values * facts.kv_bytes
    return tokens / max(read / ceilings.bytes_per_s, 2 * tokens * parameters / ceilings.fastest_ops)
