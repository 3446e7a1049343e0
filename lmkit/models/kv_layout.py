"""Which layers share KV blocks: layers that look back equally far form a class, and a class is cut into groups.

    layer            0     1     2     3     4     5      5 layers with a window, then a full one
    class            w     w     w     w     w     full
    group            1     2     3     4     5     0      one layer each: gcd(1, 5)

A block holds `block_size` tokens of one group. All groups have the same shape, so every block has the same bytes, and
all classes take theirs from one pool. A sequence has a table of blocks for each group. It gives the blocks of a class
back as soon as the window of that class has passed them.

No torch here: the scheduler and the memory plan read it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from lmkit.kv_dtype import KVDtype
from lmkit.models.spec import ModelSpec


@dataclass(frozen=True)
class KVClass:
    """Layers that look back equally far, in `num_groups` groups."""

    window: int = 0  # a token at position p sees keys > p - window; 0 = all before it
    sinks: int = 0  # first tokens that the window does not leave behind
    num_groups: int = 1


@dataclass(frozen=True)
class KVLayout:
    """The groups of a model's layers, class by class. Layer j of every group has KV of the same shape and type."""

    classes: tuple[KVClass, ...]
    groups: tuple[tuple[int, ...], ...]  # layers of each group
    readers: tuple[int, ...] = ()  # of each further layer: the layer whose keys and values it reads

    def places(self) -> list[tuple[int, int]]:
        """(group, index inside the group) of each layer."""
        places = {layer: (g, j) for g, layers in enumerate(self.groups) for j, layer in enumerate(layers)}
        return [places[layer] for layer in (*range(len(places)), *self.readers)]


def layout_of(spec: ModelSpec, sinks: int, dtypes: Sequence[tuple[KVDtype, KVDtype]]) -> KVLayout:
    """The groups of a model whose layers store K and V in `dtypes`. `sinks` replaces the model's own, if not 0."""
    sinks = sinks or max((layer.kv.sinks for layer in spec.kinds if layer.kv), default=0)
    readers = tuple(layer.kv.source for layer in spec.layers if layer.kv and layer.kv.source is not None)
    own = spec.layers[: spec.num_layers - len(readers)]
    kinds = [
        kv and (kv.num_heads, kv.head_dim, kv.index_dim, *stored)
        for kv, stored in zip((x.kv for x in own), dtypes, strict=False)
    ]
    return replace(kv_layout(spec.windows[: len(own)], sinks, kinds), readers=readers)


def kv_layout(windows: Sequence[int], sinks: int, kinds: Sequence[Hashable]) -> KVLayout:
    """The layout of layers with these windows (0 = full). Layers of equal `kinds` have KV of the same shape and type.

    Groups are as large as possible without an unused place. If the classes mix kinds in different proportions, all
    layers form one group, and it keeps every token that any of its layers sees.
    """
    members = {window: [i for i, other in enumerate(windows) if other == window] for window in sorted(set(windows))}
    counts = {window: Counter(kinds[i] for i in layers) for window, layers in members.items()}
    sizes = {window: math.gcd(*count.values()) for window, count in counts.items()}
    units = [{kind: n // sizes[window] for kind, n in count.items()} for window, count in counts.items()]
    if any(unit != units[0] for unit in units):
        window = max(windows) if all(windows) else 0
        return KVLayout((KVClass(window, sinks if window else 0),), (tuple(range(len(windows))),))
    common = math.gcd(*sizes.values())
    order = list(units[0])
    classes, groups = [], []
    for window, layers in members.items():
        num_groups = sizes[window] // common
        classes.append(KVClass(window, sinks if window else 0, num_groups))
        # The first group takes the first layers of each kind, and so on.
        by_kind = [[i for i in layers if kinds[i] == kind] for kind in order]
        for g in range(num_groups):
            parts = [(rows, len(rows) // num_groups) for rows in by_kind]
            groups.append(tuple(i for rows, size in parts for i in rows[g * size : (g + 1) * size]))
    return KVLayout(tuple(classes), tuple(groups))
