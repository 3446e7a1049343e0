"""Answers that were given before, kept for drafts of later ones of the same tenant.

A tenant's answers stand in two halves. New ones go into the newer half. When it is full, the older one is dropped. An
answer that comes again is in the newer half again, so what is dropped was not given for the longest time.

Drafts show in the time that an answer takes, so they may tell what was answered before. Texts are therefore shared
where the KV cache is shared: within a namespace (kv.manager), which no tenant shares with another.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from lmkit.turbo.kv.radix_cache import Namespace
from lmkit.turbo.scheduling.ngrams import END, LONGEST, Index
from lmkit.turbo.sequence import Sequence

MAX_TENANTS = 64  # whose answers are kept: those who got one last


@dataclass
class _Half:
    num_tokens: int = 0
    indices: defaultdict[Namespace, Index] = field(default_factory=lambda: defaultdict(lambda: Index(array("i"))))


class History:
    """At most `limit` tokens of each tenant's answers. `namespace` gives the namespace of a sequence."""

    def __init__(self, limit: int, namespace: Callable[[Sequence], Namespace]) -> None:
        self._limit, self._namespace = limit, namespace
        self._tenants: dict[str, list[_Half]] = {}  # the newer half first; the tenant who got an answer last is last

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return sum(half.num_tokens for halves in self._tenants.values() for half in halves)

    def of(self, seq: Sequence) -> list[Index]:
        """The texts that may be looked up for the sequence, the newest first."""
        halves = self._tenants.get(seq.request.tenant)
        if not halves:
            return []
        namespace = self._namespace(seq)
        return [half.indices[namespace] for half in halves if namespace in half.indices]

    def add(self, seq: Sequence) -> None:
        """Keep the answer of a sequence that ends, with the end of its prompt, which leads to its first tokens."""
        start = max(seq.num_prompt_tokens - LONGEST, 0)
        text = seq.token_ids[start : start + max(self._limit // 2 - 1, 0)]
        if len(text) <= seq.num_prompt_tokens - start:
            return
        text.append(END)
        tenant = seq.request.tenant
        halves = self._tenants[tenant] = self._tenants.pop(tenant, [])
        if not halves or halves[0].num_tokens + len(text) > self._limit // 2:
            halves.insert(0, _Half())
            del halves[2:]
        halves[0].num_tokens += len(text)
        index = halves[0].indices[self._namespace(seq)]
        index.token_ids += text
        index.extend(len(index.token_ids))
        if len(self._tenants) > MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
