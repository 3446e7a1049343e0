"""A stream of hidden states on its way through a layer, one part of the layer at a time.

    hidden --attention--> attended --attn.o--> + hidden = middle --gate, up--> inner --mlp.down--> + middle = next

The linears of a layer are rounded one after the other. Each part starts where the last one left every token, so nothing
is computed twice. `attended` and `inner` are stored in a scratch buffer, in the numbers that the layer multiplies.
`middle` is stored in the buffer of the next layer's hidden states. A mixture of experts has no `inner`: its output is
computed from `middle` each time. A layer may add its part of the tokens' vectors behind the MLP, and scale the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from lmkit.layers.moe import MoE
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.quant.data.hidden_states import Stream


class Part(IntEnum):
    """The parts of a layer in order. A stream stands in front of one of them."""

    ATTENTION = 0
    ATTENTION_OUT = 1
    MLP = 2
    MLP_OUT = 3
    END = 4

    @classmethod
    def of(cls, role: str) -> Part:
        """The part that the linear `role` begins."""
        if role.startswith("attn."):
            return cls.ATTENTION_OUT if role == "attn.o" else cls.ATTENTION
        return cls.MLP_OUT if role.endswith(".down") else cls.MLP


class _SeenAll(Exception):
    """Raised when every wanted input was seen: the rest of the part need not be computed."""


@dataclass
class LayerPass:
    """One stream inside a layer. All tokens stand in front of `part`; `exact`: it is the original model's stream.

    Before `part` is set to a new one, all tokens are moved there.
    """

    stream: Stream
    layer: DecoderLayer
    exact: bool = False
    part: Part = Part.ATTENTION

    def inputs(self, tokens: slice, part: Part, roles: tuple[str, ...]) -> dict[str, Tensor]:
        """Move whole rows of `tokens` up to `part` and return the inputs that `roles`, linears of this part, see there.
        An expert without tokens is left out."""
        self.move(tokens, part)
        seen: dict[str, Tensor] = {}
        if not roles:
            return seen

        def record(role: str, x: Tensor) -> None:
            if role in roles:
                seen[role] = x
                if len(seen) == len(roles):
                    raise _SeenAll

        # The experts are computed as a whole, behind the router.
        part = Part.MLP_OUT if part is Part.MLP and self.layer.spec.is_sparse else part
        self.layer.observe(record)
        try:
            self._compute(part, tokens)
        except _SeenAll:
            pass
        finally:
            self.layer.observe(None)
        return seen

    def residual_part(self, part: Part) -> Part | None:
        """The part in front of which the residual stream stands, to which a part adds the outputs of its one linear."""
        spec = self.layer.spec
        if spec.post_norms or spec.stream_norms or (part is Part.MLP_OUT and spec.is_sparse):
            return None
        return {Part.ATTENTION_OUT: Part.ATTENTION, Part.MLP_OUT: Part.MLP}.get(part)

    def residual(self, tokens: slice, part: Part) -> Tensor:
        """The residual stream of `tokens`, to which a part adds."""
        before = self.residual_part(part)
        assert before is not None
        return self._states(before, tokens)

    def move(self, tokens: slice, part: Part) -> None:
        """Move whole rows of `tokens` up to `part`. When all tokens are there, the caller sets `part`."""
        for at in range(self.part, part):
            result = self._compute(Part(at), tokens)
            if result is not None:
                self._place(at + 1)[tokens] = result

    def _place(self, part: int) -> Tensor:
        """The buffer of the states in front of a part, [tokens, width]."""
        if part in (Part.ATTENTION_OUT, Part.MLP_OUT):
            spec = self.layer.spec
            width = spec.attended_size if part == Part.ATTENTION_OUT else spec.widest_mlp
            return self.stream.scratch(self.layer.product_dtype, exact=self.exact)[:, :width]
        return self.stream.states(self.stream.layer + (part > Part.ATTENTION), exact=self.exact)

    def _states(self, part: int, tokens: slice) -> Tensor:
        """The states of `tokens` in front of a part, where the layer is."""
        return self.stream.here(self._place(part)[tokens])

    def _compute(self, part: Part, tokens: slice) -> Tensor | None:
        """The states behind a part, for whole rows. None: they are the same as in front of it."""
        layer, stream = self.layer, self.stream
        if part is Part.ATTENTION:
            hidden = self._states(part, tokens)
            geometry = stream.inputs(tokens, exact=self.exact)
            projected = layer.queries_keys_values(hidden, layer.before("norm.attn"))
            return layer.attend(projected, geometry.batch, geometry.rope, geometry.kv)
        if part is Part.ATTENTION_OUT:
            hidden, attended = self._states(Part.ATTENTION, tokens), layer.project(self._states(part, tokens))
            return layer.behind("norm.attn", hidden, attended)
        middle = self._states(Part.MLP, tokens)
        if isinstance(layer.mlp, MoE):
            if part is Part.MLP:
                return None
            return self._finished(tokens, middle + layer.feed_forward(middle, layer.before("norm.mlp")))
        if part is Part.MLP:
            return layer.mlp.inner(middle, layer.before("norm.mlp"))
        return self._finished(tokens, layer.behind("norm.mlp", middle, layer.reduce(self._states(part, tokens))))

    def _finished(self, tokens: slice, behind: Tensor) -> Tensor:
        """The states behind the MLP -> those behind the layer."""
        return self.layer.finished(behind, self.stream.vectors(tokens).batch)
