"""What a GGUF file tells about its model, in llama.cpp's keys. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.gguf_model import GgufModel

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS = 1 << 16


class Facts:
    """What a file tells about its model: numbers by the end of their keys, and which tensors there are."""

    def __init__(self, file: GgufModel, kind: str) -> None:
        self.file, self.kind = file, kind

    def number(self, key: str) -> int | float | None:
        """The number or flag under a key; None without the key. Raises CheckpointError for another value.

        An array of equal numbers, one for each layer, is that number. Layers of a hybrid without heads, or without an
        MLP, have 0 there, which does not count.
        """
        name = f"{self.kind}.{key}"
        value = self.file.metadata.get(name)
        if value is None and len(values := set(self.file.array(name)) - {0} or {*self.file.array(name)}) == 1:
            value = values.pop()
        elif value is None and values:
            raise UnsupportedError(f"{self.file.path}: {name} differs between layers: {sorted(values)}")
        if value is None or isinstance(value, bool):
            return value
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{self.file.path}: {name} is {value!r}, expected a number")
        return float(f"{value:.7g}") if isinstance(value, float) else value  # 1e-5 as it was before float32

    def needed(self, key: str) -> int | float:
        """As `number`. Raises CheckpointError without the key."""
        value = self.number(key)
        if value is None:
            raise CheckpointError(f"{self.file.path}: {self.kind}.{key} is missing")
        return value

    def fields(self, table: Mapping[str, str]) -> dict[str, Any]:
        """The fields of config.json that the file has, see SIZES."""
        values = {name: self.number(key) for name, key in table.items()}
        return {name: value for name, value in values.items() if value is not None}

    def by_layer(self, key: str, count: int) -> list[Any]:
        """A number for each of `count` layers, where the file has one for all or an array. Raises CheckpointError."""
        values = self.file.array(f"{self.kind}.{key}") or [self.needed(key)] * min(count, MAX_LAYERS)
        if not values or not all(type(value) is int for value in values):
            raise CheckpointError(f"{self.file.path}: {self.kind}.{key} is not a whole number for each layer")
        return values

    def text(self, key: str) -> str | None:
        """The text under a key; None without it."""
        value = self.file.metadata.get(f"{self.kind}.{key}")
        return value if isinstance(value, str) else None

    def numbers(self, key: str) -> list[Any]:
        """An array, or [] without the key."""
        return self.file.array(f"{self.kind}.{key}")

    def flags(self, key: str) -> list[bool]:
        """An array with a flag for each layer; [] without the key."""
        return [bool(flag) for flag in self.numbers(key)]

    def has(self, part: str) -> bool:
        """Whether some layer has a tensor with this end of its name: attn_q.bias."""
        return part in self.file.parts_of_layers

    def has_outer(self, prefix: str) -> bool:
        """Whether some tensor's whole name begins so."""
        return any(name.startswith(prefix) for name in self.file.tensors)

    @property
    def num_layers(self) -> int:
        """Without the last blocks, which predict tokens beyond the next one. They are not read."""
        return int(self.needed("block_count")) - int(self.number("nextn_predict_layers") or 0)

    def layers_with(self, part: str) -> list[bool]:
        """Of each layer whether it has a tensor with this end of its name."""
        return [f"blk.{i}.{part}" in self.file.tensors for i in range(min(self.num_layers, MAX_LAYERS))]

    def turned(self, config: Mapping[str, Any]) -> float:
        """The part of each head that RoPE turns."""
        size = config.get("head_dim") or config["hidden_size"] // max(int(config["num_attention_heads"]), 1)
        return float((self.number("rope.dimension_count") or size) / max(size, 1))

    def layer_types(self, period: int) -> list[str]:
        """The kind of each layer's attention by the file's pattern; without one, each `period`-th layer is full."""
        count = self.num_layers
        slides = self.flags("attention.sliding_window_pattern")
        if not slides and type(own := self.file.metadata.get(f"{self.kind}.attention.sliding_window_pattern")) is int:
            period = own
        slides = slides[:count] or [bool((i + 1) % max(period, 1)) for i in range(min(count, MAX_LAYERS))]
        return [SLIDING if slide else FULL for slide in slides]
