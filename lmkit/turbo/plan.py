"""The plan of one step, in plain integers. The scheduler writes it, a runner carries it out, ranks can receive it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from lmkit.turbo.request import ImageInput, Pooling, SamplingParams, TokenLogprobs

# A step has a few objects for each sequence (gc=False). None is part of a cycle, so no search for garbage visits them.

CAPTURED_TOKENS = 1024  # of a step with prompt tokens that is captured on a GPU, at most
DRAFTED_TOKENS = 256  # of a step with drafts, at most: logits of all of them are computed


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence enters (or, after a preemption, re-enters) a slot of the persistent batch."""

    slot: int
    token_ids: list[int]  # prompt; after a preemption also the tokens generated so far
    num_prompt_tokens: int  # of the original prompt
    params: SamplingParams
    eos_token_ids: tuple[int, ...]  # held back until min_tokens, with params.stop_token_ids; empty if ignore_eos
    prompt_logprobs: bool
    block_tables: list[list[int]] = []  # of each group, for tokens whose KV was found; computation starts after them
    pooling: Pooling | None = None
    adapter: int = -1  # its number; -1 = none
    logprobs_start: int = 0  # position of the prompt token after which prompt_logprobs begin
    images: tuple[ImageInput, ...] = ()
    second_start: int | None = None  # see Request
    tenant: str = ""  # whose request it is

    def output_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens start .. start + num_tokens of the sequence in `slot`, after giving it `new_blocks`."""

    slot: int
    start: int  # = num_computed
    num_tokens: int
    new_blocks: list[list[int]]  # of each group, appended to the slot's block table; [] = none
    num_sampled: int  # last positions whose next token is sampled; 0 = the last known token is not reached yet
    # Drafts of the tokens after the last known one: the last num_sampled - 1 tokens of the chunk. They are kept up to
    # the first that differs from the sampled token.
    draft: list[int] = []
    # Of a model with recurrent states: the row that the tokens go on from (-1: the slot's, or none at position 0). The
    # last `replayed` tokens before the chunk were drafted, and the state takes them first. Then it is the row that gets
    # the state after the first `snapshot_after` of all these (-1: none does).
    source: int = -1
    snapshot: int = -1
    snapshot_after: int = 0
    replayed: int = 0
    gives: list[Save] = []  # blocks that are full after it, which other engines may get while it is computed


class Load(msgspec.Struct, frozen=True):
    """Fill `blocks` from a lower tier in the background. Nothing else touches them until the load has ended."""

    job: int
    keys: list[bytes]  # hashes of the blocks' content, see turbo.kv.tiers.keys
    blocks: list[int]
    source: str = ""  # HOST:PORT of an engine that is computing them, "" = they are in a tier
    seconds: float = 0.0  # after which it waits for the source no more


@dataclass(frozen=True)
class Loaded:
    """A load has ended."""

    job: int
    num_blocks: int  # filled blocks of the job, from the first on; a miss or damage ends a load
    hits: dict[str, int]  # these blocks by tier
    tiers: tuple[str, ...] = field(default=(), compare=False)  # of each of them


class Save(msgspec.Struct, frozen=True):
    """Keep a block in a lower tier. It may get other owners in the same plan, so its bytes are copied at once."""

    key: bytes
    block: int


class StepPlan(msgspec.Struct, frozen=True, tag=True):
    """One step. The parts are applied in this order: freed slots, saves, copies, loads, new sequences, chunks.

    Plans are carried out one after the other, in the order in which they were made.
    """

    freed: list[int]
    new: list[NewSequence]
    chunks: list[Chunk]
    copies: list[tuple[int, int]] = []  # (from, to): whole blocks
    loads: list[Load] = []
    saves: list[Save] = []


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The token after one position; FAILED_TOKEN if the logits were unusable. Log-probabilities are set on request."""

    token_id: int
    logprob: float = 0.0
    top: list[tuple[int, float]] = []

    @property
    def scored(self) -> TokenLogprobs:
        """It with its log-probabilities, as an output has them."""
        return TokenLogprobs(self.token_id, self.logprob, self.top)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """A runner's result for one chunk, in the plan's order."""

    # The sequence's next tokens: none if the chunk samples none, otherwise one more than the draft tokens that were
    # right. Only the last can be FAILED_TOKEN.
    tokens: list[SampledToken] = []
    # On request: the values of token p + 1, for each position p of the chunk with
    # logprobs_start <= p and p + 1 < num_prompt_tokens.
    prompt_logprobs: list[TokenLogprobs] = []
    embedding: bytes = b""  # on request, with the chunk that ends the prompt: float32 [hidden]; b"" if not finite
