"""`lmkit bench throughput`: conversations through the engine in this process, as fast as it takes them."""

from __future__ import annotations

import functools
import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lmkit.bench.config import Progress
from lmkit.bench.metrics import Burst, RequestRecord, summarize
from lmkit.bench.schema import ThroughputRun
from lmkit.bench.workload import Conversation, Dialogue, Turn
from lmkit.errors import RequestError
from lmkit.text import Tokenizer
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from lmkit.turbo.transport.output import OutputProcessor


@dataclass
class _Talk:
    """A conversation on its way through the engine."""

    idx: int
    turns: deque[Turn]
    dialogue: Dialogue
    prompt_ids: list[int]  # of the next turn, if possible encoded before the clock starts
    turn_idx: int = 0


@dataclass
class _Open:
    """A request in the engine."""

    talk: _Talk
    turn: Turn
    start: float
    num_prompt_tokens: int
    output: OutputProcessor | None
    token_ids: list[int] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)


class ThroughputBench:
    """Feeds one engine. Requests that its queue does not take wait here, and their clock starts when it takes them."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, *, ignore_eos: bool = True, detokenize: bool = True
    ) -> None:
        """`detokenize`: also turn the tokens into text as they come, as a pipeline does."""
        self._engine, self._tokenizer = engine, tokenizer
        self._ignore_eos, self._detokenize = ignore_eos, detokenize

    def run(
        self,
        conversations: Sequence[Conversation],
        *,
        concurrency: int | None = None,
        targets: dict[str, float] | None = None,
        on_done: Callable[[], None] = lambda: None,
    ) -> ThroughputRun:
        """Run every conversation to its end, at most `concurrency` at once. `on_done` is called after each request.

        Each run has its own part of the prefix cache: it reuses nothing that an earlier run computed.
        """
        self._salt = uuid.uuid4().hex
        self._records: list[RequestRecord] = []
        self._open: dict[str, _Open] = {}
        self._skipped_turns = 0
        self._waiting = deque(self._talk(idx, conversation) for idx, conversation in enumerate(conversations))
        before = self._engine.stats()
        self._origin = time.perf_counter()
        while self._waiting or self._open:
            self._admit(concurrency, on_done)
            outputs = self._engine.step()
            now = time.perf_counter() - self._origin
            for output in outputs:
                self._take(output, now, on_done)
        after = self._engine.stats()
        return ThroughputRun(
            concurrency=concurrency,
            summary=summarize(self._records, targets),
            steps=after.steps - before.steps,
            preemptions=after.preemptions - before.preemptions,
            draft_tokens=after.draft_tokens - before.draft_tokens,
            accepted_tokens=(accepted := after.accepted_tokens - before.accepted_tokens),
            draft_tokens_per_step=1 + accepted / drafts if (drafts := after.drafts - before.drafts) else 0.0,
            draft_seconds_saved=after.draft_seconds_saved - before.draft_seconds_saved,
            skipped_turns=self._skipped_turns,
            requests=self._records,
        )

    def _talk(self, idx: int, conversation: Conversation) -> _Talk:
        dialogue = Dialogue(conversation.is_chat)
        dialogue.ask(conversation.turns[0])
        ids = dialogue.token_ids(self._tokenizer, chat=conversation.is_chat)
        return _Talk(idx, deque(conversation.turns), dialogue, ids)

    def _admit(self, concurrency: int | None, on_done: Callable[[], None]) -> None:
        while self._waiting and (concurrency is None or len(self._open) < concurrency):
            talk = self._waiting[0]
            turn = talk.turns[0]
            params = SamplingParams(max_tokens=turn.max_tokens, ignore_eos=self._ignore_eos, seed=0)
            name = f"{talk.idx}-{talk.turn_idx}"
            request = Request(request_id=name, prompt_ids=talk.prompt_ids, params=params, cache_salt=self._salt)
            start = time.perf_counter() - self._origin
            output = OutputProcessor(self._tokenizer, request) if self._detokenize else None
            opened = _Open(talk, turn, start, len(request.prompt_ids), output)
            try:
                self._engine.add(request)
            except RequestError as error:
                if error.code == "queue_full" and self._open:
                    return
                self._record(opened, start, None, error.code, error.message)
                on_done()
            else:
                self._open[request.request_id] = opened
            self._waiting.popleft()

    def _take(self, output: StepOutput, now: float, on_done: Callable[[], None]) -> None:
        opened = self._open[output.request_id]
        if output.token_ids:
            opened.bursts.append(Burst(now, len(output.token_ids)))
            opened.token_ids += output.token_ids
        if opened.output is not None:
            opened.output.process(output)
        if output.finish_reason is None:
            return
        del self._open[output.request_id]
        failed = output.finish_reason in ("error", "abort") or not opened.bursts
        self._record(opened, now, output.finish_reason, "engine_error" if failed else None, output.error)
        on_done()
        if not failed:
            self._go_on(opened)

    def _go_on(self, opened: _Open) -> None:
        """Queue the conversation's next turn, ahead of conversations that have not begun."""
        talk = opened.talk
        talk.turns.popleft()
        if talk.turns:
            talk.dialogue.answer(self._tokenizer.decode(opened.token_ids))
            talk.dialogue.ask(talk.turns[0])
            talk.prompt_ids = talk.dialogue.token_ids(self._tokenizer, chat=talk.dialogue.is_chat)
            talk.turn_idx += 1
            self._waiting.appendleft(talk)

    def _record(self, opened: _Open, end: float, finish: str | None, error: str | None, message: str | None) -> None:
        if error is not None:
            self._skipped_turns += len(opened.talk.turns) - 1
        self._records.append(
            RequestRecord(
                conversation=opened.talk.idx,
                turn=opened.talk.turn_idx,
                prompt_tokens=opened.num_prompt_tokens,
                requested_tokens=opened.turn.max_tokens,
                scheduled=opened.start,
                start=opened.start,
                end=end,
                bursts=opened.bursts,
                finish_reason=finish,
                error=error,
                message=message,
            )
        )


def run_throughput(
    bench: ThroughputBench,
    conversations: Sequence[Conversation],
    limits: Sequence[int | None],
    *,
    warmup: int = 0,
    targets: dict[str, float] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> list[ThroughputRun]:
    """One run for each limit. The last `warmup` conversations are computed first and not measured."""
    measured, warm = conversations[: len(conversations) - warmup], conversations[len(conversations) - warmup :]
    if warm:
        bench.run(warm)
    runs = []
    for limit in limits:
        what = "all at once" if limit is None else f"{limit} at once"
        done = itertools.count(1)
        on_done = functools.partial(_tick, progress, what, done, sum(len(c.turns) for c in measured))
        runs.append(bench.run(measured, concurrency=limit, targets=targets, on_done=on_done))
    return runs


def _tick(progress: Progress, what: str, done: Iterator[int], total: int) -> None:
    progress(what, next(done), total)
