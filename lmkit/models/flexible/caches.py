"""Caches of transformers whose keys and values lie in lmkit's blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

# Whose keys and values are all that attention reads.
KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
)
# That keep keys and values of each token, whatever reads them.
PLAIN_LAYERS = DynamicLayer, DynamicSlidingWindowLayer
# Keeps keys and values [1, heads, T, D] of a pass, and gives those of the whole sequence.
Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# The names under which modules give and take what they keep of a sequence.
NAMES = ("past_key_values", "cache_params", "state", "mems")


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """Passes new keys and values through to the attention function. `length`: tokens before this pass."""

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        CacheLayerMixin.__init__(self)
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is kept."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class PagedMixedLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[misc]
    """A layer with attention beside a recurrent state, which stays here."""

    is_compileable = False

    def __init__(self, number_of_states: int = 1) -> None:
        PagedLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


class StoredLayer(PagedLayer):
    """A layer for attention of transformers: it reads all keys and values of the sequence from lmkit's blocks."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._store(key_states, value_states)


def paged_cache(config: Any, paged: Collection[int], stored: Mapping[int, Store]) -> DynamicCache:
    """A sequence's cache. The layers `paged` keep no keys and values, and those `stored` have them in blocks."""
    cache = DynamicCache(config=config)
    while len(cache.layers) <= max((*paged, *stored), default=-1):
        cache.layers.append(PagedLayer())
    for index, store in stored.items():
        cache.layers[index] = StoredLayer(store)
    for index in paged:
        old = cache.layers[index]
        cache.layers[index] = PagedMixedLayer(len(old.conv_states)) if hasattr(old, "conv_states") else PagedLayer()
    return cache


def set_length(cache: Any, length: int) -> None:
    """Say how many tokens came before the pass."""
    for layer in cache.layers if isinstance(cache, Cache) else ():
        if isinstance(layer, PagedLayer):
            layer.length = length


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors of a cache of any kind."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each, seen)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), seen)
