"""The state of one request in the engine."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from lmkit.turbo.plan import NewSequence, StepPlan
from lmkit.turbo.request import FinishReason, Request, StepOutput, TokenLogprobs

FAILED_TOKEN = -2  # as SampledToken.token_id: the logits were unusable and the sequence ends with finish_reason "error"


class Status(Enum):
    WAITING = "waiting"  # new, or preempted: holds no slot and no blocks
    LOADING = "loading"  # holds a slot, and blocks that are filled from a lower tier
    RUNNING = "running"  # holds a slot and blocks
    FINISHED = "finished"  # its last output is given; it holds both while one of its steps or loads is under way


# Python 3.11 takes 0.2 us to look up a member of an Enum.
WAITING, RUNNING, FINISHED = Status.WAITING, Status.RUNNING, Status.FINISHED


class Use(Enum):
    """Whom a snapshot is for."""

    OWN = "own"  # the sequence itself, if it is preempted, or continued when it has ended
    PROMPT = "prompt"  # others with the same prompt
    SHARED = "shared"  # others that leave a known path at the same place


class Snapshot(NamedTuple):
    """A recurrent state that a step keeps: the state after the first `num_tokens` tokens of a sequence."""

    row: int  # of the states; -1 = none is kept
    num_tokens: int
    use: Use = Use.OWN


@dataclass(eq=False, slots=True)
class BlockTable:
    """A sequence's blocks in one class of layers."""

    blocks: list[int]  # of block_size tokens each, from the first on; see KVManager
    num_retired: int = 0  # first blocks that the window has passed: they were released, or kept as sinks
    num_published: int = 0  # full blocks that were published to the cache


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's sequence. `num_computed` follows `num_tokens`; their difference alone tells prefill from decode."""

    request: Request
    arrival: int  # order of arrival, kept through preemptions
    priority_key: float  # lower = sooner; see turbo.scheduling.policy
    deadline: float  # on the scheduler's clock; inf = none
    token_ids: array[int]  # int32: prompt and output
    max_tokens: int  # number of prompt and output tokens at which it ends with "length"
    eos_token_ids: tuple[int, ...]  # empty if ignore_eos
    adapter: int = -1  # its number; -1 = none
    adapter_digest: str = ""  # of its weights, on which the KV depends
    request_id: str = field(init=False)
    num_prompt_tokens: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    kv_from: str = field(init=False)  # the engine that computes its prompt, until it is asked
    num_computed: int = 0  # tokens whose KV is in the blocks when all scheduled steps have run
    num_completed: int = 0  # tokens among these whose steps have run already
    num_pending: int = 0  # tokens that scheduled steps will sample, without those for the positions of a draft
    draft: list[int] = field(default_factory=list)  # drafts of the next tokens, for the next step; see `propose`
    num_drafted: int = 0  # draft tokens that a scheduled step computes
    in_flight: int = 0  # scheduled steps that compute it and have not been updated yet, and loads
    status: Status = Status.WAITING
    slot: int = -1  # of the persistent batch; -1 = none
    has_entered: bool = False  # the runner knows it
    num_preemptions: int = 0
    overtaken: int = 0  # how often a later sequence was admitted before it
    num_found: int = 0  # tokens whose KV was found when it was admitted last
    kv_sources: list[str] = field(default_factory=list)  # of full blocks among these; see turbo.kv.origins
    cached_tokens: int | None = None  # prompt tokens found in the cache when it was first admitted
    arrived: float = 0.0  # on the scheduler's clock
    load_job: int = 0  # the load of what another engine computes; 0 = none
    queue_seconds: float | None = None  # that it waited until it was first admitted
    tables: list[BlockTable] = field(default_factory=list)  # of each class of layers; written by KVManager only
    cache_ids: array[int] = field(init=False)  # int32: token_ids, and for a token of an image minus its number
    state: int = -1  # row of the recurrent state that it begins with; -1 = none, or its first step is planned
    num_behind: int = 0  # accepted drafts, counted in num_computed, that its recurrent state takes in the next step
    snapshot_at: dict[int, Use] = field(default_factory=dict)  # numbers of tokens after which others want a snapshot
    snapshots: list[Snapshot] = field(default_factory=list)  # that it owns, in the order of their tokens
    keys: list[bytes] = field(default_factory=list)  # keys of its full blocks in the tiers
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # gathered so far, after logprobs_start

    def __post_init__(self) -> None:
        self.request_id, self.num_prompt_tokens = self.request.request_id, len(self.request.prompt_ids)
        self.stop_ids = frozenset(self.eos_token_ids + self.request.params.stop_token_ids)
        self.cache_ids = self.token_ids
        if self.request.images:
            self.cache_ids = self.token_ids[:]
            for image in self.request.images:
                self.cache_ids[image.start : image.end] = array("i", [-image.number]) * image.num_tokens
        self.kv_from = self.request.kv_from

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens to schedule, including one that is being sampled: the runner knows it when it needs it."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def num_due(self) -> int:
        """`num_uncomputed`, or 0 if nothing can be scheduled before the steps under way have returned their tokens.

        The number of tokens that a draft yields is not known before its step has run.
        """
        known = len(self.token_ids) + self.num_pending
        if self.num_drafted or (self.num_pending and known >= self.max_tokens):
            return 0
        return known - self.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt tokens must be computed for log-probabilities.

        It is false once there are outputs, so a preempted sequence does not score its prompt again.
        """
        return self.request.prompt_logprobs and not self.num_outputs

    def progress(self) -> list[StepOutput]:
        """An output that says how much of the prompt is computed, if the request asks for it and none has come."""
        if not self.request.progress or self.num_outputs or self.status is not Status.RUNNING:
            return []
        known = StepOutput(request_id=self.request_id, token_ids=[], **self.admission())
        return [replace(known, num_computed=self.num_completed)]

    def admission(self, block_size: int = 0) -> dict[str, Any]:
        """What its first output says of its admission."""
        known = {"cached_tokens": self.cached_tokens or 0, "queue_seconds": self.queue_seconds or 0.0}
        return known | ({"kv": self._kv_runs(block_size)} if self.request.tells_kv and block_size else {})

    def _kv_runs(self, block_size: int) -> list[tuple[int, str]]:
        """Where the KV of the prompt came from: (end, source) of each run of tokens."""
        ends = [(block_size * (i + 1), source) for i, source in enumerate(self.kv_sources)]
        runs = list[tuple[int, str]]()
        for end, source in [*ends, (self.num_found, "cache"), (self.num_prompt_tokens, "computed")]:
            end = min(end, self.num_prompt_tokens)  # known tokens of an answer may have been found, too
            if end > (runs[-1][0] if runs else 0):
                if runs and runs[-1][1] == source:
                    runs.pop()
                runs.append((end, source))
        return runs

    def last(self, output: StepOutput) -> StepOutput:
        """`output`, its last one, with what is known of all of its time."""
        return replace(output, num_preemptions=self.num_preemptions) if self.num_preemptions else output

    @property
    def max_cached(self) -> int:
        """The first tokens whose KV may come from a cache. The others are computed for what they give."""
        if self.request.pooling not in (None, "last"):
            return 0
        most = self.request.logprobs_start if self.scores_prompt else self.num_tokens - 1
        return most if self.request.max_cached is None else min(most, self.request.max_cached)

    def tokens(self, count: int) -> np.ndarray:
        """The first `count` tokens, int32 [count]. The view must be dropped before the next token is appended."""
        return np.frombuffer(self.token_ids, np.int32, count)

    def cached_as(self, count: int) -> np.ndarray:
        """The first `count` tokens as the cache knows them: equal ones mean equal KV. A view as that of `tokens`."""
        return np.frombuffer(self.cache_ids, np.int32, count)

    @property
    def digests(self) -> dict[int, bytes]:
        """The digests of its images by the numbers that the cache has for their tokens."""
        return {-image.number: image.digest for image in self.request.images}

    def entry(self, block_tables: list[list[int]]) -> NewSequence:
        """The description of the sequence that a runner needs when the sequence takes its slot."""
        return NewSequence(
            slot=self.slot,
            token_ids=self.token_ids.tolist(),
            num_prompt_tokens=self.num_prompt_tokens,
            params=self.request.params,
            eos_token_ids=self.eos_token_ids,
            prompt_logprobs=self.scores_prompt,
            logprobs_start=self.request.logprobs_start,
            pooling=self.request.pooling,
            adapter=self.adapter,
            block_tables=block_tables,
            images=self.request.images,
            second_start=self.request.second_start,
            tenant=self.request.tenant,
        )

    def gather_prompt_logprobs(self, start: int, values: list[TokenLogprobs]) -> None:
        """Keep the values that a chunk at `start` adds. After a preemption the first positions are computed again."""
        first = self.request.logprobs_start
        self.prompt_logprobs += values[first + len(self.prompt_logprobs) - max(start, first) :]

    def propose(self, draft: list[int]) -> None:
        """Let the next step compute drafts of the tokens after the known ones, up to the sequence's maximum length."""
        assert not self.num_pending, f"{self.request_id}: a draft after a token that is not known"
        self.draft = draft[: max(self.max_tokens - self.num_tokens - 1, 0)]

    def keep_drafts(self, count: int, *, has_states: bool) -> None:
        """The last `count` computed tokens were accepted drafts. With states they are completed when the states have
        taken them, which the next step does: until then no snapshot stands after them."""
        self.num_behind = count
        self.num_computed += count
        self.num_completed += 0 if has_states else count

    def append(self, token_id: int) -> FinishReason | None:
        """Append a sampled token. Returns the finish reason if the sequence ends with it."""
        self.token_ids.append(token_id)
        if self.cache_ids is not self.token_ids:
            self.cache_ids.append(token_id)
        if token_id in self.stop_ids and self.num_outputs > self.request.params.min_tokens:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None


@dataclass(frozen=True)
class UnderWay:
    """A plan that is carried out, with the sequences of its chunks."""

    plan: StepPlan
    sequences: list[Sequence]
    waited: bool  # it was made when no other was under way
