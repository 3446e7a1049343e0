"""Ordered implementations per op. A layer chooses one once and keeps it. A refusal states its reason.

impl = ops.linear_w4a8.select("cpu", in_features=4096, group_size=128)
packed = impl.pack(qtensor)          # only ops over packed weights have `pack`
y = impl(x, packed, bias)

If a selected implementation cannot run a single call, it hands the call on: `op.fall_back(name, reason)(...)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lmkit.errors import UnsupportedError
from lmkit.log import get_logger

log = get_logger(__name__)


def _accept_all(**traits: Any) -> str | None:
    return None


def _no_pack(*args: Any) -> Any:
    raise TypeError("this op has no packed weights")


@dataclass(frozen=True)
class ExpertLinears:
    """What an implementation of a linear has for the linears of many experts.

    `table` puts weights and biases of one shape together; None: it cannot. `multiply(x, places, table, by_token)`
    gives [T * k, N]: the product of the row of each of ops.Places with its expert's weight. Rows of x are those of
    places, and the result is float32; or with `by_token` they are those of tokens, and the result is in a dtype that
    the next product takes. On a CPU the bits are those of a call for each expert.
    """

    table: Callable[..., Any]
    multiply: Callable[..., Any]
    max_rows: int | None = None  # of an expert; with more on average, a call for each expert is faster
    half: bool = False  # x is of 16 bits
    in_parts: Callable[[], bool] = lambda: False  # more rows are computed in parts, not by a call for each expert


@dataclass(frozen=True)
class Implementation:
    """One way to run an op. `accepts(**traits)` returns None, or the reason why it cannot."""

    name: str  # "reference", "cpu.avx2", "cuda.sm90", ...
    device: str  # "cpu", "cuda", or "any"
    run: Callable[..., Any]
    accepts: Callable[..., str | None] = _accept_all
    pack: Callable[..., Any] = _no_pack
    priority: int = 0
    epilogue: bool = False  # of a linear: takes `dtype` and `residual`
    of_experts: ExpertLinears | None = None  # of a linear, for mixtures of experts
    # Of a linear: (packed, rows int64 [T], factor) -> float32 [T, in], these rows of the weight times the factor.
    rows: Callable[..., Any] | None = None

    @property
    def is_kernel(self) -> bool:
        """Whether it is made for one device; otherwise torch's operations compute it on any."""
        return self.device != "any"

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.run(*args, **options)


@dataclass
class Op:
    """One operation. Its signature's docstring is the specification, its reference implementation is the oracle."""

    name: str
    doc: str
    implementations: list[Implementation] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)  # calls handed on to another implementation, by reason

    def select(self, device: str, **traits: Any) -> Implementation:
        """The first implementation, by priority, that accepts the traits. Raises UnsupportedError with every reason."""
        reasons = []
        for impl in self.implementations:
            reason = None if impl.device in (device, "any") else f"runs on {impl.device}"
            reason = reason or impl.accepts(**traits)
            if reason is None:
                return impl
            reasons.append(f"{impl.name}: {reason}")
        raise UnsupportedError(f"no implementation of {self.name} on {device}: " + "; ".join(reasons))

    def fall_back(self, name: str, reason: str) -> Implementation:
        """The implementation `name`, for a call that the selected one cannot run. Each reason is logged once."""
        if reason not in self.fallbacks:
            log.warning("%s: %s; such calls run through its %s implementation, slowly", self.name, reason, name)
        self.fallbacks[reason] += 1
        return self.named(name)

    def register(self, implementation: Implementation) -> None:
        """Add an implementation. One with higher priority is asked first."""
        self.implementations.append(implementation)
        self.implementations.sort(key=lambda impl: -impl.priority)

    def named(self, name: str) -> Implementation:
        for impl in self.implementations:
            if impl.name == name:
                return impl
        raise UnsupportedError(f"{self.name} has no implementation {name!r}")


def op(signature: Callable[..., Any]) -> Op:
    """Turn a signature with a docstring into an Op. The signature's body is never run."""
    return Op(signature.__name__, signature.__doc__ or "")


def implements(
    target: Op,
    name: str,
    *,
    device: str,
    accepts: Callable[..., str | None] = _accept_all,
    pack: Callable[..., Any] = _no_pack,
    priority: int = 0,
    epilogue: bool = False,
    of_experts: ExpertLinears | None = None,
    rows: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as an implementation of `target`. Higher priority is asked first."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        target.register(Implementation(name, device, run, accepts, pack, priority, epilogue, of_experts, rows))
        return run

    return register
