"""What the ops of recurrent blocks know of sequences: their states, and a row of numbers for each.

`rows` int32 [B, 6] has for each sequence:

    its row of the states; on a GPU -1 = a sequence that pads the step, and whose results mean nothing
    the row that its tokens go on from: another one if it begins with a snapshot, -1 if it begins with zeros
    the row that gets a snapshot, -1 = none
    the number of tokens before the snapshot
    the draft tokens of the step before that are taken first
    the draft tokens at the end of its tokens

Tokens are taken one after the other, so a result does not depend on how a sequence is cut into steps.

It is not known yet whether drafts are accepted. Their results are computed, but the state of the sequence stays the one
before them, and what they give to it is kept (`RecurrentStates.drafted`). The next step says how many of them were
right. It takes these first, and their results are not computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ROW_FIELDS = 6  # of `rows`


@dataclass(frozen=True)
class RecurrentStates:
    """The states of a layer, float32: a row for each slot, then those of snapshots. Only slots have draft tokens."""

    conv: Tensor  # [rows, C, kernel - 1]: the last inputs of the convolution, the oldest first
    matrix: Tensor  # [rows, heads, ...]: a matrix for each head; none has elements if the convolution is all there is
    drafted: Tensor  # [slots, draft tokens, numbers]: what a draft token gives to the state

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """What a state is."""
        return self.conv, self.matrix
