"""Hears an audio window by window: each is a request to the engine, whose prompt says what to write."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import Request as HttpRequest

from lmkit.errors import RequestError
from lmkit.serve.audio.form import AudioRequest
from lmkit.serve.audio.segments import STEP, Segment, cut
from lmkit.serve.auth import owner
from lmkit.serve.serving import Serving, new_id
from lmkit.serve.to_request import placement
from lmkit.text.audio import RATE, AudioSettings, heard
from lmkit.turbo.request import ImageInput, Request, SamplingParams
from lmkit.turbo.speech import SpeechRules
from lmkit.turbo.transport.output import RequestOutput
from lmkit.web.prompt_limit import check_prompts
from lmkit.web.rates import spend

if TYPE_CHECKING:
    import numpy as np

# For each length of a window: text that goes on in short steps is cut off then. A proxy sets as much aside
# (proxy.accounts.extent.HEARINGS).
MOST_WINDOWS = 3


class Listener:
    """The transcript of one audio. `task`: transcribe or translate."""

    def __init__(
        self, request: HttpRequest, server: Serving, body: AudioRequest, samples: np.ndarray, task: str
    ) -> None:
        """Raises RequestError for a model or a field with which this cannot be done."""
        settings = server.info.audio
        assert isinstance(settings, AudioSettings)
        self.server, self.body, self.settings, self.samples = server, body, settings, samples
        self._task, self._id = task, new_id("audio-")
        self._placed = placement(body, owner(request))
        self._share = request.state.held.enter_context(server.answers.share())
        self._before = self._text_before(body.prompt or "")
        self.language = body.language
        if body.language is not None and body.language not in (settings.languages or {"en": 0}):
            known = ", ".join(settings.languages) or "en"
            raise _refused(f"language={body.language!r}: this model knows {known}", "language")
        if task == "translate" and task not in settings.tasks:
            raise _refused("this model transcribes, and translates nothing", "model")
        self.seconds = len(samples) / RATE
        self.timed = body.times or self.seconds > settings.seconds
        self.audio_tokens = self.text_tokens = self.output_tokens = self._number = 0

    def _text_before(self, prompt: str) -> list[int]:
        """The tokens of the text before the audio, as many as half of the context holds."""
        if not prompt.strip():
            return []
        if self.settings.previous is None:
            raise _refused("prompt: this checkpoint names no token that begins one", "prompt")
        self.server.tokenizer.check_length(prompt, self.server.info.max_model_len, "prompt")
        ids = self.server.tokenizer.encode(f" {prompt.strip()}", False)
        if any(token >= self.settings.end for token in ids):
            raise _refused("prompt: it must not write special tokens", "prompt")
        return [self.settings.previous, *ids[1 - self.server.info.max_model_len // 2 :]]

    async def segments(self) -> AsyncGenerator[tuple[str, list[Segment]]]:
        """The text as it comes, and the segments that end with it. A text with times comes segment by segment."""
        size, at, begun = self.settings.seconds * RATE, 0, 0
        most = MOST_WINDOWS * math.ceil(len(self.samples) / size)
        while at < len(self.samples):
            window, seek, begun = self.samples[at : at + size], at / RATE, begun + 1
            if self.language is None:
                self.language = await self._heard_language(window) if self.settings.languages else "en"
            ids, logprobs = list[int](), list[float]()
            async with aclosing(self._run(window, self._prompt(first=at == 0), self._rules())) as outputs:
                async for output in outputs:
                    ids += output.token_ids
                    logprobs += [each.token.logprob or 0.0 for each in output.logprobs]
                    if not self.timed and output.text:
                        yield output.text, []
            ids = [token for token in ids if token != self.settings.end]
            found, advance = cut(ids, self.settings.no_timestamps + 1, seek, len(window) / RATE)
            found = [self._told(each, sum(logprobs) / max(len(logprobs), 1)) for each in found]
            for each in found if self.timed else ():
                yield each.text, [each]
            if not self.timed:
                yield "", found
            at += size if begun >= most else max(round(advance * RATE), 1)

    def _told(self, segment: Segment, logprob: float) -> Segment:
        words = [token for token in segment.token_ids if token < self.settings.end]
        return segment._replace(text=self.server.tokenizer.decode(words), logprob=logprob)

    def _prompt(self, *, first: bool) -> list[int]:
        settings, told = self.settings, list[int]()
        if settings.languages:
            told = [settings.languages[self.language or ""], settings.tasks[self._task]]
        end = [] if self.timed else [settings.no_timestamps]
        return [*(self._before if first else ()), settings.start, *told, *end]

    def _rules(self) -> SpeechRules:
        settings = self.settings
        return SpeechRules(
            suppress=settings.suppress,
            begin_suppress=settings.begin_suppress,
            timestamps=self.timed,
            end=settings.end,
            no_timestamps=settings.no_timestamps,
            max_initial=settings.max_initial,
        )

    async def _heard_language(self, window: np.ndarray) -> str:
        """The likeliest one: what the decoder writes first."""
        rules, languages = SpeechRules(only=tuple(self.settings.languages.values())), self.settings.languages
        async with aclosing(self._run(window, [self.settings.start], rules, max_tokens=1, temperature=0.0)) as outputs:
            ids = [token async for output in outputs for token in output.token_ids]
        return next(name for name, token in languages.items() if token == ids[0])

    async def _run(
        self, window: np.ndarray, prompt: list[int], rules: SpeechRules, **params: Any
    ) -> AsyncGenerator[RequestOutput]:
        seed = secrets.randbits(63) if self.body.seed is None else self.body.seed
        chosen = {"max_tokens": None, "temperature": self.body.temperature, "logprobs": 0} | params
        audio = ImageInput(0, *heard(window, prompt[0]))
        request = Request(
            request_id=f"{self._id}-{self._number}",
            prompt_ids=prompt,
            params=SamplingParams(seed=seed, speech=rules, **chosen),
            images=(audio,),
            **self._placed,
        )
        self._number += 1
        audio_tokens = math.ceil(len(window) / RATE / STEP)
        spend(audio_tokens)
        self.audio_tokens, self.text_tokens = self.audio_tokens + audio_tokens, self.text_tokens + len(prompt)
        check_prompts(self.audio_tokens + self.text_tokens)
        async with aclosing(self.server.run([request], 1, self._share)) as outputs:
            async for _, output in outputs:
                self.output_tokens += len(output.token_ids)
                yield output

    def so_far(self) -> tuple[int, int, int]:
        """Tokens heard and read, those of them that a cache had, and tokens written."""
        return self.audio_tokens + self.text_tokens, 0, self.output_tokens

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage by tokens. A token of audio is a state of the encoder, 0.02 s."""
        inputs = self.so_far()[0]
        return {
            "type": "tokens",
            "input_tokens": inputs,
            "input_token_details": {"audio_tokens": self.audio_tokens, "text_tokens": self.text_tokens},
            "output_tokens": self.output_tokens,
            "total_tokens": inputs + self.output_tokens,
        }


def _refused(message: str, param: str) -> RequestError:
    return RequestError("invalid_request", message, param)
