"""The state of one request in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from lmkit.turbo.plan import NewSequence
from lmkit.turbo.request import FinishReason, Request, TokenLogprobs

FAILED_TOKEN = -2  # as Sampled.token_id: the logits were unusable and the sequence ends with finish_reason "error"


class Status(Enum):
    WAITING = "waiting"  # new, or preempted: holds no slot and no blocks
    RUNNING = "running"  # holds a slot and blocks
    FINISHED = "finished"  # its last output is given; still holds both while a step that computes it is under way


@dataclass(eq=False, slots=True)
class Sequence:
    """`num_computed` runs after `num_tokens`: how far it lags is all there is to know about prefill and decode."""

    request: Request
    arrival: int  # order of arrival, kept through preemptions
    token_ids: list[int]  # prompt and output
    max_tokens: int  # prompt and output at which it ends with "length"
    eos_token_ids: tuple[int, ...]  # empty if ignore_eos
    stop_ids: frozenset[int] = field(init=False)
    num_computed: int = 0  # tokens whose KV is in the blocks
    status: Status = Status.WAITING
    slot: int = -1  # of the persistent batch; -1 = none
    block_table: list[int] = field(default_factory=list)  # written by KVManager only
    in_flight: bool = False  # a step that computes it is scheduled and has not been updated yet
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # gathered so far, of prompt tokens 1 and on

    def __post_init__(self) -> None:
        self.stop_ids = frozenset(self.eos_token_ids + self.request.params.stop_token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def entry(self) -> NewSequence:
        """What a runner must know of it when it takes its slot."""
        return NewSequence(
            slot=self.slot,
            token_ids=self.token_ids.copy(),
            num_prompt_tokens=self.num_prompt_tokens,
            params=self.request.params,
            eos_token_ids=self.eos_token_ids,
            prompt_logprobs=self.request.prompt_logprobs and not self.num_outputs,  # else they are known already
        )

    def gather_prompt_logprobs(self, start: int, values: list[TokenLogprobs]) -> None:
        """Keep what a chunk at `start` adds: after a preemption the first positions are computed again."""
        self.prompt_logprobs += values[len(self.prompt_logprobs) - start :]

    def append(self, token_id: int) -> FinishReason | None:
        """Add a sampled token; why the sequence ends with it, if it does."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids and self.num_outputs > self.request.params.min_new_tokens:
            return "stop"
        return "length" if self.num_tokens >= self.max_tokens else None
