"""The tokens per second that no engine can exceed at a point."""

from __future__ import annotations

from benchmarks.ceilings import Ceilings
from benchmarks.peers.catalog import Point
from benchmarks.peers.protocol import Facts
from benchmarks.random_llama import Shape

ALL_TOKENS = ("self_attn.k_proj", "self_attn.v_proj")  # of the last layer


def prompt_linear(shape: Shape) -> int:
    """Parameters of the matrices that every token of a prompt needs. In the last layer that is K and V alone."""
    sizes = shape.linears()
    last = sum(n * k for n, k in (sizes[name] for name in ALL_TOKENS))
    return shape.num_active - shape.num_active // shape.layers + last


def possible(ceilings: Ceilings, shape: Shape, facts: Facts, point: Point) -> float:
    """Weights and the prompts' KV are read once, and linears take two operations for each parameter and token. All else
    is left out: attention's operations, the head, activations."""
    if point.steps:
        tokens, parameters, kv_tokens = point.batch, shape.num_active, point.prompt_tokens
    else:
        tokens, parameters, kv_tokens = point.prompt_tokens, prompt_linear(shape), 0
    read = facts.bytes_read(shape.share_read(tokens)) + kv_tokens * shape.kv_token_values * facts.kv_bytes
    return tokens / max(read / ceilings.bytes_per_s, 2 * tokens * parameters / ceilings.fastest_ops)
