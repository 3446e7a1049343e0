"""A stream of hidden states on its way through a layer, one part of the layer at a time.

    hidden --attention--> attended --attn.o--> + hidden = middle --gate, up--> inner --mlp.down--> + middle = next

Part 2 i begins block i of the layer, part 2 i + 1 its last linear. The linears of a layer are rounded one after the
other. Each part starts where the last one left every token, so nothing is computed twice. `attended` and `inner` are
stored in a scratch buffer, in the numbers that the layer multiplies. `middle` is stored in the buffer of the next
layer's hidden states. A mixture of experts has no `inner`: its output is computed from `middle` each time.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmkit.layers.block import At
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.quant.data.hidden_states import Stream


class _SeenAll(Exception):
    """Raised when every wanted input was seen: the rest of the part need not be computed."""


@dataclass
class LayerPass:
    """One stream inside a layer. All tokens stand before `part`; `exact`: it is the original model's stream.

    Before `part` is set to a new one, all tokens are moved there.
    """

    stream: Stream
    layer: DecoderLayer
    exact: bool = False
    part: int = 0

    @property
    def end(self) -> int:
        """The part after the last one."""
        return 2 * len(self.layer.blocks)

    def inputs(self, tokens: slice, part: int, roles: tuple[str, ...]) -> dict[str, Tensor]:
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

        if self.layer.blocks[part // 2].block.out is None:  # it is computed as a whole
            part |= 1
        self.layer.observe(record)
        try:
            self._compute(part, tokens)
        except _SeenAll:
            pass
        finally:
            self.layer.observe(None)
        return seen

    def residual_part(self, part: int) -> int | None:
        """The part before which the residual stream stands, to which a part adds the outputs of its one linear."""
        block = self.layer.blocks[part // 2]
        adds = part % 2 and block.block.out is not None and not (block.spec.norm_out or block.spec.norm_sum)
        return part - 1 if adds else None

    def residual(self, tokens: slice, part: int) -> Tensor:
        """The residual stream of `tokens`, to which a part adds."""
        before = self.residual_part(part)
        assert before is not None
        return self._states(before, tokens)

    def move(self, tokens: slice, part: int) -> None:
        """Move whole rows of `tokens` up to `part`. When all tokens are there, the caller sets `part`."""
        for at in range(self.part, part):
            result = self._compute(at, tokens)
            if result is not None:
                self._place(at + 1)[tokens] = result

    def _place(self, part: int) -> Tensor:
        """The buffer of the states before a part, [tokens, width]."""
        if part % 2:
            width = self.layer.spec.inner_width(part // 2)
            return self.stream.scratch(self.layer.product_dtype, exact=self.exact)[:, :width]
        return self.stream.states(self.stream.layer + (part > 0), exact=self.exact)

    def _states(self, part: int, tokens: slice) -> Tensor:
        """The states of `tokens` before a part, where the layer is."""
        return self.stream.here(self._place(part)[tokens])

    def _compute(self, part: int, tokens: slice) -> Tensor | None:
        """The states after a part, for whole rows. None: they are the same as before it."""
        block, stream = self.layer.blocks[part // 2], self._states(part & ~1, tokens)
        is_whole = block.block.out is None
        if part % 2 and not is_whole:
            return block.apart(stream, block.whole(block.block.project(self._states(part, tokens))))
        if is_whole and not part % 2:
            return None
        x, norm, _ = block.read(stream)
        at = self._at(block.spec.block.state is not None, tokens)
        return block.apart(stream, block.contribution(x, norm, at)) if is_whole else block.block.inner(x, norm, at)

    def _at(self, has_state: bool, tokens: slice) -> At:
        """What a block reads of whole rows: with the keys and values of earlier layers if it keeps a state."""
        geometry = self.stream.inputs(tokens, exact=self.exact) if has_state else self.stream.vectors(tokens)
        return geometry.at
