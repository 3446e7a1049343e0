"""Grammars of running sequences. They are compiled, and the tokens that may come next are found, beside the steps.

Two threads work for all sequences, and release the interpreter's lock: no mask waits for a grammar that is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from lmkit.errors import RequestError
from lmkit.text import Tokenizer
from lmkit.turbo.plan import NewSequence
from lmkit.turbo.repetition import REASONING, Repetitions
from lmkit.turbo.request import SamplingParams

if TYPE_CHECKING:
    from lmkit.text.grammar import Grammars, Guide


class Guides:
    """Makes the guides of an engine's sequences."""

    def __init__(self, read_tokenizer: Callable[[], Tokenizer] | None, vocab_size: int) -> None:
        """`read_tokenizer` is called by the threads, for the first grammar and later ones: reading takes a while."""
        self._read_tokenizer, self._vocab_size = read_tokenizer, vocab_size
        self._grammars: Grammars | None = None
        self._thread, self._compiler = ThreadPoolExecutor(1, "grammars"), ThreadPoolExecutor(1, "compiler")

    def has(self, tenant: str, grammar: str) -> bool:
        """Whether a grammar of this tenant is compiled. Raises RequestError if this engine has no tokenizer."""
        if self._read_tokenizer is None:
            raise RequestError("unsupported_parameter", "an engine without a tokenizer follows no grammar", "grammar")
        return self._grammars is not None and self._grammars.has(grammar, tenant)

    def compile(self, tenant: str, grammar: str) -> Future[None]:
        """Begin to compile a grammar, up to the mask of its first token. The result is an error if that fails."""

        def work() -> None:
            if self._guide(tenant, grammar, []).has_failed:
                raise RequestError("invalid_request", "the grammar cannot be followed", "grammar")

        return self._compiler.submit(work)

    def begin(self, new: NewSequence) -> RunningGuide:
        """The guide of a sequence that enters, after the tokens of its answer so far."""
        params, known = new.params, new.output_ids()
        return RunningGuide(self._thread, lambda: self._guide(new.tenant, params.grammar, known), params, known)

    def close(self) -> None:
        self._compiler.shutdown(cancel_futures=True)
        self._thread.shutdown()

    def _guide(self, tenant: str, grammar: str, token_ids: list[int]) -> Guide:
        assert self._read_tokenizer is not None
        self._grammars = self._read_tokenizer().grammars(self._vocab_size)
        guide = self._grammars.guide(grammar, tenant)
        if token_ids:
            guide.advance(token_ids)
        return guide


class RunningGuide:
    """A guide whose next mask is computed while the model computes the next logits."""

    def __init__(
        self, thread: ThreadPoolExecutor, make: Callable[[], Guide], params: SamplingParams, known: Sequence[int]
    ) -> None:
        """`known` are the tokens of the answer so far, which `make` gives to the guide."""
        self._thread, self._reasoning_end = thread, params.reasoning_end
        self._repetitions = Repetitions(params.repetition_stop or REASONING, params.reasoning_end)
        self._take(known)
        self._under_way: Future[Guide] = thread.submit(lambda: self._held(make()))

    def advance(self, token_id: int) -> None:
        """Take in the token that was sampled."""
        guide = self._under_way.result()
        self._take([token_id])

        def step() -> Guide:
            guide.advance([token_id])
            return self._held(guide)

        self._under_way = self._thread.submit(step)

    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice. Another thread may call `advance` meanwhile."""
        guide = self._under_way.result()
        return self._thread.submit(guide.forced).result() if guide.may_be_forced else []

    def allowed(self) -> np.ndarray:
        """int32 [ceil(vocab / 32)], a bit for each token that may come next. Valid until `advance`."""
        return self._under_way.result().allowed

    def _take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids if self._reasoning_end >= 0 else ():
            self._repetitions.push(token_id)

    def _held(self, guide: Guide) -> Guide:
        """`guide`, which allows nothing but the end of a reasoning that repeats itself."""
        word, bit = divmod(self._reasoning_end, 32)
        if self._repetitions.repeats and guide.allowed[word] >> bit & 1:
            guide.allowed[:] = 0
            guide.allowed[word] = np.array(1 << bit, np.uint32).view(np.int32)
        return guide
