"""A transformers module as a decoder: lmkit's batch in, logits out. Attention goes to lmkit's KV blocks.

A step of a model that keeps nothing but keys and values is one pass over all its tokens in a row. Otherwise each
sequence is a pass of its own, with what transformers keeps of it (states.py).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import UnsupportedError
from lmkit.kernels import ops
from lmkit.kernels.reference.kv import read_blocks
from lmkit.kernels.registry import Implementation
from lmkit.layers.adapters import StepAdapters
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.layers.linear import MergedLinear
from lmkit.models.decoder import Decoder
from lmkit.models.flexible.caches import set_length
from lmkit.models.flexible.fused import FusedNorm
from lmkit.models.flexible.interface import NAME, attending, use
from lmkit.models.flexible.linears import rows_of_linears
from lmkit.models.flexible.states import OwnStates, Part
from lmkit.models.flexible.trace import AttentionCall, Trace, takes
from lmkit.models.spec import ModelSpec

PROBE = 48  # tokens of a pass that shows which linears compute all of them; a check has seen more before it
# Arguments of language models that images add something to after their first layers (DeepStack).
DEEP_ROWS, DEEP = "visual_pos_masks", "deepstack_visual_embeds"


@dataclass(frozen=True)
class _Place:
    """A layer, as the engine asks for it. Its linears are in the module."""

    index: int
    linears: tuple[()] = ()
    blocks: tuple[()] = ()


class _Call(NamedTuple):
    """A module's attention, with the implementations that its heads take."""

    layer: int
    dim: int
    spec: AttentionSpec
    stores: bool
    append: Implementation
    attention: Implementation


class FlexibleDecoder(Decoder):
    """See Decoder. `module` is transformers' class of the architecture. `places`: layer and role of its linears;
    `norms`: those that kernels compute."""

    computes_with_torch = True

    def __init__(
        self, spec: ModelSpec, module: Any, seen: Trace, places: Mapping[str, tuple[int, str]], device: str = "cpu",
        norms: Collection[FusedNorm] = (),
    ) -> None:  # fmt: skip
        self._norms = norms
        self.captures = seen.packs  # others keep states that steps change
        self.spec, self.module, self.seen, self.dtype, self._places = spec, module, seen, torch.float32, places
        self.other_names = {name: spec.module_name(*place) for name, place in places.items()}
        self.layers = [_Place(index) for index in range(spec.num_layers)]  # type: ignore[misc]
        self.lm_head = MergedLinear(("lm_head",), {}, device)
        self.ranks = self.link = self.after_layer = self.softcap = self.per_layer = None
        self.kept, self.step_adapters = {}, StepAdapters(device)
        self.embedding = ops.embedding.select(device)
        stored = {call.layer: functools.partial(self._store, self._call(call, device)) for call in seen.stored}
        self.states = OwnStates(module, seen, stored)
        self._theirs = "sdpa" if getattr(module, "_supports_sdpa", False) else "eager"
        use(module, self._theirs)
        self._base = _body(module)
        self._body = self._base.forward
        self._given: Any = None
        self._base.forward = self._body_or_given
        self.language = module.get_submodule(seen.language) if seen.language else self._base
        self.turned = False  # whether positions have three places, as M-RoPE counts them
        self.deep = 0  # layers to which images add something
        self.one_by_one = False  # whether what is kept takes a prompt's later tokens one at a time
        self._pages = self.states.fresh()  # keeps nothing but a length
        self._positions = seen.takes_positions and takes(module, "position_ids")
        self._part: Part | None = None
        self._kv: list[KVLayer] = []
        use(module, NAME if seen.calls else self._theirs)
        self._calls = {
            module.get_submodule(name): self._call(call, device)
            for name, call in zip(seen.modules, seen.calls, strict=True)
        }

    @staticmethod
    def _call(call: AttentionCall, device: str) -> _Call:
        shape = {"head_dim": call.dim, "num_heads": call.num_heads, "num_kv_heads": call.num_kv_heads, "latent": False}
        append = ops.kv_append.select(device, **shape)
        attention = ops.paged_attention.select(device, **shape)
        return _Call(call.layer, call.dim, call.spec, call.source is None, append, attention)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return ()

    def _body_or_given(self, *args: Any, **options: Any) -> Any:
        """The pass of all layers; or, while only logits are computed, the states that it gave."""
        return self._body(*args, **options) if self._given is None else self._given

    def hidden(
        self, batch: BatchInputs, kv: list[KVLayer], *, logits_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(states after the final norm [T, hidden], None); appends the batch's keys and values to `kv`."""
        self._kv = kv
        if self.seen.packs:
            return self._pass(Part.whole(batch, self._embeddings(batch)), self._pages)[0], None
        rows, parts = batch.state_rows.tolist(), Part.sequences(batch, self._embeddings(batch))
        found = [self._sequence(part, *row) for part, row in zip(parts, rows, strict=True)]
        return torch.cat(found), None

    def _embeddings(self, batch: BatchInputs) -> Tensor | None:
        """The embeddings of all tokens, if there are images among them."""
        if batch.image_rows is None or batch.image_values is None:
            return None
        ids = batch.token_ids.clone()
        ids[batch.image_rows] = 0  # some have no embedding
        found: Tensor = self.module.get_input_embeddings()(ids[None])[0].float()
        found = nn.functional.pad(found, (0, batch.image_values.shape[1] - found.shape[1]))
        found[batch.image_rows] = batch.image_values
        return found

    def _sequence(
        self, part: Part, slot: int, source: int, snapshot: int, after: int, replayed: int, drafts: int
    ) -> Tensor:
        """The states of a sequence's tokens. kernels.recurrent says what the numbers mean."""
        states = self.states
        if (first := states.accepted(slot, replayed)) is not None:
            part = part.after(first)
        count = len(part.token_ids)
        known, cache, found, start = count - drafts, states.take(source, slot), list[Tensor](), 0
        edges = {replayed, known, count} | ({after} if snapshot >= 0 else set())
        if self.one_by_one:
            edges |= set(range(0 if part.past else 1, count))
        for end in sorted(edge for edge in edges if edge > 0):
            x, cache = self._pass(part.cut(start, end, part.past + start), cache)
            if start >= replayed:
                found.append(x)
            if snapshot >= 0 and end == after:
                states.put(snapshot, cache, copied=True)
            if end == known:
                states.put(slot, cache, copied=drafts > 0)
            start = end
        if drafts:
            states.draft(slot, part.cut(known, count, part.past + known))
        return torch.cat(found)

    def _pass(self, part: Part, cache: Any) -> tuple[Tensor, Any]:
        """Run the layers over tokens in a row: (states [T, hidden], what transformers keeps)."""
        options: dict[str, Any] = {}
        if cache is not None:
            set_length(cache, part.past)
            options[self.seen.cache] = cache
        if self._positions:
            options["position_ids"] = part.positions[None].long()
        self._part = part
        self.step_adapters.set(part.adapters)
        with attending(self):
            if part.embeddings is None:
                output = self._base(input_ids=part.token_ids[None], use_cache=True, **options)
            else:
                output = self.language(use_cache=True, **options | self._seeing(part, part.embeddings))
        return output.last_hidden_state[0], getattr(output, self.seen.cache) if self.seen.cache else None

    def _seeing(self, part: Part, embeddings: Tensor) -> dict[str, Any]:
        """The arguments of the language model for tokens with images."""
        first, *deep = embeddings[None].chunk(1 + self.deep, -1)
        options: dict[str, Any] = {"inputs_embeds": first}
        if self.turned and part.places is not None:
            options["position_ids"] = part.places[:, None].long()
        if deep:
            assert part.is_image is not None
            options[DEEP_ROWS] = part.is_image[None]
            options[DEEP] = [each[0, part.is_image] for each in deep]
        return options

    def adaptable(self) -> Iterator[tuple[int, MergedLinear]]:
        """See Decoder. Experts and others that compute some tokens alone are left out: a pass shows them."""
        whole = rows_of_linears(self.module, lambda: self.plain(torch.arange(PROBE)[None] % self.spec.vocab_size))
        names = {name: index for name, (index, _) in self._places.items() if whole.get(name) == {PROBE}}
        found = {self.module.get_submodule(name).linear: index for name, index in names.items()}
        return ((index, linear) for linear, index in found.items())

    def plain(self, token_ids: Tensor) -> Tensor:
        """The states [T, hidden] of a whole sequence [1, T], as transformers alone computes them."""
        with self.alone():
            states: Tensor = self._body(input_ids=token_ids, **self._whole(token_ids)).last_hidden_state[0]
        return states

    def plain_with(self, tensors: dict[str, Tensor]) -> Tensor:
        """The states [T, hidden] of `input_ids` [1, T] with images, as transformers alone computes them."""
        mask = torch.ones_like(tensors["input_ids"])
        with self.alone():
            states: Tensor = self._body(**tensors, attention_mask=mask, use_cache=False).last_hidden_state[0]
        return states

    def plain_logits(self, token_ids: Tensor) -> Tensor:
        """The logits float32 [T, vocab] of a whole sequence [1, T], as transformers alone computes them."""
        with self.alone():
            logits: Tensor = self.module(input_ids=token_ids, **self._whole(token_ids)).logits[0].float()
        return logits

    def _whole(self, token_ids: Tensor) -> dict[str, Any]:
        """The arguments of a whole sequence. Positions count from 0, as transformers' `generate` has them: RoBERTa and
        its like would begin behind the padding token's."""
        places = {"position_ids": torch.arange(token_ids.shape[1])[None]} if self._positions else {}
        return {"use_cache": False, **places}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, attention and norms are transformers' own."""
        use(self.module, self._theirs)
        for norm in self._norms:
            norm.use(fused=False)
        try:
            yield
        finally:
            for norm in self._norms:
                norm.use(fused=True)
            use(self.module, NAME if self.seen.calls else self._theirs)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """See interface.Attends."""
        call, part = self._calls[module], self._part
        assert part is not None
        layer = self._kv[call.layer]
        geometry, width = part.geometries[layer.group], v.shape[3]
        rows, keys, values = (_rows(x, call.dim) for x in (q, k, v))
        if call.stores:
            call.append(keys, values, layer.k, layer.v, geometry.slots, part.positions)
        out: Tensor = call.attention(rows, layer.k, layer.v, geometry, call.spec, options.get("s_aux"))
        return out[None, :, :, :width]

    def _store(self, call: _Call, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See caches.Store."""
        part, layer = self._part, self._kv[call.layer]
        assert part is not None
        geometry, length = part.geometries[layer.group], part.past + len(part.token_ids)
        keys, values = _rows(k, call.dim), _rows(v, call.dim)
        call.append(keys, values, layer.k, layer.v, geometry.slots, part.positions)
        blocks = geometry.block_tables[0, : -(-length // layer.k.block_size)]
        keys, values = (read_blocks(each, blocks, length)[None] for each in (layer.k, layer.v))
        return keys[..., : k.shape[3]].to(k.dtype), values[..., : v.shape[3]].to(v.dtype)

    def mask(self, options: dict[str, Any]) -> None:
        """See interface.Attends."""

    def logits(self, delta: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        """See Decoder. `delta` is `hidden`'s."""
        if not len(rows):
            return torch.empty(0, self.spec.vocab_size)
        return self.head(delta if len(rows) == len(delta) else delta[rows], None)

    def head(self, delta: Tensor, residual: Tensor | None) -> Tensor:
        """States [R, hidden] -> logits float32 [R, vocab]."""
        self._given = _Given(last_hidden_state=delta[None])
        try:
            output = self.module(input_ids=torch.zeros(1, len(delta), dtype=torch.int64), use_cache=False)
        finally:
            self._given = None
        logits: Tensor = output.logits[0].float()
        return logits

    def final_states(self, delta: Tensor, residual: Tensor | None) -> Tensor:
        """See Decoder."""
        return delta.float()


@torch.inference_mode()
def _body(module: nn.Module) -> nn.Module:
    """The outermost part of a module that gives states, which a head reads: a pass over a token shows it."""
    found = list[nn.Module]()

    def note(part: nn.Module, args: Any, output: Any) -> None:
        if part is not module and getattr(output, "last_hidden_state", None) is not None:
            found.append(part)

    hooks = [part.register_forward_hook(note) for part in module.modules()]
    try:
        module(input_ids=torch.ones(1, 1, dtype=torch.int64), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise UnsupportedError(f"{type(module).__name__}: no part of transformers' module gives states")
    return found[-1]  # inner parts end before outer ones


class _Given(dict[str, Any]):
    """States in place of the output of the layers: they are all that a head reads. It may be read as a tuple, too."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else super().__getitem__(key)


def _rows(x: Tensor, dim: int) -> Tensor:
    """[1, heads, T, D] -> [T, heads, dim], with zeros after D."""
    x = x[0].transpose(0, 1)
    if x.shape[2] < dim:
        x = nn.functional.pad(x, (0, dim - x.shape[2]))
    return x.contiguous()
