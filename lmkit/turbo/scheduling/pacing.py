"""Limits the prompt tokens that a step computes beside decoding sequences, so that decoding never waits for a prompt.

The time of a step is modelled as a sum. Its terms are learned from the steps that ran (`StepTimes`):

    seconds = step + decode * num_decodes + mixed * [decodes and prompt] + prompt * num_prompt
              + attend * num_prompt * context

The chunk fills the time between that of a pure decode step and `slowdown` times that. Only the ratio of the terms
counts for it: if the whole machine slows down, the chunk stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MIN_CHUNK = 8  # tokens; see Pacer._chunk
BEGINNING_WORTH = 4  # times the cost of mixing: the least work of a prompt's beginning in a mixed step
QUEUE_POWER = 3  # the prompts' share grows with this power of the number of waiting requests
# One of eight mixed steps gets a quarter of the prompt tokens. If all chunks were alike, the time of the prompt could
# not be told from that of decoding.
SMALL_EVERY, SMALL = 8, 0.25

# Seconds, before anything is measured. Reading the weights costs as much as computing eight tokens. Mixing costs as
# much as computing one token, and so does attending to 10,000 tokens.
PRIOR = (8e-3, 1e-3, 1e-3, 1e-3, 1e-7)
# Standard deviations of logarithms: 0.1 is about 10 %.
DEVIATIONS = (1.0, 1.0, 2.0, 1.0, 2.0)  # of PRIOR's ratios
SPEED_DEVIATION = 5.0  # of all terms of PRIOR together
NOISE = 0.1  # of a step's time
DRIFT = 0.005  # of a term, from a step to the next one in which it counts
SPEED_DRIFT = 0.1  # of all terms together: other programs start or stop using the machine
OUTLIER = 2.5  # in standard deviations: a larger error counts as this one
SHORTEST, LONGEST = 1e-7, 3600.0  # seconds of a step; anything else is a broken clock


def round_down(num_tokens: int, digits: int = 5) -> int:
    """Round down to so many binary digits and zeros: five lose 6 % at most, three lose 20 %. Steps then have few
    shapes, which can be captured.
    """
    zeros = max(num_tokens.bit_length() - digits, 0)
    return num_tokens >> zeros << zeros


class StepTimes:
    """The five terms of a step's time. An extended Kalman filter follows their logarithms, so terms stay positive.

    The measured value is the logarithm of a step's time. Its derivative by a term's logarithm is the share of the time
    that this term takes. A change of the machine's speed is the same error in every term. The shares sum to one, so
    each step sees this error in full, and the ratios stay as they are.
    """

    def __init__(self) -> None:
        self.num_records = 0
        self._log = [math.log(prior) for prior in PRIOR]
        speed = SPEED_DEVIATION**2
        self._cov = [
            [speed + (g**2 if i == j else 0.0) for j in range(len(DEVIATIONS))] for i, g in enumerate(DEVIATIONS)
        ]

    def predict(self, counts: Sequence[float]) -> float:
        """Seconds of a step that has `counts` of each term."""
        return sum(count * math.exp(log) for count, log in zip(counts, self._log, strict=True))

    def record(self, counts: list[float], seconds: float) -> None:
        """Learn from a step that took `seconds`. Times that no step can take are ignored."""
        if not SHORTEST <= seconds <= LONGEST:
            return
        parts = [count * math.exp(log) for count, log in zip(counts, self._log, strict=True)]
        predicted = sum(parts)
        shares = [part / predicted for part in parts]
        gains = [sum(c * share for c, share in zip(row, shares, strict=True)) for row in self._cov]
        variance = sum(gain * share for gain, share in zip(gains, shares, strict=True)) + NOISE**2
        bound = OUTLIER * math.sqrt(variance)
        error = min(max(math.log(seconds / predicted), -bound), bound)
        for i, gain in enumerate(gains):
            kalman = gain / variance
            self._log[i] += kalman * error
            # The common speed of all terms grows less certain.
            self._cov[i] = [c - kalman * g + SPEED_DRIFT**2 for c, g in zip(self._cov[i], gains, strict=True)]
        self._drift(counts)
        self.num_records += 1

    def _drift(self, counts: list[float]) -> None:
        """Raise the variance of the terms that counted. No term's variance exceeds its first value."""
        for i, (count, deviation) in enumerate(zip(counts, DEVIATIONS, strict=True)):
            self._cov[i][i] += DRIFT**2 if count else 0.0
            excess = self._cov[i][i] / (SPEED_DEVIATION**2 + deviation**2)
            if excess > 1:
                for j in range(len(counts)):
                    self._cov[i][j] /= math.sqrt(excess)
                    self._cov[j][i] /= math.sqrt(excess)


class Pacer:
    """Sizes the prompt's part of a step from the times of the steps before it.

    A step with tokens of one prompt may take `slowdown` > 1 times as long as a pure decode step. A queue shows that the
    machine is short: its requests would decode beside the others at little more cost. With n prompts the allowed extra
    time is therefore n ** QUEUE_POWER times as much. The beginning of a prompt, up to the length of a whole step, is
    never cut so small that most of the time goes to mixing: short prompts are frequent, and a long one begins once.
    """

    def __init__(self, slowdown: float, max_step_tokens: int) -> None:
        self.slowdown = slowdown
        self.max_step_tokens = max_step_tokens
        self._context = 0
        self._mixed_steps = 0
        # Two models, because kernels need more time for each token of a small chunk than of a whole step.
        self._beside = StepTimes()
        self._alone = StepTimes()

    def prompt_tokens(self, num_decodes: int, num_waiting: int, context: int | None = None) -> int:
        """The number of prompt tokens that the next step may compute beside `num_decodes` decoding sequences.

        It is at least one, or zero if the decodes leave no room in the step. If nothing decodes, it is the whole step.
        `num_waiting` requests wait behind the prompt. `context` of the prompt's tokens are computed; the default is the
        context of the prompt that was recorded last.
        """
        room = max(self.max_step_tokens - num_decodes, 0)
        if num_decodes == 0:
            return room
        position = self._context if context is None else context
        chunk = self._chunk(num_decodes, (self.slowdown - 1) * (1 + num_waiting) ** QUEUE_POWER, position)
        if self._mixed_steps % SMALL_EVERY == SMALL_EVERY - 1:
            chunk *= SMALL
        return room if chunk >= room else max(1, round_down(int(chunk)))

    def _chunk(self, num_decodes: int, allowed: float, context: int) -> float:
        """The number of tokens that take `allowed` times as long as decoding.

        The cost of mixing is subtracted, and may leave nothing. A chunk of one token would then be the least efficient
        choice. The prompt's own work therefore takes at least as long as mixing, but within the allowed time and for up
        to MIN_CHUNK tokens. The beginning of a prompt takes at least BEGINNING_WORTH times as long as mixing, even if
        that exceeds the allowed time.
        """
        decode = self._beside.predict([1, num_decodes, 0, 0, 0])
        mixed = self._beside.predict([0, 0, 1, 0, 0])
        token = self._beside.predict([0, 0, 0, 1, context])
        least = min(mixed / token, allowed * decode / token, MIN_CHUNK)
        if context < self.max_step_tokens:
            least = BEGINNING_WORTH * mixed / token
        return max((allowed * decode - mixed) / token, least)

    def tokens_within(self, seconds: float, context: int, least: int) -> int:
        """The number of tokens of a prompt alone, after `context` of its tokens, that take `seconds`: `least` or more,
        and at most a whole step."""
        step, token = self._alone.predict([1, 0, 0, 0, 0]), self._alone.predict([0, 0, 0, 1, context])
        return min(max(round_down(max(int((seconds - step) / token), 1)), least), self.max_step_tokens)

    def alone_seconds(self, num_tokens: int, context: int) -> float:
        """Seconds of a step of so many tokens of one prompt, after `context` of its tokens, and nothing else."""
        return self._alone.predict([1, 0, 0, num_tokens, num_tokens * context])

    def record(self, num_decodes: int, num_prompt: int, prompt_context: int, seconds: float) -> None:
        """Learn from a step of `num_decodes` decoding sequences and `num_prompt` prompt tokens that took `seconds`.

        `prompt_context` is the position that its prompt reached. On average its tokens attended to half a chunk less.
        """
        if num_decodes == 0 and num_prompt == 0:
            return
        mixed = num_decodes > 0 and num_prompt > 0
        attended = num_prompt * max(prompt_context - num_prompt / 2, 0)
        times = self._beside if num_decodes else self._alone
        times.record([1, num_decodes, mixed, num_prompt, attended], seconds)
        self._mixed_steps += mixed
        if num_prompt:
            self._context = prompt_context

    def prefill_seconds(self, start: int, end: int) -> float:
        """Seconds to compute tokens start .. end of one prompt in separate steps.

        Before any prompt is recorded this is an assumption: 1 ms a token, or a multiple of the time of decoding. It is
        more than loading a token's KV takes, so a tier is tried first. After that both costs are known.
        """
        count = max(end - start, 0)
        times = self._alone if self._alone.num_records or not self._beside.num_records else self._beside
        steps = -(-count // self.max_step_tokens)
        return times.predict([steps, 0, 0, count, count * (start + end) / 2])
