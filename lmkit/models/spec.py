"""A decoder as data. A family turns a checkpoint's config.json into a ModelSpec; nothing else differs between families.

No torch here: `lmkit inspect` and the memory plan read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from lmkit.errors import ConfigError
from lmkit.layers.blocks.state import Memory
from lmkit.models.audio_spec import AudioSpec
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.mtp_spec import MTPSpec
from lmkit.models.vision_spec import VisionSpec


@dataclass(frozen=True)
class ModelSpec:
    """One transformer: its layers, which may differ, and the parts before and after them."""

    architecture: str  # as in config.json, for messages
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_position: int
    dtype: str  # of the checkpoint's dense weights: float32, bfloat16 or float16
    tie_embeddings: bool = False
    embedding_scale: float = 1.0  # a factor on embeddings
    logit_scale: float = 1.0  # a factor on logits, which the final norm's weight contains once it is read
    final_softcap: float = 0.0  # c > 0: a logit x becomes c * tanh(x / c)
    norm_offset: float = 0.0  # added to a norm's stored weight: 1 if the factor is 1 + w
    final_norm: bool = True  # before the head
    projected: int = 0  # > 0: embeddings have this width, and matrices lead from it to the stream and back to the head
    first_position: int | None = None  # the row of position 0 in a table of learned positions; None = there is no table
    token_types: int = 0  # rows of a table of vectors: row 0 is added to a text's tokens, row 1 to the second of a pair
    embed_norm: bool = False  # the sum of a token's embeddings is normalized
    sees_all: bool = False  # tokens see later ones, too: the model reads texts and writes none
    unread: tuple[str, ...] = ()  # tensors whose names begin so belong to other parts of the model, as a vision tower
    vision: VisionSpec | None = None  # a tower that encodes images
    audio: AudioSpec | None = None  # an encoder of audio, whose states all layers see
    per_layer_vocab: int = 0  # tokens in the table of layers.per_layer
    per_layer_scale: float = 1.0  # a factor on this table
    foreign: bool = False  # transformers' modules compute it, see models.flexible
    reusable: bool = True  # whether the prefix cache can keep what sequences leave behind
    mtp: MTPSpec | None = None  # a layer that drafts tokens, which the checkpoint may have

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream, which all layers share."""
        return self.layers[0].hidden_size

    @property
    def head_shape(self) -> tuple[int, int]:
        """[vocab, hidden] of the embedding and of the head."""
        return self.vocab_size, self.hidden_size

    @property
    def num_logits(self) -> int:
        """Outputs of the head. A model that writes no text has one, which nobody sees: steps end with a head."""
        return 1 if self.sees_all else self.vocab_size

    @property
    def norm_eps(self) -> float:
        """The epsilon of the final norm. It is that of the last layer's norms."""
        return self.layers[-1].norm_eps

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The distinct layers, in order."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def is_recurrent(self) -> bool:
        """Whether layers keep a state for each sequence, which has no blocks."""
        return any(layer.recurrent for layer in self.kinds)

    @property
    def has_kv(self) -> bool:
        """Whether layers keep keys and values."""
        return any(layer.kv for layer in self.kinds)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence."""
        return sum(layer.recurrent.num_bytes for layer in self.layers if layer.recurrent)

    @property
    def memory(self) -> Memory | None:
        """What the model sees of an encoder's states, alike in all layers. Every sequence has some then."""
        return self.layers[0].memory

    @property
    def per_layer(self) -> int:
        """The width of a token's vectors of all layers, see layers.per_layer. 0: it has none."""
        return sum(layer.per_layer for layer in self.layers)

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """The layers whose keys and values later ones read, in order."""
        return tuple(sorted({layer.kv_from for layer in self.layers if layer.kv_from is not None}))

    @property
    def reads_embeddings(self) -> bool:
        """Whether layers read embeddings beside the stream."""
        return any(block.reads_embeddings for layer in self.kinds for block in layer)

    @property
    def rows_sent(self) -> int:
        """Rows [hidden] of a token that a stage sends to the next one: the stream, and the embedding if layers read
        it."""
        return 2 if self.reads_embeddings else 1

    @property
    def token_width(self) -> int:
        """The width of what layers read of each token beside the stream: vectors of their own, or its embedding."""
        return self.hidden_size if self.reads_embeddings else self.per_layer

    @property
    def reads_beside(self) -> bool:
        """Whether a layer reads more of a sequence than the states before it."""
        return bool(self.token_width or self.kv_sources)

    @property
    def num_weights(self) -> int:
        """Weights of the layers' linears."""
        return sum(layer.num_weights for layer in self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding window of each layer, 0 = full."""
        return tuple(layer.kv.window if layer.kv else 0 for layer in self.layers)

    @property
    def second_row(self) -> int:
        """The row of position 0 of the second text of a pair, in the table of learned positions. 0: it has none."""
        return self.max_position if self.token_types > 1 else 0

    @property
    def deep_layers(self) -> int:
        """The number of first layers that add parts of images to the residual stream after them (DeepStack)."""
        return 0 if self.vision is None else len(self.vision.tapped)

    @property
    def turns_by_place(self) -> bool:
        """Whether tokens of images turn by their places in the image (M-RoPE)."""
        return any(layer.rope.sections for layer in self.kinds)

    @property
    def images_whole(self) -> bool:
        """Whether tokens of an image see each other, so that one step computes all of them."""
        return self.vision is not None and self.vision.sees_all

    @property
    def dynamic_length(self) -> int:
        """The prompt length above which angles depend on that length; 0 = they never do."""
        lengths = [layer.rope.original_max_position for layer in self.kinds if layer.rope.by_length]
        return min(lengths, default=0)

    @property
    def long_prompts_agree(self) -> bool:
        """Whether all prompts above `dynamic_length` have the same angles."""
        return all(layer.rope.kind != "dynamic" for layer in self.kinds)

    @property
    def chosen_keys(self) -> int:
        """Keys that indexers choose for a query, which are all in contexts of as many tokens. 0: there are none."""
        return max(block.chosen_keys for layer in self.kinds for block in layer)

    def whole(self) -> ModelSpec:
        """The model without its indexers, for contexts in which they choose every key."""
        if not self.chosen_keys:
            return self
        new = {layer: layer.whole() for layer in self.kinds}
        unread = tuple(
            layer.module_name(index, role)
            for index, layer in enumerate(self.layers)
            for role in (*layer.linears, *layer.vectors)
            if role not in new[layer].linears | new[layer].vectors and not role.endswith(".bias")
        )
        return replace(
            self,
            layers=tuple(new[layer] for layer in self.layers),
            max_position=min(self.max_position, self.chosen_keys),
            unread=(*self.unread, *unread),
        )

    def with_sinks(self, count: int) -> ModelSpec:
        """The same model with `count` attention sinks. Raises ConfigError if no layer has a sliding window."""
        if count and not any(self.windows):
            raise ConfigError(f"attention_sinks={count}: no layer of this {self.architecture} has a sliding window")
        new = {
            layer: layer.having(attention=replace(layer.attention, sinks=count if layer.attention.window else 0))
            if layer.kv
            else layer
            for layer in self.kinds
        }
        return replace(self, layers=tuple(new[layer] for layer in self.layers))

    def tensor_name(self, layer: int, role: str) -> str:
        """`attn.q.bias` of layer 3 -> `model.layers.3.self_attn.q_proj.bias`."""
        kind = ".bias" if role.endswith(".bias") else ".weight"
        return self.module_name(layer, role.removesuffix(".bias")) + kind

    def module_name(self, layer: int, role: str) -> str:
        """`attn.q` of layer 3 -> `model.layers.3.self_attn.q_proj`."""
        return self.layers[layer].module_name(layer, role)
