"""Budgets of memory: what all requests together may hold of one kind, such as bodies or answers that nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from lmkit.errors import RequestError


class Budget:
    """`total` bytes for all requests, of which one request may hold `each`.

    If one more byte does not fit, the largest holder that can still be refused is. Large requests therefore cannot shut
    small ones out, however many there are.
    """

    def __init__(self, total: int, *, what: str, each: int | None = None) -> None:
        """`what` names the bytes in errors: "bodies of requests"."""
        self.total, self.each = total, total if each is None else each
        self.what = what
        self.used = 0
        self.holders: set[Share] = set()

    def share(self) -> Share:
        """The bytes of one request. Use it as a context manager: its end gives them back."""
        return Share(self)

    def make_room(self, wanting: Share) -> None:
        """Refuse requests until the total is kept. Raises RequestError if `wanting` is one of them."""
        while self.used > self.total:
            largest = max((s for s in self.holders if s is wanting or s.on_refusal), key=lambda share: share.num_bytes)
            largest.refuse(f"the server's memory for {self.what} is used up ({self.total >> 20} MiB); try again later")
        if wanting.num_bytes > self.each:
            wanting.refuse(f"the memory of one request for {self.what} is used up ({self.each >> 20} MiB)")
        wanting.check()


class Share:
    """The bytes that one request holds of a budget.

    `on_refusal` is set as long as the request can still be refused. It must let go of the bytes and end the request
    with `refusal`.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.num_bytes = 0
        self.refusal: str | None = None  # no exception: its traceback would keep the bytes alive
        self.on_refusal: Callable[[], None] | None = None

    def add(self, num_bytes: int) -> None:
        """Hold more bytes, or fewer if negative. Raises RequestError if the budget does not have them."""
        self.num_bytes += num_bytes
        self._budget.used += num_bytes
        if self.num_bytes:
            self._budget.holders.add(self)
        else:
            self._budget.holders.discard(self)
        if num_bytes > 0:
            self._budget.make_room(self)

    def try_add(self, num_bytes: int) -> bool:
        """Hold more bytes if nobody need be refused for them."""
        budget = self._budget
        fits = budget.used + num_bytes <= budget.total and self.num_bytes + num_bytes <= budget.each
        if fits:
            self.add(num_bytes)
        return fits

    def refuse(self, message: str) -> None:
        self.clear()
        self.refusal = message
        if self.on_refusal is not None:
            self.on_refusal()

    def check(self) -> None:
        """Raise RequestError if the request was refused."""
        if self.refusal is not None:
            raise RequestError("overloaded", self.refusal)

    def clear(self) -> None:
        self.add(-self.num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()
