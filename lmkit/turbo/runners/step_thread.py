"""A thread that carries out one step after the other.

Python between two steps is slow: the step has filled the caches with weights. So a result goes through queues of the
interpreter itself, without the locks and conditions of a Future.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]  # of a call: its result, or what it raised


class StepThread:
    """Calls functions in their order, inside of the context that `around` makes in the thread."""

    def __init__(self, name: str, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=_serve, args=(around, self._calls), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._calls.put, None)  # an engine that nobody closes leaves no thread

    def submit(self, function: Callable[..., T], *args: Any) -> Callable[[], T]:
        """Returns a function that waits for the result, or raises what the call raised. It is called once."""
        call = _Call(function, args)
        self._calls.put(call)
        return call.wait

    def close(self) -> None:
        """Wait for the calls so far, and end the thread."""
        self._end()
        self._thread.join()


class _Call(Generic[T]):
    def __init__(self, function: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self._outcome: SimpleQueue[Outcome] = SimpleQueue()

    def __call__(self) -> None:
        try:
            self._outcome.put((self._function(*self._args), None))
        except BaseException as error:  # noqa: BLE001 - the ticket raises it
            self._outcome.put((None, error))

    def wait(self) -> T:
        result, error = self._outcome.get()
        if error is not None:
            raise error
        found: T = result
        return found


def _serve(around: Callable[[], AbstractContextManager[None]], calls: SimpleQueue[Callable[[], None] | None]) -> None:
    with around():
        while (call := calls.get()) is not None:
            call()
            del call  # a waiting thread keeps nothing of the last step alive
