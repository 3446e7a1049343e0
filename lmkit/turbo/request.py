"""The requests and outputs of an engine. They are plain structs that also travel between processes as msgpack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from lmkit.errors import RequestError
from lmkit.formats.generation_config import RANGES, SamplingDefaults
from lmkit.formats.sentences import Layer, Sentences
from lmkit.text.audio import DEAF, AudioSettings
from lmkit.text.images import TEXT_ONLY
from lmkit.text.processed_images import AnySettings
from lmkit.text.videos import VideoSettings
from lmkit.turbo.repetition import RepetitionStop
from lmkit.turbo.speech import SpeechRules

TURN = "turn:"  # begins the session_id of a conversation that has none, and whose last answer called tools
MAX_STOPS, MAX_LOGIT_BIAS, MAX_LOGPROBS = 16, 1024, 20
FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = str  # which final hidden states of a text are its embedding: modes of formats.sentences, joined by "+"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to continue a prompt. Subclasses add the number of new tokens under a name of their own.

    The first five are None if they are not given. Then the checkpoint's defaults hold, or else those of SamplingParams.
    """

    MAX: ClassVar[str]  # name of the field with the most new tokens
    MIN: ClassVar[str]  # name of the field with the fewest new tokens

    temperature: float | None = None  # 0 = greedy
    top_k: int | None = None  # 0 = off
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and output (CTRL, arXiv 1909.05858)
    presence_penalty: float = 0.0  # over output, as OpenAI defines it
    frequency_penalty: float = 0.0
    repetition_stop: RepetitionStop | None = None  # ends an answer that goes round in circles
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None = a fresh random seed
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None = off, 0 = the chosen token's, n = also those of the n most likely tokens

    def check_end_is_free(self) -> None:
        """Raise RequestError if a field holds the end back. A grammar decides itself where an answer ends."""
        for name in ("ignore_eos", self.MIN):
            if getattr(self, name):
                message = f"{name} does not go with an answer that follows a schema or grammar, which decides its end"
                raise RequestError("invalid_request", message, name)

    def validate(self, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Raise a RequestError that names the first field out of range."""

        def check(ok: bool, param: str, rule: str) -> None:
            if not ok:
                raise RequestError("invalid_request", f"{param}={getattr(self, param)!r}: must be {rule}", param)

        for name, (accepts, rule) in RANGES.items():
            value = getattr(self, name)
            check(value is None or accepts(value), name, rule)
        most, least = getattr(self, self.MAX), getattr(self, self.MIN)
        check(most is None or 0 <= most < 1 << 31, self.MAX, "at least 0")
        check(0 <= least <= (1 << 31 if most is None else most), self.MIN, f"in [0, {self.MAX}]")
        check(abs(self.presence_penalty) <= 100, "presence_penalty", "in [-100, 100]")
        check(abs(self.frequency_penalty) <= 100, "frequency_penalty", "in [-100, 100]")
        check(self.seed is None or 0 <= self.seed < 1 << 64, "seed", "in [0, 2^64)")
        check(len(self.stop) <= MAX_STOPS and all(0 < len(s) <= 1024 for s in self.stop),
              "stop", f"at most {MAX_STOPS} strings of 1 to 1024 characters")  # fmt: skip
        check(len(self.stop_token_ids) <= 1024 and all(0 <= t < vocab_size for t in self.stop_token_ids),
              "stop_token_ids", f"token ids below {vocab_size}")  # fmt: skip
        check(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        check(all(0 <= t < vocab_size and math.isfinite(b) and abs(b) <= 100 for t, b in self.logit_bias.items()),
              "logit_bias", f"token ids below {vocab_size} with values in [-100, 100]")  # fmt: skip
        check(self.logprobs is None or 0 <= self.logprobs <= max_logprobs, "logprobs", f"in [0, {max_logprobs}]")
        if self.repetition_stop is not None:
            self.repetition_stop.validate()


class SamplingParams(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of a request to the engine: every field has a value, and the defaults are greedy.

    The names are those of the OpenAI wire format.
    """

    MAX, MIN = "max_tokens", "min_tokens"

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 512  # None = until the context is full, 0 = none: the prompt is only computed
    min_tokens: int = 0  # eos, stop ids and stop strings are held back before so many tokens
    shown_special_ids: tuple[int, ...] = ()  # special tokens that skip_special_tokens leaves in the text
    speech: SpeechRules | None = None  # of a transcript
    grammar: str = ""  # the answer follows it, see text.grammar; "" = any answer
    # The token that ends the reasoning of an answer whose grammar gives it a budget: reasoning that repeats itself is
    # ended by it, and the answer goes on. -1 = repetition ends the answer.
    reasoning_end: int = -1
    prompt_top: int = 0  # with prompt_logprobs: also those of the n most likely tokens
    # With logprobs: tokens that are shown instead of the most likely ones, also at the positions of prompt_logprobs.
    logprob_token_ids: tuple[int, ...] = ()

    def validate(self, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> None:
        super().validate(vocab_size, max_logprobs)
        if not 0 <= self.prompt_top <= max_logprobs:
            raise RequestError("invalid_request", f"prompt_logprobs: must be in [0, {max_logprobs}]", "prompt_logprobs")
        if self.grammar:
            self.check_end_is_free()


class ImageInput(msgspec.Struct, frozen=True):
    """An image of a prompt. Its tokens stand for the cells of a grid, from left to right and downwards, unless it has
    `ids` of its own."""

    start: int  # position of its first token
    rows: int
    columns: int
    digest: bytes  # of its pixels and of how they are read: equal digests mean equal KV
    pixels: bytes = b""  # see ReadImage
    breaks: int = 0  # tokens after each row of cells
    ids: tuple[int, ...] = ()
    frames: int = 1  # of a video, which it has
    time: int = 0  # see ReadImage
    goes_on: bool = False
    number: int = 0  # the engine's own for its digest, from 1 on

    @property
    def num_tokens(self) -> int:
        return self.rows * (self.columns + self.breaks)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue. `params.seed` is set: the front end draws one if the user gave none."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    prompt_logprobs: bool = False  # also for each prompt token after the first; params.prompt_top gives their number
    logprobs_start: int = 0  # if these are asked for: position of the prompt token after which they begin
    pooling: Pooling | None = None  # the output is the prompt's embedding; needs params.max_tokens of 0
    tenant: str = ""  # owner of the KV cache: no other tenant finds or times the KV that it computed
    weight: float = 1.0  # of the tenant: its share of the engine beside other tenants; more than 0
    cache_salt: str = ""  # splits a tenant's cache further
    adapter: str = ""  # the name of a loaded adapter; "" = the model itself
    session_id: str | None = None  # of the tenant: the KV of this conversation stays for a lease after the answer
    priority: int = 0  # lower = sooner; see turbo.scheduling.policy
    timeout: float | None = None  # seconds from its arrival at the engine; then it ends with an error
    speculate: bool = True  # whether drafts of its tokens may be computed; its tokens are the same
    progress: bool = False  # outputs before the first token say how much of the prompt is computed
    images: tuple[ImageInput, ...] = ()  # in the order of their tokens
    known_ids: list[int] = []  # the answer's first tokens: it goes on after them, as after a preemption
    kv_from: str = ""  # HOST:PORT of an engine that is computing the prompt, whose blocks are fetched as they come
    gives_kv: bool = False  # all blocks of the prompt are put into the tiers, for another engine
    second_start: int | None = None  # the position at which the second of two texts begins, of a model that tells them
    is_ahead: bool = False  # it is computed while nothing else is to be done, see turbo.scheduling.next_turns
    tells_kv: bool = False  # its first output says where the KV of its prompt came from
    max_cached: int | None = None  # tokens whose KV may come from a cache at most: of what is computed again
    is_known: bool = False  # it is_ahead, and was known at the start: next turns come before it


class Siblings(msgspec.Struct, frozen=True, array_like=True):
    """Requests that differ only in id and seed: the choices of one prompt. The prompt is sent to the engine once."""

    first: Request
    others: list[tuple[str, int | None]] = []  # request id and seed of each further request

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Siblings:
        first = requests[0]
        assert all(request.prompt_ids is first.prompt_ids for request in requests), "siblings have one prompt"
        return cls(first, [(request.request_id, request.params.seed) for request in requests[1:]])

    def requests(self) -> list[Request]:
        """The requests one by one. They share the list of the prompt's tokens."""
        params, replace = self.first.params, msgspec.structs.replace
        others = [replace(self.first, request_id=name, params=replace(params, seed=seed)) for name, seed in self.others]
        return [self.first, *others]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, of the unmodified logits) at one position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the most likely tokens, best first; for equal values the lower id first


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The output of one engine step for one request. `finish_reason` is set on the request's last output."""

    request_id: str
    token_ids: list[int]  # new tokens, including the eos or stop id that ended the request (never shown as text)
    finish_reason: FinishReason | None = None
    # One for each of token_ids, on request. Without new tokens, if logprob_token_ids are asked for: after the prompt.
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []  # with the first output: one for each prompt token after logprobs_start
    embedding: bytes = b""  # on request, with the last output: float32 [hidden], not normalized
    stop_token: int | None = None  # the eos or stop id of token_ids that ended the request, if one did
    num_computed: int | None = None  # of the prompt's tokens, in an output before the first token, on request
    cached_tokens: int = 0  # with the first output, and those before it: prompt tokens whose KV was found
    queue_seconds: float = 0.0  # with the first output: that the request waited until it was admitted
    kv: list[tuple[int, str]] = []  # with the first output, on request: (end, source) of runs of prompt tokens
    num_steps: int = 1  # that became this one
    num_preemptions: int = 0  # with the last output: times that the request lost its KV blocks
    error: str | None = None  # with finish_reason "error"
    error_code: str = "engine_error"  # the code of `error`, one of errors.HTTP_STATUS


Activation = Literal["softmax", "sigmoid", "none"]


class Classes(msgspec.Struct, frozen=True, kw_only=True):
    """A head that classifies texts by a final hidden state: weight @ state + bias.

    `layers` come before it.
    """

    pooling: Pooling = "last"  # the token whose state it is
    reads_pairs: bool = False  # whether it was made to read two texts together, as a cross-encoder does
    labels: tuple[str, ...]
    weight: bytes  # float32 [labels, hidden]
    bias: bytes  # float32 [labels]
    activation: Activation  # what makes probabilities of it
    layers: tuple[VectorLayer, ...] = ()


class VectorLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A module after the pooling. A Dense is activation(weight @ vector + bias), perhaps with its input added."""

    kind: Layer
    weight: bytes = b""  # float32 [outputs, inputs], or [inputs] of a LayerNorm
    bias: bytes = b""  # float32 [outputs]
    activation: str = "Identity"  # one of formats.sentences.ACTIVATIONS
    has_residual: bool = False
    eps: float = 1e-5  # of a LayerNorm
    residual: bytes = b""  # float32 [outputs, inputs], by which the input is multiplied before; empty: it is not


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """What the self-test of a GPU's kernels found, see turbo.engine.self_test."""

    on: str  # the GPU and its software
    model: str
    off: dict[str, str]  # kernels (files of csrc) and switches that engines go on without, and why
    seconds: float
    checks: int = 0  # calls of kernels that were compared with torch
    problem: str = ""  # why there is no result
    is_broken: bool = False  # it is that nothing computes the model right
    untested: tuple[str, ...] = ()  # what there was no time for

    @property
    def text(self) -> str:
        """The result in one line."""
        if self.problem:
            return f"no result: {self.problem}"
        parts = [f"{name} is turned off: {reason}" for name, reason in self.off.items()]
        parts = parts or [f"{self.checks} calls of kernels are right ({self.seconds:.0f} s)"]
        return "; ".join([*parts, *([f"no time for {', '.join(self.untested)}"] if self.untested else ())])


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that an engine sends to its front end when it is ready."""

    model_path: str
    vocab_size: int
    max_model_len: int
    max_batch_size: int = 0  # sequences in one step; 0 = as configured
    num_blocks: int  # of block_size tokens in all layers, in sequences of max_model_len
    block_size: int
    kv_dtype: str
    memory: dict[str, int]  # bytes by purpose
    reserved: int = 0  # bytes of memory that the engine's processes take at most, libraries included
    has_head: bool = True  # otherwise it generates no text
    hidden_size: int = 0  # of an embedding
    pooling: Pooling = "last"  # for embeddings
    sentences: Sentences = Sentences()  # how embeddings of texts are made
    vector_layers: tuple[VectorLayer, ...] = ()  # of embeddings, after the pooling
    dimensions: tuple[int, ...] = ()  # that embeddings may be cut to; empty: the checkpoint names none, so any
    classes: Classes | None = None  # of a checkpoint that classifies texts
    sampling: SamplingDefaults = SamplingDefaults()  # for requests that do not say how to sample
    images: AnySettings | str = TEXT_ONLY  # how the engine wants images, or why it takes none
    videos: VideoSettings | str = TEXT_ONLY  # and videos
    audio: AudioSettings | str = DEAF  # how it wants audio, or why it takes none
    kv_port: int = 0  # where it gives blocks to other engines; 0 = nowhere
    captured: str = ""  # on a GPU: the steps that are captured as graphs, or why none is
    selftest: SelfTest | None = None  # of a GPU's kernels
    computed: dict[str, Any] = {}  # what the bits of an answer depend on besides the model and the request


def check_head(has_head: bool) -> None:
    """Raise RequestError for a model that generates no text."""
    if not has_head:
        message = "this checkpoint has no head to generate with: it gives embeddings, at /v1/embeddings, or classes"
        raise RequestError("unsupported_parameter", message, "model")


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of an engine at one moment, for /metrics."""

    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    blocks_backed: int = 0  # blocks that have taken memory from the system
    kept_since: float | None = None  # on the monotonic clock: the prefix cache has all that was used since; see Ledger
    preemptions: int = 0
    prompt_tokens: int = 0  # computed, chunk by chunk; those found in a cache are not
    generation_tokens: int = 0
    steps: int = 0
    step_sizes: list[int] = []  # steps by their tokens, in the classes of turbo.step_sizes
    step_tokens: int = 0  # of all these steps
    failed_steps: int = 0  # steps that raised; their requests ended with an error
    blocks_cached: int = 0  # blocks in the prefix cache, including those that sequences use
    prefix_tokens: int = 0  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens among these that were found on the device
    tier_hits: dict[str, int] = {}  # prompt tokens among these that were loaded, by tier: host, disk
    evicted_blocks: int = 0
    snapshots_used: int = 0  # of recurrent states, those of running sequences too
    snapshots_total: int = 0
    evicted_snapshots: int = 0  # that gave their place to others
    sessions: int = 0  # sessions with a lease that has not ended
    decisions: dict[str, int] = {}  # the scheduler's decisions and their counts, such as "admitted: best match"
    drafts: int = 0  # times that drafts of a sequence's next tokens were computed
    draft_tokens: int = 0  # such draft tokens
    accepted_tokens: int = 0  # draft tokens among these that were right, and kept
    draft_seconds_saved: float = 0.0  # by draft tokens, against steps without; negative: lost
    history_tokens: int = 0  # of answers that are kept for drafts of later ones
    images: dict[str, int] = {}  # images that were encoded, and such that were found encoded
    tiers: dict[str, int] = {}  # figures of the KV tiers: bytes, failures ...
    audits: dict[str, int] = {}  # cache hits that were computed again; see turbo.scheduling.audits
    next_turns: dict[str, int] = {}  # tokens of next turns: prepared, and of these used and wasted
    ahead_waited: float = 0.0  # seconds that requests have waited for steps ahead, at most
