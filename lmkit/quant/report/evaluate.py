"""The quality of a model on text: perplexity, and KL divergence and same most likely tokens against a reference model.

Protocol: the tokens are cut into windows of `seq_len` that do not overlap (the last may be shorter). A limit takes as
many windows as it allows, evenly spaced. Each window starts from an empty cache, and its first token is not predicted.
Where the tokenizer begins a text with BOS, every window begins with it: such a model never reads anything else there.
KL is sum p log(p / q) in nats for each predicted token, with p of the reference. The model is measured as it is served:
packed weights, the storage types of its KV cache, and int8 activations in quantized linears unless exact activations
are asked for. The reference runs with exact activations and float32 KV. Standard errors treat tokens as independent.
Neighbours are not quite independent, so the true errors are somewhat larger.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmkit.config import Activations, HeadStorage, KVStorageName, StrictStruct
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.formats.hub import resolve_model_path
from lmkit.kernels.cpu.collective import SharedRanks
from lmkit.kv_dtype import FLOAT32, asked_kv_dtype
from lmkit.layers.batch import KVLayer, whole_batch
from lmkit.models.identity import resolve_activations
from lmkit.models.kv_storage import allocate, storage_text
from lmkit.models.loader import load
from lmkit.models.resolved import resolved
from lmkit.models.shard import Shard
from lmkit.quant.data.calibration import encode_dataset
from lmkit.quant.report.answers import Answers, Choices, Decode, compare
from lmkit.quant.report.ranks import others
from lmkit.text import Tokenizer

BLOCK_SIZE = 32
LOGIT_BYTES = 64 << 20  # of one model's logits that are held at a time, for any vocabulary

PROTOCOL = (
    "non-overlapping windows of seq_len from an empty cache, each after BOS where the tokenizer adds it, "
    "first token of each not predicted, KL in nats"
)

HELDOUT_TEXT = Path(__file__).parents[2] / "demo" / "text" / "heldout.txt"

EVAL_TOKENS = 8192  # of the evaluation after a quantization
Progress = Callable[[str, int, int], None]  # (name of the work, units done, units in all)


class Divergence(StrictStruct, frozen=True):
    """Divergence from the reference model. KL is in nats per token; `same_` and `top_` are shares of tokens; `_stderr`
    are standard errors."""

    reference: str
    reference_perplexity: float
    log_ratio: float  # ln(perplexity / reference_perplexity), compared token by token
    log_ratio_stderr: float
    kl_mean: float
    kl_stderr: float
    kl_median: float
    kl_p99: float
    kl_p999: float
    same_top: float  # both have the same most likely token
    same_top_stderr: float
    same_top5: float  # both have the same five most likely tokens, in any order
    same_top5_stderr: float
    top_in_top5: float  # the reference's most likely token is among the model's five
    answers: Answers | None = None


class EvalResult(StrictStruct, frozen=True):
    """One evaluation with the protocol it followed."""

    model: str
    perplexity: float
    perplexity_stderr: float
    divergence: Divergence | None
    num_tokens: int  # predicted
    seq_len: int
    kv_dtype: str
    activations: Activations
    lm_head: HeadStorage
    seconds: float
    protocol: str = PROTOCOL


def evaluate(
    model_path: str | Path,
    token_ids: list[int],
    *,
    against: str | Path | None = None,
    kv_dtype: KVStorageName = "auto",
    activations: Activations = "auto",
    lm_head: HeadStorage = "auto",
    packed_cache: bool = False,
    prefix: Sequence[int] = (),
    seq_len: int = 512,
    limit: int | None = None,
    tp: int = 1,
    ep: int = 1,
    decode: Decode | None = None,
    progress: Progress = lambda *state: None,
) -> EvalResult:
    """Measure a checkpoint on text (at most `limit` tokens), and against a reference checkpoint if one is given. With
    `decode`, the text of tokens, the result shows answers that changed.

    Every window begins with `prefix` (`window_prefix`); `seq_len` counts it.

    With `tp` or `ep` so many processes share the model. The reference is whole, in this process.

    Raises ConfigError if there are fewer than two tokens, a window exceeds the context or the vocabularies differ.
    Raises the errors of loading a model, too.
    """
    start = time.perf_counter()
    if min(len(token_ids), seq_len, limit or seq_len) < 2:
        raise ConfigError(
            f"evaluation needs a text and windows of at least 2 tokens, not {len(token_ids)} and {seq_len}"
        )
    if min(tp, ep) > 1 and tp != ep:
        raise ConfigError(f"tp={tp} and ep={ep}: the same processes share both; give one number, or leave one out")
    options: dict[str, Any] = {"activations": activations, "lm_head": lm_head, "kv_dtype": asked_kv_dtype(kv_dtype)}
    options |= {"packed_cache": packed_cache}
    model = _Scorer(model_path, seq_len, shard=Shard(0, tp, ep), **options)
    reference = None
    if against is not None:
        reference = _Scorer(against, seq_len, activations="exact", kv_dtype=FLOAT32)
    if reference is not None and reference.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{model_path} predicts {model.vocab_size} tokens, {against} {reference.vocab_size}: no comparison"
        )
    windows = cut_windows(token_ids, seq_len, limit, prefix)
    parts, choices = [], list[Choices]()
    with ExitStack() as stack:
        if (size := max(tp, ep)) > 1:
            follow = partial(_follow, model_path, windows, seq_len, tp, ep, options)
            shared = stack.enter_context(others(follow, size, seq_len, model.decoder.spec))
            model.decoder.join(shared, split=tp > 1)
        for done, window in enumerate(windows):
            progress("evaluation", done, len(windows))
            scored, chosen = _window_scores(window, model, reference)
            parts += scored
            choices += [chosen] if chosen is not None else []
        progress("evaluation", len(windows), len(windows))
    scores = torch.cat(parts, dim=1)
    perplexity = math.exp(scores[0].mean())
    return EvalResult(
        model=str(model_path),
        perplexity=perplexity,
        perplexity_stderr=perplexity * _stderr(scores[0]),
        divergence=None if against is None else _divergence(scores, str(against), compare(choices, decode)),
        num_tokens=scores.shape[1],
        seq_len=seq_len,
        kv_dtype=model.kv_dtype,
        activations=resolve_activations(activations, "cpu"),
        lm_head=lm_head,
        seconds=round(time.perf_counter() - start, 2),
    )


def encode_text(model_path: str | Path, text: Path | None = None, against: str | Path | None = None) -> list[int]:
    """Tokens of a text file by the model's tokenizer. The default is the held-out text of the demo model.

    Raises ConfigError if the file cannot be read or the reference's tokenizer gives other tokens.
    """
    file = text or HELDOUT_TEXT
    try:
        content = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"evaluation text {file}: cannot read: {error}") from None
    return _encoded_alike(lambda tokenizer: tokenizer.encode(content), str(file), model_path, against)


def encode_documents(model_path: str | Path, dataset: str, count: int, against: str | Path | None = None) -> list[int]:
    """At most `count` tokens of a calibration source (quant.data.sources), its documents in order.

    Raises ConfigError or CheckpointError if the source cannot be read. Raises ConfigError if the reference's tokenizer
    gives other tokens.
    """
    return _encoded_alike(lambda tokenizer: encode_dataset(dataset, tokenizer, count), dataset, model_path, against)


def text_of_tokens(model_path: str | Path) -> Decode:
    """What gives the text of the tokens of a model."""
    return Tokenizer.from_pretrained(resolve_model_path(model_path)).decode


def window_prefix(model_path: str | Path) -> list[int]:
    """The token with which the model's tokenizer begins every text, if there is one."""
    return Tokenizer.from_pretrained(resolve_model_path(model_path)).start


def _encoded_alike(
    encode: Callable[[Tokenizer], list[int]], what: str, model_path: str | Path, against: str | Path | None
) -> list[int]:
    token_ids = encode(Tokenizer.from_pretrained(resolve_model_path(model_path)))
    if against is not None and encode(Tokenizer.from_pretrained(resolve_model_path(against))) != token_ids:
        raise ConfigError(f"{model_path} and {against} split {what} into other tokens: they cannot be compared")
    return token_ids


def cut_windows(token_ids: list[int], seq_len: int, limit: int | None, prefix: Sequence[int] = ()) -> list[list[int]]:
    """The windows of the protocol; a limit below one window shortens it. The text may begin with `prefix`, too."""
    before = len(prefix)
    text = token_ids[before:] if token_ids[:before] == list(prefix) else token_ids
    width = min(limit or seq_len, seq_len) - before
    windows = [[*prefix, *text[i : i + width]] for i in range(0, len(text), width)]
    windows = [window for window in windows if len(window) > 1]
    if limit is not None and limit < seq_len:
        return windows[:1]
    count = len(windows) if limit is None else min(len(windows), limit // seq_len)
    return [windows[i * len(windows) // count] for i in range(count)]


class _Scorer:
    """A loaded model with KV blocks for one window."""

    def __init__(self, path: str | Path, seq_len: int, *, packed_cache: bool = False, **options: Any) -> None:
        with resolved(path, **options) as model:
            spec, storages = model.spec, model.storages
            if not model.source.has_head:
                raise UnsupportedError(f"{path}: has no head that predicts tokens, so there is nothing to measure")
            if seq_len > spec.max_position:
                raise ConfigError(f"windows of {seq_len} tokens exceed the context of {path}, {spec.max_position}")
            self.decoder = load(model, packed_cache=packed_cache)
        num_blocks = -(-seq_len // BLOCK_SIZE)
        self.kv: list[KVLayer] = allocate(spec.layers, storages, num_blocks, BLOCK_SIZE, seq_len)
        self.kv_dtype = storage_text(storages)
        self.vocab_size = spec.vocab_size

    def parts(self, num_rows: int) -> Iterator[slice]:
        """Rows in parts whose logits are held at a time."""
        rows = max(1, LOGIT_BYTES // (4 * self.vocab_size))
        return (slice(begin, min(begin + rows, num_rows)) for begin in range(0, num_rows, rows))

    def stream(self, window: list[int]) -> tuple[Tensor, Tensor | None]:
        """The pair of tensors of the residual stream, [len(window), hidden], after the last layer."""
        batch, _ = whole_batch([window], BLOCK_SIZE)
        return self.decoder.hidden(batch, self.kv)


@torch.inference_mode()
def _follow(
    path: str | Path,
    windows: list[list[int]],
    seq_len: int,
    tp: int,
    ep: int,
    options: dict[str, Any],
    rank: int,
    shared: SharedRanks,
) -> None:
    """Compute another rank's part of the windows."""
    model = _Scorer(path, seq_len, shard=Shard(rank, tp, ep), **options)
    model.decoder.join(shared, split=tp > 1)
    for window in windows:
        stream = model.stream(window)
        for part in model.parts(len(window) - 1):
            model.decoder.head_part(*stream, part)


@torch.inference_mode()
def _window_scores(window: list[int], model: _Scorer, reference: _Scorer | None) -> tuple[list[Tensor], Choices | None]:
    """(scores float64 [1 or 6, n] for parts of the window's predictions, the most likely tokens beside a reference).
    The rows of scores are: negative log-likelihood, the reference's, KL, and the three rows of `_same_tops`. Both
    models' logits are computed for a part at a time, never for all."""
    delta, residual = model.stream(window)
    base = None if reference is None else reference.stream(window)
    targets = torch.tensor(window[1:])
    parts, chosen = [], list[tuple[Tensor, Tensor, Tensor]]()
    for part in model.parts(len(targets)):
        q = model.decoder.head_part(delta, residual, part).log_softmax(-1)
        scores = [_nll(q, targets[part])]
        if reference is not None and base is not None:
            p = reference.decoder.head_part(*base, part).log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1, dtype=torch.float64).clamp_min(0)
            scores += [_nll(p, targets[part]), kl, *_same_tops(p, q)]
            certainty, top = p.max(-1)
            chosen.append((top, q.argmax(-1), certainty.exp()))
        parts.append(torch.stack(scores))
    return parts, Choices(window, *map(torch.cat, zip(*chosen, strict=True))) if chosen else None


def _nll(log_probs: Tensor, targets: Tensor) -> Tensor:
    return -log_probs.gather(1, targets[:, None])[:, 0].double()


def _same_tops(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compare log-probabilities [n, vocab]. Returns float64 [n] of 0 and 1: the same most likely token, the same five
    most likely, the most likely of `p` among the five of `q`."""
    count = min(5, p.shape[1])
    first, second = p.topk(count).indices, q.topk(count).indices
    top = p.argmax(-1)
    same_set = (first.sort(-1).values == second.sort(-1).values).all(-1)
    among = (second == top[:, None]).any(-1)
    return (top == q.argmax(-1)).double(), same_set.double(), among.double()


def _stderr(values: Tensor) -> float:
    """The standard error of the mean of `values` [n]; 0 for a single value."""
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _divergence(scores: Tensor, reference: str, answers: Answers) -> Divergence:
    """The divergence from the rows of `_window_scores`."""
    own, nll, kl, same_top, same_top5, top_in_top5 = scores
    ordered = kl.sort().values

    def quantile(share: float) -> float:
        return float(ordered[min(int(share * len(ordered)), len(ordered) - 1)])

    return Divergence(
        reference=reference,
        reference_perplexity=math.exp(nll.mean()),
        log_ratio=float((own - nll).mean()),
        log_ratio_stderr=_stderr(own - nll),
        kl_mean=float(kl.mean()),
        kl_stderr=_stderr(kl),
        kl_median=quantile(0.5),
        kl_p99=quantile(0.99),
        kl_p999=quantile(0.999),
        same_top=float(same_top.mean()),
        same_top_stderr=_stderr(same_top),
        same_top5=float(same_top5.mean()),
        same_top5_stderr=_stderr(same_top5),
        top_in_top5=float(top_in_top5.mean()),
        answers=answers,
    )
