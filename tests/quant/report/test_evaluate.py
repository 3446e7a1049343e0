"""The numbers are the textbook's: cross entropy and KL from transformers' logits under the same protocol."""

from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.errors import ConfigError, EngineLostError
from lmkit.quant.report import evaluate as evaluation
from lmkit.quant.report.answers import Answers, Choices, compare
from lmkit.quant.report.evaluate import cut_windows, encode_text, evaluate
from lmkit.quant.run import prepare
from tests.models import tiny
from tests.models.test_trained_moe import TRAINED_MOE
from tests.quant.helpers import SIZES, recipe, tiny_checkpoint

SEQ_LEN = 32
TOKENS = torch.randint(0, 4096, (3 * SEQ_LEN + 7,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and one with somewhat different weights."""
    first, second = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    model = tiny.make(first, "llama", **SIZES)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(second)
    return first, second


def log_probs(path: Path) -> tuple[Tensor, Tensor]:
    """(log probabilities [tokens, vocab], targets) of all predicted tokens, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    windows = cut_windows(TOKENS, SEQ_LEN, None)
    with torch.no_grad():
        logits = [model(torch.tensor([window])).logits[0, :-1] for window in windows]
    return torch.cat(logits).log_softmax(-1).double(), torch.cat([torch.tensor(w[1:]) for w in windows])


@pytest.mark.parametrize("logit_bytes", [64 << 20, 4 * 4096 * 5, 1])
def test_perplexity_and_divergence_are_those_of_transformers(
    pair: tuple[Path, Path], logit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows of logits are held at a time."""
    monkeypatch.setattr(evaluation, "LOGIT_BYTES", logit_bytes)
    options = {"kv_dtype": "float32", "seq_len": SEQ_LEN, "decode": lambda ids: "".join(f"<{each}>" for each in ids)}
    result = evaluate(pair[1], TOKENS, against=pair[0], **options)  # type: ignore[arg-type]
    (p, targets), (q, _) = log_probs(pair[0]), log_probs(pair[1])
    kl = (p.exp() * (p - q)).sum(-1)
    assert result.num_tokens == len(targets) == len(TOKENS) - 4
    assert math.log(result.perplexity) == pytest.approx(-float(q.gather(1, targets[:, None]).mean()), rel=1e-4)
    far = result.divergence
    assert far is not None
    assert math.log(far.reference_perplexity) == pytest.approx(-float(p.gather(1, targets[:, None]).mean()), rel=1e-4)
    assert far.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert far.kl_median == pytest.approx(float(kl.median()), rel=0.05)
    assert far.kl_median < far.kl_p99 <= far.kl_p999 == pytest.approx(float(kl.max()), rel=1e-3)
    same_top = (p.argmax(-1) == q.argmax(-1)).double()
    assert far.same_top == pytest.approx(float(same_top.mean()), abs=0.011)
    tops = [[set(row) for row in x.topk(5).indices.tolist()] for x in (p, q)]
    same_sets = [first == second for first, second in zip(*tops, strict=True)]
    assert far.same_top5 == pytest.approx(sum(same_sets) / len(same_sets), abs=0.021)
    among = [top in five for top, five in zip(p.argmax(-1).tolist(), tops[1], strict=True)]
    check_answers(far.answers, p, q)
    assert far.top_in_top5 == pytest.approx(sum(among) / len(among), abs=0.011)
    assert far.kl_stderr == pytest.approx(float(kl.std()) / math.sqrt(len(kl)), rel=1e-2)
    ratio = (p - q).gather(1, targets[:, None])
    assert far.log_ratio == pytest.approx(float(ratio.mean()), abs=1e-4)
    assert far.log_ratio_stderr == pytest.approx(float(ratio.std()) / math.sqrt(len(kl)), rel=1e-2)
    assert far.log_ratio == pytest.approx(math.log(result.perplexity / far.reference_perplexity))
    nll = q.gather(1, targets[:, None])
    assert result.perplexity_stderr == pytest.approx(
        result.perplexity * float(nll.std()) / math.sqrt(len(nll)), rel=1e-2
    )


def check_answers(found: Answers | None, p: Tensor, q: Tensor) -> None:
    """Runs of 16 predictions of each window, and the changes at which the reference was most certain."""
    assert found is not None
    sizes = [len(window) - 1 for window in cut_windows(TOKENS, SEQ_LEN, None)]
    tops, others = (x.argmax(-1).split(sizes) for x in (p, q))
    same = [a == b for a, b in zip(tops, others, strict=True)]
    runs = [run for each in same for run in each.split(16) if len(run) == 16]
    assert found.count == len(runs)
    assert found.unchanged == pytest.approx(sum(bool(run.all()) for run in runs) / len(runs), abs=0.34)
    changed = p.max(-1).values.exp()[p.argmax(-1) != q.argmax(-1)].sort(descending=True).values
    assert found.examples[0].certainty == pytest.approx(float(changed[0]), rel=0.05)
    for example in found.examples:
        assert example.reference != example.model
        assert {example.reference, example.model} <= {f"<{token}>" for token in range(4096)}
        assert example.before.endswith(">")


def test_a_token_that_ends_a_character_is_shown_alone() -> None:
    """Its text does not begin with that of the tokens before it, whose last character is not whole."""
    texts = {(1, 2): "a\ufffd", (1, 2, 3): "a\u00e9", (1, 2, 4): "a\u00e8"}
    reference, model = (torch.tensor([7, token]) for token in (3, 4))
    found = compare([Choices([1, 2], reference, model, torch.ones(2))], lambda tokens: texts[tuple(tokens)])
    assert [(each.reference, each.model) for each in found.examples] == [("\u00e9", "\u00e8")]


def test_a_model_against_itself(pair: tuple[Path, Path]) -> None:
    result = evaluate(pair[0], TOKENS, against=pair[0], kv_dtype="float32", seq_len=SEQ_LEN)
    assert result.divergence is not None
    assert result.divergence.kl_p999 < 1e-9
    assert result.divergence.same_top == 1
    assert result.divergence.answers is not None
    assert result.divergence.answers.unchanged == 1
    assert not result.divergence.answers.examples
    assert result.perplexity == result.divergence.reference_perplexity


def test_kv_storage_is_really_quantized(pair: tuple[Path, Path]) -> None:
    """Fewer bits, more distance; auto is what kv_config.json says."""
    far = {}
    for kv_dtype in ("float32", "int8", "int4"):
        result = evaluate(pair[0], TOKENS, against=pair[0], kv_dtype=kv_dtype, seq_len=SEQ_LEN)  # type: ignore[arg-type]
        assert result.kv_dtype == kv_dtype
        assert result.divergence is not None
        far[kv_dtype] = result.divergence.kl_mean
    assert far["float32"] < far["int8"] < far["int4"]
    layers = [{"k": "int8", "v": "int4"}, {"k": "dense", "v": "dense"}]
    config = {
        "format": "lmkit-kv-config", "version": 2, "granularity": "per_token_per_head", "symmetric": False,
        "params_dtype": "float16", "num_kv_heads": 2, "head_dim": 16, "layers": layers,
    }  # fmt: skip
    file = pair[0] / "kv_config.json"
    file.write_text(json.dumps(config))
    result = evaluate(pair[0], TOKENS, against=pair[0], seq_len=SEQ_LEN)
    file.unlink()
    assert result.kv_dtype == "float32 int8/int4"
    assert result.divergence is not None
    assert far["int8"] < result.divergence.kl_mean < far["int4"]


def test_windows_cover_the_text_and_a_limit_spreads_them() -> None:
    tokens = list(range(103))
    assert list(chain(*cut_windows(tokens, 10, None))) == tokens
    assert [w[0] for w in cut_windows(tokens, 10, 35)] == [0, 30, 70]
    assert cut_windows(tokens, 10, 7) == [tokens[:7]]
    assert list(chain(*cut_windows(tokens[:101], 10, None))) == tokens[:100]  # a single token predicts nothing
    assert cut_windows(tokens, 10, 1000) == cut_windows(tokens, 10, None)


def test_every_window_begins_with_the_prefix() -> None:
    text = list(range(1, 30))
    for tokens in (text, [0, *text]):
        windows = cut_windows(tokens, 10, None, [0])
        assert [window[0] for window in windows] == [0] * 4
        assert [token for window in windows for token in window[1:]] == text
        assert max(map(len, windows)) == 10
        assert cut_windows(tokens, 10, 7, [0]) == [[0, *text[:6]]]
    assert cut_windows([0, *text[:10]], 10, None, [0])[1] == [0, 10]  # it predicts the one token


def test_bos_is_where_the_tokenizer_puts_it(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """In front of every window of `lmkit eval` and of the evaluation after a quantization."""
    model = tiny_checkpoint(tmp_path / "model")
    assert evaluation.window_prefix(model) == []
    backend, name = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")), "<|endoftext|>"
    bos = backend.token_to_id(name)
    backend.post_processor = TemplateProcessing(f"{name} $A", special_tokens=[(name, bos)])
    backend.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": name}))
    assert evaluation.window_prefix(model) == [bos]
    ids = encode_text(model)[:200]
    assert ids[0] == bos
    result = evaluate(model, ids, prefix=[bos], kv_dtype="float32", activations="exact", seq_len=SEQ_LEN)
    windows = [torch.tensor([[bos, *ids[i : i + SEQ_LEN - 1]]]) for i in range(1, len(ids), SEQ_LEN - 1)]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        losses = [oracle(w).logits[0, :-1].log_softmax(-1).gather(1, w[0, 1:, None]) for w in windows]
    assert result.num_tokens == len(ids) - 1
    assert math.log(result.perplexity) == pytest.approx(-float(torch.cat(losses).mean()), rel=1e-4)
    text = tmp_path / "text.txt"
    text.write_text("import os\n" * 200)
    out = CliRunner().invoke(app, ["eval", str(model), "--text", str(text), "--seq-len", "32", "--json"])
    count = len(encode_text(model, text)) - 1
    assert json.loads(out.stdout)["num_tokens"] == count  # every token of the text, none lost at a window's beginning
    report = prepare(model, recipe()).run(tmp_path / "out", eval_ids=ids)
    assert report.evaluation is not None
    assert report.evaluation.num_tokens == len(ids) - 1


def test_what_cannot_be_measured_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for tokens, options in (([1], {}), ([], {}), ([1, 2, 3], {"seq_len": 1}), ([1, 2, 3], {"limit": 1})):
        with pytest.raises(ConfigError, match="at least 2 tokens"):
            evaluate(pair[0], tokens, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="exceed the context"):
        evaluate(pair[0], TOKENS, seq_len=129)
    other = tiny.make(tmp_path, "llama", **(SIZES | {"vocab_size": 4100}))
    assert other is not None
    with pytest.raises(ConfigError, match=r"predicts 4096 tokens, .* 4100"):
        evaluate(pair[0], TOKENS, against=tmp_path, seq_len=SEQ_LEN)


def test_text_is_encoded_once_for_both_models(tmp_path: Path, demo_model: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("import os\n")
    ids = encode_text("demo", text, against=tiny_checkpoint(tmp_path / "same"))
    assert ids == encode_text(demo_model, text)
    assert len(encode_text(demo_model)) > 100_000
    other = tiny_checkpoint(tmp_path / "other")
    settings = json.loads((other / "tokenizer.json").read_text())
    settings["model"]["merges"] = settings["model"]["merges"][:100]
    (other / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="into other tokens"):
        encode_text(demo_model, text, against=other)
    with pytest.raises(ConfigError, match=r"missing\.txt: cannot read"):
        encode_text(demo_model, tmp_path / "missing.txt")


def test_two_processes_evaluate_one_model(pair: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"against": pair[0], "kv_dtype": "float32", "seq_len": SEQ_LEN}
    one, two = evaluate(pair[1], TOKENS, **options), evaluate(pair[1], TOKENS, tp=2, **options)
    assert two.perplexity == pytest.approx(one.perplexity, rel=1e-5)
    assert one.divergence is not None
    assert two.divergence is not None
    assert two.divergence.kl_mean == pytest.approx(one.divergence.kl_mean, rel=1e-4)


def test_processes_that_share_experts_give_the_bits_of_one() -> None:
    one, two = (evaluate(TRAINED_MOE, TOKENS[:64], seq_len=SEQ_LEN, ep=ep).perplexity for ep in (1, 2))
    assert two == one


def test_a_process_that_cannot_start_ends_the_evaluation(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "_follow", math.sqrt)  # a function that another process cannot call like this
    with pytest.raises(EngineLostError, match="of this evaluation, process 1 ended with status 1; its message"):
        evaluate(pair[1], TOKENS, kv_dtype="float32", seq_len=SEQ_LEN, tp=2)


def test_processes_share_both_or_one(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="tp=2 and ep=3: the same processes"):
        evaluate(pair[1], TOKENS, tp=2, ep=3)
