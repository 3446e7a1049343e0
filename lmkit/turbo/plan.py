"""What one step does, in plain integers: the scheduler writes it, a runner carries it out, ranks can receive it."""

from __future__ import annotations

import msgspec

from lmkit.turbo.request import SamplingParams, TokenLogprobs


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence enters (or, after a preemption, re-enters) a slot of the persistent batch."""

    slot: int
    token_ids: list[int]  # prompt, and after a preemption the tokens generated so far
    num_prompt_tokens: int  # of the original prompt
    params: SamplingParams
    eos_token_ids: tuple[int, ...]  # held back until min_tokens, with params.stop_token_ids; empty if ignore_eos
    prompt_logprobs: bool
    block_tables: list[list[int]] = []  # of each group, for tokens whose KV was found; computing begins behind them


class Chunk(msgspec.Struct, frozen=True):
    """Compute tokens start .. start + num_tokens of the sequence in `slot`, after giving it `new_blocks`."""

    slot: int
    start: int  # = num_computed
    num_tokens: int
    new_blocks: list[list[int]]  # of each group, appended to the slot's block table; [] = none
    num_sampled: int  # of its last positions: the token behind each is sampled. 0 = not at the last known token yet
    # Guesses at the tokens behind the last known one: the last num_sampled - 1 tokens of the chunk. They are kept as
    # far as they are what is sampled.
    draft: list[int] = []


class Load(msgspec.Struct, frozen=True):
    """Fill `blocks` from a lower tier, in the background; nothing touches them until that is done."""

    job: int
    keys: list[bytes]  # of the blocks: what they hold, see turbo.tiers
    blocks: list[int]


class Save(msgspec.Struct, frozen=True):
    """Keep a block in a lower tier; it may get other owners in the same plan, so its bytes are taken at once."""

    key: bytes
    block: int


class StepPlan(msgspec.Struct, frozen=True):
    """Apply in this order: freed slots leave, saves are taken, copies made, loads begun, new sequences enter, chunks
    are computed. Plans are carried out one after the other, in the order in which they were made.
    """

    freed: list[int]
    new: list[NewSequence]
    chunks: list[Chunk]
    copies: list[tuple[int, int]] = []  # (from, to): whole blocks
    loads: list[Load] = []
    saves: list[Save] = []


class SampledToken(msgspec.Struct, frozen=True):
    """The token behind one position; FAILED_TOKEN if the logits were unusable. Log-probabilities where asked for."""

    token_id: int
    logprob: float = 0.0
    top: list[tuple[int, float]] = []


class Sampled(msgspec.Struct, frozen=True):
    """A runner's result for one chunk, in the plan's order."""

    # The sequence's next tokens: none if the chunk samples none, else one more than the draft tokens that were right.
    # Only the last can be FAILED_TOKEN.
    tokens: list[SampledToken] = []
    # If asked for: those of token p + 1, for each position p of the chunk with p + 1 < num_prompt_tokens.
    prompt_logprobs: list[TokenLogprobs] = []
