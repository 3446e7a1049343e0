"""A deterministic engine without torch, with the interface of lmkit.turbo.engine.engine.Engine.

Output k of a request is token (seed + k) of the endless text PHRASE. So any length, stop string or seed has a known
answer. Words in a prompt ask for misbehaviour: see `_Sequence.mood`. A model folder that is named after a failure fails
to load. A prompt may also say what is answered, see `scripted`.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from pathlib import Path

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError, RequestError
from lmkit.text import Tokenizer
from lmkit.turbo.request import EngineInfo, EngineStats, FinishReason, Request, StepOutput, TokenLogprobs

PHRASE = "The quick brown fox jumps over the lazy dog, naïvely. 日本 🙂\n"
DEMO = Path(__file__).parents[2] / "lmkit" / "demo" / "model"
EMBEDDING_SIZE = 8
EOS = 2
MOODS = ("CRASH", "KILL", "SLOW", "EOS", "REFUSE", "HANG", "BROKEN")


def script(answers: list[str]) -> str:
    """A text for the first message of a conversation: the answers to it and to each result of a tool.

    It is hexadecimal: clients quote and escape what their users write.
    """
    return f"SCRIPT{json.dumps(answers).encode().hex()}END"


def scripted(prompt: str) -> str | None:
    """The answer that a prompt asks for: that of its place in the conversation, where results have the word RESULT.

    What is asked after the last of them gets the last answer again.
    """
    if (found := re.search(r"SCRIPT([0-9a-f]*)END", prompt)) is None:
        return None
    answers: list[str] = json.loads(bytes.fromhex(found[1]))
    return answers[min(prompt.count("RESULT"), len(answers) - 1)]


def embedding(ids: list[int]) -> bytes:
    """How often the ids are 0, 1, 2 ... modulo EMBEDDING_SIZE, and the last of them once more."""
    counts = [sum(i % EMBEDDING_SIZE == at for i in [*ids, ids[-1]]) for at in range(EMBEDDING_SIZE)]
    return struct.pack(f"<{EMBEDDING_SIZE}f", *counts)


class _Sequence:
    def __init__(self, request: Request, mood: str | None, answer: list[int]) -> None:
        self.request = request
        self.answer = answer
        self.mood = mood
        self.num_output = 0
        self.start = time.monotonic()


class FakeEngine:
    def __init__(self, model_path: str, config: EngineConfig) -> None:
        name = Path(model_path).name
        if name == "bad-checkpoint":
            raise CheckpointError(f"{model_path}: model.safetensors is truncated")
        if name == "slow-to-load":
            time.sleep(30)
        if name == "exits":
            os._exit(7)
        if name == "exits-second-time":
            marker = Path(model_path) / "started"
            if marker.exists():
                os._exit(7)
            marker.touch()
        self._tokenizer = Tokenizer.from_pretrained(DEMO)
        self._phrase = self._tokenizer.encode(PHRASE)
        self._config = config
        self._sequences: dict[str, _Sequence] = {}
        self._steps = self._prompt_tokens = self._generation_tokens = 0
        self.info = EngineInfo(
            model_path=model_path,
            vocab_size=4096,
            max_model_len=config.max_model_len or 4096,
            num_blocks=128,
            block_size=config.tokens_per_block,
            kv_dtype="float32",
            memory={"weights": 1, "kv": 128 << 20},
            reserved=300 << 20,
            hidden_size=EMBEDDING_SIZE,
        )

    def add(self, request: Request) -> None:
        if request.is_ahead:
            return
        text = self._tokenizer.decode(request.prompt_ids)
        answer = scripted(text)
        mood = next((mood for mood in MOODS if mood in text), None) if answer is None else None
        if mood == "REFUSE" or len(self._sequences) >= self._config.max_queue + self._config.sequences_per_step:
            raise RequestError("queue_full", "the queue is full")
        if mood == "BROKEN":
            raise ZeroDivisionError("secret detail")
        ids = [] if answer is None else [*self._tokenizer.encode(answer, False), EOS]
        self._sequences[request.request_id] = _Sequence(request, mood, ids)
        self._prompt_tokens += len(request.prompt_ids)

    def abort(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[StepOutput]:
        self._steps += 1
        moods = {sequence.mood for sequence in self._sequences.values()}
        if "CRASH" in moods:
            raise ZeroDivisionError("secret detail")
        if "KILL" in moods:
            os._exit(9)
        time.sleep(0.02 if "SLOW" in moods else 5 if "HANG" in moods else 0)
        outputs = [self._advance(sequence) for sequence in list(self._sequences.values())]
        for output in outputs:
            if output.finish_reason is not None:
                del self._sequences[output.request_id]
        return outputs

    def _advance(self, sequence: _Sequence) -> StepOutput:
        request, params = sequence.request, sequence.request.params
        timeout = request.timeout or self._config.request_timeout
        if timeout is not None and time.monotonic() - sequence.start > timeout:
            return StepOutput(
                request_id=request.request_id,
                token_ids=[],
                finish_reason="error",
                error=f"not done after {timeout:g} s",
                error_code="deadline_exceeded",
            )
        assert params.seed is not None or request.pooling
        token_id = self._phrase[((params.seed or 0) + sequence.num_output) % len(self._phrase)]
        if sequence.answer:
            token_id = sequence.answer[sequence.num_output]
        if params.logit_bias:  # greedy: the token with the largest bias
            token_id = max(params.logit_bias, key=lambda i: params.logit_bias[i])
        sequence.num_output += 1
        if params.max_tokens == 0:
            return StepOutput(
                request_id=request.request_id,
                token_ids=[],
                finish_reason="length",
                prompt_logprobs=self._prompt_logprobs(request),
                embedding=embedding(request.prompt_ids) if request.pooling else b"",
            )
        self._generation_tokens += 1
        finish: FinishReason | None = None
        stop_token = None
        past_min = sequence.num_output > params.min_tokens
        if sequence.mood == "EOS" and sequence.num_output > 5 and not params.ignore_eos and past_min:
            finish, token_id, stop_token = "stop", EOS, EOS
        elif sequence.answer and token_id == EOS:
            finish, stop_token = "stop", EOS
        elif token_id in params.stop_token_ids and past_min:
            finish, stop_token = "stop", token_id
        limit = min(params.max_tokens or 1 << 30, self.info.max_model_len - len(request.prompt_ids))
        if finish is None and sequence.num_output >= limit:
            finish = "length"
        logprobs = []
        if params.logprobs is not None:
            others = [(token_id, -0.25), *((i, -1.0 - i) for i in range(4, 24))]
            logprobs = [TokenLogprobs(token_id, -0.25, others[: params.logprobs])]
        return StepOutput(
            request_id=request.request_id,
            token_ids=[token_id],
            finish_reason=finish,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(request) if sequence.num_output == 1 else [],
            stop_token=stop_token,
        )

    def _prompt_logprobs(self, request: Request) -> list[TokenLogprobs]:
        ids, num_top = request.prompt_ids, request.params.prompt_top
        top = [(5 + n, -0.125 - n) for n in range(num_top)]
        return [TokenLogprobs(ids[i], -0.5 * i, top) for i in range(1, len(ids)) if request.prompt_logprobs]

    @property
    def step_limit(self) -> float:
        return 2.0 if any(sequence.mood == "HANG" for sequence in list(self._sequences.values())) else 60.0

    def check_integrity(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass

    def stats(self) -> EngineStats:
        running = min(len(self._sequences), self._config.sequences_per_step)
        return EngineStats(
            num_running=running,
            num_waiting=len(self._sequences) - running,
            blocks_used=running,
            blocks_total=self.info.num_blocks,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
        )
