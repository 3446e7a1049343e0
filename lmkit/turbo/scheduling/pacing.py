"""How many prompt tokens a step may compute beside sequences that decode, so that decoding never waits for a prompt.

What a step takes is modelled as a sum whose terms are learned from the steps that ran (`StepTimes`):

    seconds = step + decode * num_decodes + mixed * [decodes and prompt] + prompt * num_prompt
              + attend * num_prompt * context

The chunk is what fits between a pure decode step's time and `slowdown` times that. Only the ratio of the terms counts
for it: when the whole machine slows down, the chunk stays.
"""

from __future__ import annotations

import math

MIN_CHUNK = 8  # tokens; see Pacer._chunk
BEGINNING_WORTH = 4  # of what mixing costs: the least work of a prompt's beginning in a mixed step
QUEUE_POWER = 3  # with the number of requests that wait, their prompts' share grows like its power
# Of eight steps with prompt tokens beside decodes one gets a quarter: with chunks that are all alike, nothing tells the
# time of the prompt from that of decoding.
SMALL_EVERY, SMALL = 8, 0.25

# Seconds before anything is known. Reading the weights costs as much as computing eight tokens, a mixed step as much as
# one, and attending to 10,000 tokens as much again.
FIRST_GUESS = (8e-3, 1e-3, 1e-3, 1e-3, 1e-7)
# Standard deviations, all of logarithms: 0.1 is about 10 %.
GUESSED = (1.0, 1.0, 2.0, 1.0, 2.0)  # of FIRST_GUESS's ratios
SPEED_GUESSED = 5.0  # of all of FIRST_GUESS together
NOISE = 0.1  # of a step's time
DRIFT = 0.005  # of a term, from a step to the next one in which it counts
SPEED_DRIFT = 0.1  # of all terms together: others use the machine, or stop
OUTLIER = 2.5  # in standard deviations: what is further off counts as this far
SHORTEST, LONGEST = 1e-7, 3600.0  # seconds of a step; anything else is a broken clock


def round_down(num_tokens: int) -> int:
    """To five binary digits and zeros, by 6 % at most: steps of few different shapes can be captured."""
    zeros = max(num_tokens.bit_length() - 5, 0)
    return num_tokens >> zeros << zeros


class StepTimes:
    """The five terms of a step's time, followed by an extended Kalman filter on their logarithms.

    The logarithm of a step's time is what is measured, so its derivative by a term's logarithm is the share of the time
    that goes to this term. Terms stay positive. A change of the machine's speed is the same error in every term; as the
    shares sum to one, it is seen in full in each step, and leaves the ratios alone.
    """

    def __init__(self) -> None:
        self.num_records = 0
        self._log = [math.log(guess) for guess in FIRST_GUESS]
        speed = SPEED_GUESSED**2
        self._cov = [[speed + (g**2 if i == j else 0.0) for j in range(len(GUESSED))] for i, g in enumerate(GUESSED)]

    def predict(self, counts: list[float]) -> float:
        """Seconds of a step with so much of each term."""
        return sum(count * math.exp(log) for count, log in zip(counts, self._log, strict=True))

    def record(self, counts: list[float], seconds: float) -> None:
        """Learn from a step that took `seconds`; times that no step can take are left out."""
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
            # All terms grow less sure together.
            self._cov[i] = [c - kalman * g + SPEED_DRIFT**2 for c, g in zip(self._cov[i], gains, strict=True)]
        self._drift(counts)
        self.num_records += 1

    def _drift(self, counts: list[float]) -> None:
        """Grow less sure of the terms that counted, and of none less than at first."""
        for i, (count, guessed) in enumerate(zip(counts, GUESSED, strict=True)):
            self._cov[i][i] += DRIFT**2 if count else 0.0
            excess = self._cov[i][i] / (SPEED_GUESSED**2 + guessed**2)
            if excess > 1:
                for j in range(len(counts)):
                    self._cov[i][j] /= math.sqrt(excess)
                    self._cov[j][i] /= math.sqrt(excess)


class Pacer:
    """Sizes the prompt's part of a step from the times of the steps before it.

    `slowdown` > 1 is what a step with prompt tokens may take, in times of a pure decode step, as long as one prompt is
    alone. A queue shows that the machine is short: what waits in it would decode beside the others at little more cost,
    so with n prompts n ** QUEUE_POWER times as much is allowed. And a prompt's beginning, as long as a whole step, is
    never cut so small that most of the time goes to mixing: short prompts come often, the beginning of a long one once.
    """

    def __init__(self, slowdown: float, max_step_tokens: int) -> None:
        self.slowdown = slowdown
        self.max_step_tokens = max_step_tokens
        self._context = 0
        self._mixed_steps = 0
        # Apart, since kernels need more time for each token of a small chunk than of a whole step.
        self._beside = StepTimes()
        self._alone = StepTimes()

    def prompt_tokens(self, num_decodes: int, num_waiting: int, context: int | None = None) -> int:
        """How many prompt tokens the next step may compute beside `num_decodes` decoding sequences: at least one, or
        none where these leave no room in the step. All that it holds if nothing decodes.

        `num_waiting` requests wait behind the prompt. `context` of its tokens are computed, by default as many as when
        a prompt was last recorded.
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
        """Tokens that take `allowed` times as long as decoding.

        What mixing costs comes off that, and may leave nothing. One token would be the least efficient answer then: so
        the prompt's own work takes as long as mixing, but within what is allowed, and for up to MIN_CHUNK tokens; a
        prompt's beginning takes BEGINNING_WORTH times as long as mixing, whatever is allowed.
        """
        decode = self._beside.predict([1, num_decodes, 0, 0, 0])
        mixed = self._beside.predict([0, 0, 1, 0, 0])
        token = self._beside.predict([0, 0, 0, 1, context])
        least = min(mixed / token, allowed * decode / token, MIN_CHUNK)
        if context < self.max_step_tokens:
            least = BEGINNING_WORTH * mixed / token
        return max((allowed * decode - mixed) / token, least)

    def record(self, num_decodes: int, num_prompt: int, prompt_context: int, seconds: float) -> None:
        """Learn from a step of `num_decodes` decoding sequences and `num_prompt` prompt tokens that took `seconds`.

        `prompt_context` is the position that its prompt reached: its tokens attended to half a chunk less on average.
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
        """What computing tokens start .. end of one prompt takes, in steps of its own.

        Before any prompt was recorded this is a guess, 1 ms a token, or a multiple of what decoding takes: more than
        loading a token's KV does, so that a tier is tried first, and then one knows what both cost.
        """
        count = max(end - start, 0)
        times = self._alone if self._alone.num_records or not self._beside.num_records else self._beside
        steps = -(-count // self.max_step_tokens)
        return times.predict([steps, 0, 0, count, count * (start + end) / 2])
