"""Grammars of running sequences. They are compiled, and the tokens that may come next are found, beside the steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from lmkit.errors import RequestError
from lmkit.text import Tokenizer
from lmkit.turbo.plan import NewSequence

if TYPE_CHECKING:
    from lmkit.text.grammar import Guide


class Guides:
    """Makes the guides of an engine's sequences. One thread works for all; it releases the interpreter's lock."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._thread = ThreadPoolExecutor(1, "grammars")

    def prepare(self, grammar: str) -> None:
        """Begin to compile a request's grammar. Raises RequestError if this engine has no tokenizer."""
        if self._tokenizer is None:
            raise RequestError("unsupported_parameter", "an engine without a tokenizer follows no grammar", "grammar")
        self._thread.submit(self._guide, grammar, [])

    def begin(self, new: NewSequence) -> RunningGuide:
        """The guide of a sequence that enters, behind the tokens of its answer so far."""
        return RunningGuide(self._thread, lambda: self._guide(new.params.grammar, new.output_ids()))

    def close(self) -> None:
        self._thread.shutdown()

    def _guide(self, grammar: str, token_ids: list[int]) -> Guide:
        assert self._tokenizer is not None
        guide = self._tokenizer.grammars(self._vocab_size).guide(grammar)
        if token_ids:
            guide.advance(token_ids)
        return guide


class RunningGuide:
    """A guide whose next mask is computed while the model computes the next logits."""

    def __init__(self, thread: ThreadPoolExecutor, make: Callable[[], Guide]) -> None:
        self._thread = thread
        self._under_way: Future[Guide] = thread.submit(make)

    def advance(self, token_id: int) -> None:
        """Take in the token that was sampled."""
        guide = self._under_way.result()

        def step() -> Guide:
            guide.advance([token_id])
            return guide

        self._under_way = self._thread.submit(step)

    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice. Another thread may call `advance` meanwhile."""
        guide = self._under_way.result()
        return self._thread.submit(guide.forced).result() if guide.may_be_forced else []

    def allowed(self) -> np.ndarray:
        """int32 [ceil(vocab / 32)], a bit for each token that may come next. Valid until `advance`."""
        return self._under_way.result().allowed
