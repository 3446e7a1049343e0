"""The hidden states of the calibration rows on their way through the model, a batch of rows at a time.

There are two streams. One is the output of the layers that are quantized so far: the inputs that the next layer will
really see. The other, if wanted, is the output of the original layers: the targets that it should still reach. Each
stream has two buffers, one before the present layer and one before the next. The buffers take turns. With a
folder they are mapped files:

    hidden-0.f32  hidden-1.f32   float32 [num_rows * seq_len, hidden]; layer i reads number i % 2 and writes the other
    hidden-0.crc32  ...          the file's checksum, as decimal digits
    exact-0.f32   exact-1.f32    ...

hidden-scratch and exact-scratch hold the states inside the present layer (layer.passes). An interrupted layer
can be done again, as the states before it are not written to. No more than a batch of each buffer is in memory.
Some models read more of a token than its states (data.side_inputs).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lmkit.kernels.cuda.module import tensor_device
from lmkit.models.decoder import Decoder
from lmkit.models.decoder_layer import DecoderLayer, joined
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.quant.data.buffer import Buffer
from lmkit.quant.data.comm import Comm
from lmkit.quant.data.side_inputs import SideInputs
from lmkit.quant.kv.config import KVStats
from lmkit.quant.layer.gradients import turned
from lmkit.quant.layer.layer import Geometry
from lmkit.quant.layer.observe import Observer

STREAMS = ("hidden", "exact")
BATCH_TOKENS = 4096  # of the calibration set in one forward pass, at most


@dataclass
class Stream:
    """float32 [rows * seq_len, hidden] for each batch. `put` fills the states before the next layer. `advance`
    moves on to that layer."""

    spec: ModelSpec
    num_rows: int
    seq_len: int
    batch_rows: int
    layer: int  # the present states stand before it
    buffers: dict[str, tuple[Buffer, Buffer]]
    side_inputs: SideInputs
    comm: Comm
    folder: Path | None = None
    device: str = "cpu"  # where layers compute
    _scratch: dict[bool, Buffer] = field(default_factory=dict)
    _geometries: dict[tuple[LayerSpec, int, int], Geometry] = field(default_factory=dict)

    @classmethod
    def embedded(
        cls,
        source: ModelSource,
        rows: Tensor,
        *,
        exact: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        folder: Path | None = None,
        layer: int = 0,
        comm: Comm = Comm(),
        device: str = "cpu",
    ) -> Stream:
        """A stream before the first layer. rows int64 [num_rows, seq_len]; `exact`: keep the original stream too.

        With `layer` above 0, the stream stands before that layer and takes its states from the files of `folder`.
        """
        spec, (num_rows, seq_len) = source.spec, rows.shape
        sizes = num_rows * seq_len, spec.hidden_size
        buffers = {}
        for name in STREAMS[: 2 if exact else 1]:
            one, other = (Buffer(*sizes, folder and folder / f"{name}-{i}.f32") for i in (0, 1))
            buffers[name] = one, other
        side_inputs = SideInputs.of(spec, sizes[0], tuple(buffers), folder, device)
        batch_rows = max(1, batch_tokens // seq_len)
        stream = cls(spec, num_rows, seq_len, batch_rows, layer, buffers, side_inputs, comm, folder, device)
        if layer == 0:
            stream._embed(source.head(), rows)
        else:
            for pair in buffers.values():
                pair[layer % 2].check()
            side_inputs.check(layer)
        return stream

    def _embed(self, head: Decoder, rows: Tensor) -> None:
        for number, part in enumerate(rows.split(self.batch_rows)):
            states = head.embed_rows(part)
            for buffers in self.buffers.values():
                buffers[0].states[self._tokens(number)] = states
                buffers[0].release()
            if head.per_layer is not None:
                self.side_inputs.put_vectors(self._tokens(number), head.per_layer(part.flatten(), states))
        self.side_inputs.seal_vectors()

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_rows)

    @property
    def has_exact(self) -> bool:
        return "exact" in self.buffers

    def hidden(self, number: int, *, exact: bool = False) -> Tensor:
        """One batch before the present layer. It must not be written to."""
        return self.here(self._buffer(self.layer, exact).states[self._tokens(number)])

    def here(self, states: Tensor) -> Tensor:
        """States where the layers compute."""
        return states.to(tensor_device(self.device))

    def states(self, layer: int, *, exact: bool = False) -> Tensor:
        """All tokens [rows * seq_len, hidden] before the present layer or of the next."""
        return self._buffer(layer, exact).states

    def scratch(self, dtype: torch.dtype, *, exact: bool = False) -> Tensor:
        """A place for the states of all tokens inside the present layer, in the numbers `dtype` that are multiplied. It
        is as wide as the widest layer needs."""
        if exact not in self._scratch:
            path = self.folder and self.folder / f"{STREAMS[exact]}-scratch"
            self._scratch[exact] = Buffer(self.num_rows * self.seq_len, scratch_width(self.spec), path, dtype)
        return self._scratch[exact].states

    def release(self) -> None:
        """Leave all states to the page cache."""
        for buffer in (*self._scratch.values(), *(buffer for pair in self.buffers.values() for buffer in pair)):
            buffer.release()
        self.side_inputs.release()

    def geometry(self, num_rows: int, seq_len: int) -> Geometry:
        """The geometry of the present layer. Layers that are alike share one."""
        key = self.spec.layers[self.layer], num_rows, seq_len
        if key not in self._geometries:
            self._geometries[key] = Geometry.of(*key, self.device)
        return self._geometries[key]

    def inputs(self, tokens: slice, *, exact: bool = False) -> Geometry:
        """The geometry of the present layer for `tokens`, whole rows, with what it reads of them beside the states.
        Valid until the next call."""
        return self.side_inputs.given(self._whole(tokens), self.layer, tokens, STREAMS[exact])

    def vectors(self, tokens: slice) -> Geometry:
        """The same for a part of the layer after attention: without keys and values of earlier layers."""
        return self.side_inputs.with_vectors(self._whole(tokens), tokens)

    def _whole(self, tokens: slice) -> Geometry:
        return self.geometry((tokens.stop - tokens.start) // self.seq_len, self.seq_len)

    def sampled(self, ids: Tensor, seq_len: int, every: int) -> Geometry:
        """The geometry of the present layer's attention for whole sequences of `seq_len` tokens. `ids` are the tokens'
        numbers in the first of each `every` batches."""
        if self.spec.layers[self.layer].kv_from is None:
            return self.geometry(len(ids) // seq_len, seq_len)
        own = Geometry.of(self.spec.layers[self.layer], len(ids) // seq_len, seq_len, self.device)
        parts = (self._tokens(number) for number in range(0, len(self), every))
        tokens = torch.cat([torch.arange(part.start, part.stop) for part in parts])[ids]
        self.side_inputs.fill(own, self.layer, tokens, STREAMS[0])
        return own

    def keep(self, layer: DecoderLayer, *, exact: bool = False) -> None:
        """Keep the present layer's keys and values of all tokens, if later layers read them."""
        if layer.index not in self.spec.kv_sources:
            return
        for number in range(len(self)):
            geometry, hidden = self.inputs(self._tokens(number), exact=exact), self.hidden(number, exact=exact)
            x, norm, _ = layer.mixing.read(hidden)
            q, k, v, _ = layer.attention.queries_keys_values(x, norm)
            kv = geometry.kv
            layer.attention.append_op(q, k, v, *geometry.rope, kv.k, kv.v, geometry.batch.geometries[0].slots)
            self.side_inputs.put(layer.index, self._tokens(number), STREAMS[exact], *geometry.keys_and_values())
            self._buffer(self.layer, exact).release()

    def output(self, layer: DecoderLayer, number: int, *, exact: bool = False, seen: KVStats | None = None) -> Tensor:
        """The layer's output for one batch. Its keys and values, if it has any, are added to `seen`."""
        output, geometry, queries = self._forward(layer, number, exact, seen)
        if seen is not None and layer.spec.kv is not None:
            seen.add(*geometry.keys_and_values(), geometry.rope, queries, geometry.batch.positions)
        return output

    def outputs(
        self,
        layer: DecoderLayer,
        *,
        exact: bool = False,
        observer: Observer | None = None,
        seen: KVStats | None = None,
        every: int = 1,
    ) -> Iterator[tuple[int, Tensor]]:
        """(number, output) of the first of each `every` batches in order. `observer` sees the linears' inputs, `seen`
        keys and values.

        The batches are divided between the processes. Each process gets all outputs.
        """
        if self.comm.world_size > 1:
            yield from self._shared_outputs(layer, exact, observer, seen, every)
            return
        for number in range(0, len(self), every):
            layer.observe(observer)
            output = self.output(layer, number, exact=exact, seen=seen)
            layer.observe(None)
            yield number, output

    def _shared_outputs(
        self, layer: DecoderLayer, exact: bool, observer: Observer | None, seen: KVStats | None, every: int
    ) -> Iterator[tuple[int, Tensor]]:
        """`outputs` in rounds. In a round each process runs one batch; then all exchange their results in order."""
        comm, inputs = self.comm, [] if observer is None else list(observer.inputs)
        seen = None if layer.spec.kv is None else seen
        wanted = range(0, len(self), every)
        for first in range(0, len(wanted), comm.world_size):
            numbers = wanted[first : first + comm.world_size]
            own: list[Tensor] = []
            if comm.rank < len(numbers):
                own = self._recorded(layer, numbers[comm.rank], exact, inputs, seen)
            for source, number in enumerate(numbers):
                output, keys, values, queries, which, *observed = map(self.here, comm.broadcast(own, source))
                if seen is not None:
                    of_batch = self.geometry(len(output) // self.seq_len, self.seq_len)
                    seen.add(keys, values, of_batch.rope, queries, of_batch.batch.positions)
                for i, x in zip(which.tolist(), observed, strict=True):
                    if observer is not None and i % comm.world_size == comm.rank:
                        observer(inputs[i], x)
                yield number, output
        for i, role in enumerate(inputs):
            assert observer is not None
            comm.share(observer.inputs[role], i % comm.world_size)

    def _recorded(
        self, layer: DecoderLayer, number: int, exact: bool, inputs: list[str], seen: KVStats | None
    ) -> list[Tensor]:
        """[output, keys, values, queries, indices into `inputs` of the observed inputs, *the observed inputs] of one
        batch."""
        which, observed = [], []

        def record(role: str, x: Tensor) -> None:
            if role in inputs:
                which.append(inputs.index(role))
                observed.append(x.float())

        layer.observe(record)
        output, geometry, queries = self._forward(layer, number, exact, seen)
        layer.observe(None)
        keys_and_values = (torch.empty(0), torch.empty(0)) if seen is None else geometry.keys_and_values()
        found = [output, *keys_and_values, queries, torch.tensor(which, dtype=torch.int64), *observed]
        return [tensor.cpu() for tensor in found]

    def _forward(
        self, layer: DecoderLayer, number: int, exact: bool, seen: KVStats | None
    ) -> tuple[Tensor, Geometry, Tensor]:
        """(output, geometry, queries after RoPE) of one batch. There are no queries unless `seen` wants them."""
        hidden, queries = self.hidden(number, exact=exact), [torch.empty(0)]
        geometry = self.inputs(self._tokens(number), exact=exact)
        if seen is not None and seen.moments is not None:
            layer.attention.observe_queries = lambda q: queries.append(turned(q, geometry.rope))
        # An op may write into its residual argument.
        delta, residual = layer(hidden.clone(), None, geometry.batch, geometry.rope, geometry.kv)
        if seen is not None and seen.moments is not None:
            layer.attention.observe_queries = None
        self._buffer(self.layer, exact).release()
        return joined(delta, residual), geometry, queries[-1]

    def rows_of(self, every: int) -> int:
        """The number of rows in the first of each `every` batches."""
        batches = (self._rows(number) for number in range(0, len(self), every))
        return sum(rows.stop - rows.start for rows in batches)

    def slices(self, number: int, *cuts: int) -> list[slice]:
        """The tokens of a batch, in pieces that do not cross any of the rows `cuts`."""
        begin, end = self._tokens(number).start, self._tokens(number).stop
        inside = [cut * self.seq_len for cut in cuts if begin < cut * self.seq_len < end]
        return [slice(*ends) for ends in itertools.pairwise([begin, *inside, end])]

    def put(self, number: int, hidden: Tensor, *, exact: bool = False) -> None:
        """Store one batch before the next layer. The present layer still sees its own states."""
        buffer = self._buffer(self.layer + 1, exact)
        buffer.states[self._tokens(number)] = hidden
        buffer.release()

    def advance(self) -> None:
        """Move on to the next layer after every batch was put. Afterwards the states before it are on the disk."""
        self.side_inputs.seal(self.layer)
        self.layer += 1
        self.seal()

    def seal(self) -> None:
        """Wait until the disk has the states before the present layer."""
        for exact in (False, True)[: len(self.buffers)]:
            self._buffer(self.layer, exact).seal()

    def _buffer(self, layer: int, exact: bool) -> Buffer:
        return self.buffers[STREAMS[exact]][layer % 2]

    def _tokens(self, number: int) -> slice:
        rows = self._rows(number)
        return slice(rows.start * self.seq_len, rows.stop * self.seq_len)

    def _rows(self, number: int) -> slice:
        return slice(number * self.batch_rows, min((number + 1) * self.batch_rows, self.num_rows))


def scratch_width(spec: ModelSpec) -> int:
    """The width of the states inside a layer: the output of attention, and the product of gate and up if the layer has
    no experts."""
    return max(layer.inner_width(place) for layer in spec.kinds for place in range(len(layer.blocks)))
