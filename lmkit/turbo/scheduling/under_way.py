"""The prompts under way, sorted, so that the ones that share a prefix with a waiting sequence are found at once."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable

from lmkit.turbo.kv.radix_cache import Namespace
from lmkit.turbo.sequence import Sequence

TOKEN_BYTES = 4  # of the int32 ids in Sequence.cache_ids


class PromptsUnderWay:
    """Prompts whose KV is not yet computed to the end, by namespace, each with the number of its computed tokens.

    A prompt is the bytes of its tokens. In sorted order all prompts with a common prefix stand side by side, so a
    look-up is a binary search, however many prompts there are.
    """

    def __init__(self, running: Iterable[tuple[Namespace, Sequence]]) -> None:
        self._prompts: defaultdict[Namespace, list[tuple[bytes, int]]] = defaultdict(list)
        for namespace, seq in running:
            if seq.num_completed < seq.num_prompt_tokens:
                self._prompts[namespace].append((_prompt(seq), seq.num_completed))
        for prompts in self._prompts.values():
            prompts.sort()

    def __contains__(self, namespace: Namespace) -> bool:
        return namespace in self._prompts

    def add(self, namespace: Namespace, seq: Sequence) -> None:
        """Add a sequence that begins to run."""
        if seq.num_completed < seq.num_prompt_tokens:
            insort(self._prompts[namespace], (_prompt(seq), seq.num_completed))

    def will_compute(self, namespace: Namespace, seq: Sequence, least: int) -> bool:
        """Whether a prompt begins with at least the first `least` tokens of `seq` and has yet to compute some of them.

        Tokens that `seq` computes in any case do not count (`Sequence.max_cached`).
        """
        if least > seq.max_cached:
            return False
        prompts, text = self._prompts.get(namespace, []), seq.cached_as(seq.max_cached).tobytes()
        prefix = text[: least * TOKEN_BYTES]
        for i in range(bisect_left(prompts, (prefix,)), len(prompts)):
            prompt, num_completed = prompts[i]
            if not prompt.startswith(prefix):
                break
            common = max(least, num_completed + 1) * TOKEN_BYTES
            if common <= len(text) and prompt.startswith(text[:common]):
                return True
        return False


def _prompt(seq: Sequence) -> bytes:
    return seq.cached_as(seq.num_prompt_tokens).tobytes()
