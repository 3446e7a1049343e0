"""lmkit as an attention implementation of transformers, whose modules call it by name.

What a call computes depends on who runs the module: a pass that only looks (trace.py), or a step of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "lmkit"


class Attends(Protocol):
    """Who computes the calls of a pass."""

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """q [1, num_heads, T, D], k and v [1, num_kv_heads, T, ..] -> [1, T, num_heads, dim of v]."""

    def mask(self, options: dict[str, Any]) -> None:
        """A module asks for a mask. There is none: what a token sees is known from its place."""


_RUNNING: ContextVar[Attends] = ContextVar("attends")


@contextmanager
def attending(who: Attends) -> Iterator[None]:
    """Inside, `who` computes the calls of this thread."""
    token = _RUNNING.set(who)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    return _RUNNING.get().attend(module, query, key, value, options | {"attention_mask": attention_mask}), None


def _mask(**options: Any) -> None:
    _RUNNING.get().mask(options)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


def use(module: nn.Module, name: str) -> None:
    """Have all parts of a module call the attention implementation `name`."""
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name
