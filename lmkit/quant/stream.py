"""The hidden states of the calibration rows on their way through the model, a batch of rows at a time.

Two streams: what the quantized layers so far give (the inputs that the next layer will really see), and, if wanted,
what the original layers give (the targets it should still reach).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lmkit.models.decoder import DecoderLayer
from lmkit.models.loader import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.quant.kv import KVStats
from lmkit.quant.layer import Geometry
from lmkit.quant.plan import BATCH_TOKENS


@dataclass
class Stream:
    """float32 [rows * seq_len, hidden] for each batch. `put` fills what stands in front of the next layer; `advance`
    moves on to it."""

    spec: ModelSpec
    num_rows: int
    seq_len: int
    _now: list[Tensor]
    _exact: list[Tensor] | None
    _next: dict[tuple[int, bool], Tensor] = field(default_factory=dict)
    _geometries: dict[tuple[int, int], Geometry] = field(default_factory=dict)

    @classmethod
    def embedded(cls, source: ModelSource, rows: Tensor, *, exact: bool = False) -> Stream:
        """In front of the first layer. rows int64 [num_rows, seq_len]; `exact`: keep the original stream too."""
        table = source.embed_tokens()
        num_rows, seq_len = rows.shape
        batches = [table[part.flatten()].float() for part in rows.split(max(1, BATCH_TOKENS // seq_len))]
        return cls(source.spec, num_rows, seq_len, batches, list(batches) if exact else None)

    def __len__(self) -> int:
        return len(self._now)

    @property
    def has_exact(self) -> bool:
        return self._exact is not None

    def hidden(self, number: int, *, exact: bool = False) -> Tensor:
        """One batch in front of the layer; not to be written to."""
        streams = self._exact if exact else self._now
        assert streams is not None
        return streams[number]

    def geometry(self, num_rows: int, seq_len: int) -> Geometry:
        key = num_rows, seq_len
        if key not in self._geometries:
            self._geometries[key] = Geometry.of(self.spec, num_rows, seq_len)
        return self._geometries[key]

    def output(self, layer: DecoderLayer, number: int, *, exact: bool = False, seen: KVStats | None = None) -> Tensor:
        """The layer's output for one batch; `seen` takes in its keys and values."""
        hidden = self.hidden(number, exact=exact)
        geometry = self.geometry(len(hidden) // self.seq_len, self.seq_len)
        # An op may write into the residual it is given.
        delta, residual = layer(hidden.clone(), None, geometry.batch, geometry.rope, geometry.kv)
        if seen is not None:
            seen.add(*geometry.keys_and_values(), geometry.rope)
        return delta + residual

    def put(self, number: int, hidden: Tensor, *, exact: bool = False) -> None:
        """What stands in front of the next layer; the present one still sees its own."""
        self._next[number, exact] = hidden

    def advance(self) -> None:
        """On to the next layer; every batch has been put."""
        self._now = [self._next[number, False] for number in range(len(self))]
        if self._exact is not None:
            self._exact = [self._next[number, True] for number in range(len(self))]
        self._next = {}
