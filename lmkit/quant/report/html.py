"""report.html: a QuantReport as one page. The page needs no scripts, no other files and no network."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import yaml

from lmkit.formats.hub import DEMO, DEMO_FOLDER
from lmkit.quant.report.answers import Answers
from lmkit.quant.report.chart import bar_chart, line_chart, sparkline
from lmkit.quant.report.evaluate import EvalResult
from lmkit.quant.report.head_storage import head_line
from lmkit.quant.report.layer_report import ExpertsReport, HeldOutReport, LayerReport, LinearReport, ScaleReport
from lmkit.quant.report.markup import Html, Percent, cards, number, page, pairs, table, text, without_folders
from lmkit.quant.report.report import MixedPrecisionReport, QuantReport, RefineReport

FILE_NAME = "report.html"
LINEARS = "of a weight in linears"
LAYER_COLUMNS = (
    "layer", "RTN, mean of linears", "stored, mean of linears", "whole layer", "held out: RTN", "held out: recipe",
    "bits", "seconds",
)  # fmt: skip
LINEAR_COLUMNS = (
    "linear", "format", "bits", "RTN error", "error", "groups clipped", "clip's gain", "rounded by",
    "held out: RTN error", "held out: error", "notes",
)  # fmt: skip
SCALE_COLUMNS = ("scaled into", "for", "chosen", "loss / unscaled", "losses of the candidates")
SHOWN_OF_LINEAR = {
    "module", "format", "bits", "rtn_error", "error", "clip", "method", "held_out_rtn_error", "held_out_error",
}  # fmt: skip
SHOWN_OF_LAYER = {"index", "linears", "scales", "error", "seconds", "experts", "held_out"}
GROUP_COLUMNS = ("linears", "chosen", "KL of each candidate alone, nats per token")
EXAMPLE_COLUMNS = ("text", "the original goes on", "this model goes on", "the original's certainty")
EXAMPLES = "Where the models differ most surely: the text so far, and the token that each finds most likely next."
ERRORS = (
    "An error is the squared error of an output on calibration tokens, relative to the output itself: 0.01 is 1 %. "
    "RTN is plain rounding to nearest of the original weights."
)


def save_html(report: QuantReport, folder: Path) -> None:
    (folder / FILE_NAME).write_text(render(report), "utf-8")


def render(report: QuantReport) -> str:
    """The whole page. Every text of the report is escaped, and paths lose their folders. A field without a value shows
    as a dash."""
    title = f"Quantization of {model_name(report.model)}"
    seconds = f"{report.seconds:.1f} s"
    peak = "" if report.peak_bytes is None else f", {report.peak_bytes / 2**30:.2f} GiB of memory at the peak"
    recipe = yaml.safe_dump(_without_folders(report.recipe), sort_keys=False, allow_unicode=True)
    return page(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{escape(f"lmkit {report.lmkit_version}, {seconds}{peak}")}</p>',
            _headline(report),
            f"<p>{escape(head_line(report.head))}</p>" if report.head is not None else "",
            "<h2>Evaluation</h2>" + _evaluation(report.evaluation),
            "<h2>Layers</h2>" + _layers(report.layers),
            "" if report.mixed_precision is None else "<h2>Mixed precision</h2>" + _mixed(report.mixed_precision),
            "" if report.refined is None else "<h2>Refined</h2>" + _refined(report.refined),
            "<h2>Calibration</h2>" + _calibration(report.calibration),
            f'<h2>Recipe</h2><pre tabindex="0">{escape(recipe)}</pre>',
        ],
    )


def mean(errors: Iterable[float | None]) -> float | None:
    """The mean of the errors that are known and finite."""
    known = [error for error in errors if error is not None and math.isfinite(error)]
    return fmean(known) if known else None


def model_name(path: str) -> str:
    """A model's name without the folders of this machine: the repository of the Hub that it comes from, or its own."""
    folder = Path(path)
    if folder == DEMO_FOLDER:
        return DEMO
    if folder.parent.name == "snapshots":  # of the Hub's cache
        return folder.parents[1].name.removeprefix("models--").replace("--", "/", 1)
    return folder.name or path


def _headline(report: QuantReport) -> str:
    result, mixed, bits = report.evaluation, report.mixed_precision, report.recipe.get("kv", {}).get("bits")
    before, after = report.bytes_before, report.bytes_after
    kept = f"{after / before:.1%} of the source" if before else ""
    figures: list[tuple[str, Any, str]] = [
        ("Weights", f"{_size(before)} → {_size(after)}", kept),
        ("Bits per weight", report.bits, LINEARS if mixed is None else f"{LINEARS}, of {mixed.bits:g} allowed"),
    ]
    far = None if result is None else result.divergence
    if far is not None:
        figures += [
            *([] if far.answers is None else [_unchanged(far.answers)]),
            ("KL divergence", number(far.kl_mean), f"± {far.kl_stderr:.2g} nats per token"),
            ("Same top token", f"{far.same_top:.1%}", f"± {far.same_top_stderr:.1%} of the tokens"),
        ]
    if result is not None:
        change = "" if far is None else f"{_change(result):+.2%} ± {far.log_ratio_stderr:.2%}; was "
        was = f"± {result.perplexity_stderr:.2g}" if far is None else f"{change}{far.reference_perplexity:.4g}"
        figures.append(("Perplexity", result.perplexity, was))
    stored = f"{bits} bits" if isinstance(bits, int) else text(bits)
    figures.append(("KV cache", stored, "as the model computes" if bits == 16 else ""))
    return cards(figures)


def _size(size: int) -> str:
    unit, name = next((unit for unit in ((10**9, "GB"), (10**6, "MB")) if size >= unit[0]), (10**3, "kB"))
    return f"{size / unit:.3g} {name}"


def _change(result: EvalResult) -> float:
    assert result.divergence is not None
    return result.perplexity / result.divergence.reference_perplexity - 1


def _evaluation(result: EvalResult | None) -> str:
    if result is None:
        return "<p>Not evaluated.</p>"
    rows: dict[str, Any] = {"perplexity": f"{result.perplexity:.4f} ± {result.perplexity_stderr:.4f}"}
    if (far := result.divergence) is not None:
        rows |= {
            "the reference's perplexity": f"{far.reference_perplexity:.4f}",
            "change": f"{_change(result):+.2%} ± {far.log_ratio_stderr:.2%}",
            "KL, mean": f"{far.kl_mean:.5f} ± {far.kl_stderr:.5f} nats per token",
            "KL, median / 99 % / 99.9 %": f"{far.kl_median:.5f} / {far.kl_p99:.4f} / {far.kl_p999:.4f}",
            "same most likely token": f"{far.same_top:.2%} ± {far.same_top_stderr:.2%}",
            "same five most likely tokens": f"{far.same_top5:.2%} ± {far.same_top5_stderr:.2%}",
            "reference's most likely token among the five": f"{far.top_in_top5:.2%}",
            "reference": model_name(far.reference),
        }
    rows |= {
        "text": f"{result.num_tokens:,} tokens in windows of {result.seq_len:,}",
        "KV cache": result.kv_dtype,
        "activations": result.activations,
        "head": result.lm_head,
        "seconds": result.seconds,
        "protocol": result.protocol,
    }
    examples = "" if far is None or far.answers is None else _examples(far.answers)
    return pairs(rows, "Evaluation") + '<p class="soft">± is a standard error.</p>' + examples


def _unchanged(answers: Answers) -> tuple[str, str, str]:
    return "Answers unchanged", f"{answers.unchanged:.0%}", f"of {answers.count:,}, {answers.length} tokens each"


def _examples(answers: Answers) -> str:
    """The answers that changed, side by side."""
    if not answers.examples:
        return "<p>No answer changed.</p>"
    rows = [(each.before, each.reference, each.model, Percent(each.certainty)) for each in answers.examples]
    return f"<p>{escape(EXAMPLES)}</p>" + table(EXAMPLE_COLUMNS, rows, "Answers that changed")


def _layers(layers: Sequence[LayerReport]) -> str:
    rows = [_layer_row(layer) for layer in layers]
    errors = {name: [row[column] for row in rows] for column, name in enumerate(LAYER_COLUMNS) if 0 < column < 4}
    charts = [
        line_chart(errors, title="Error of each layer", x_label="layer", y_label="relative squared error"),
        bar_chart([layer.seconds for layer in layers], title="Time of each layer", x_label="layer", y_label="seconds"),
    ]
    figures = f'<div class="figures">{"".join(charts)}</div>' if any(charts) else ""
    overview = table(LAYER_COLUMNS, rows, "Layers")
    return f"<p>{escape(ERRORS)}</p>{figures}{overview}{''.join(map(_layer, layers))}"


def _layer_row(layer: LayerReport) -> tuple[Any, ...]:
    linears, held_out = layer.linears, layer.held_out
    errors = (mean(x.rtn_error for x in linears), mean(x.error for x in linears), layer.error)
    rows = (None, None) if held_out is None else (held_out.rtn_error, held_out.error)
    return (layer.index, *errors, *rows, layer.bits, layer.seconds)


def _layer(layer: LayerReport) -> str:
    """A layer's linears and searches, folded under its error."""
    name = f"layer {layer.index}"
    extra = _extra(layer, SHOWN_OF_LAYER)
    body = table(LINEAR_COLUMNS, _linear_rows(layer), f"Linears of {name}")
    if layer.scales:
        body += table(SCALE_COLUMNS, [_scale_row(scale) for scale in layer.scales], f"Scales of {name}")
    body += _held_out(layer.held_out) + _experts(layer.experts) + (f"<p>{escape(extra)}</p>" if extra else "")
    return f"<details><summary>{escape(f'{name}: error {number(layer.error)}')}</summary>{body}</details>"


def _linear_rows(layer: LayerReport) -> list[list[Any]]:
    """A row for each linear. Experts share the row of their projection, which has means and all other values."""
    prefix = re.compile(rf"^.*?\.{layer.index}\.(?=.)")
    groups: dict[str, list[Sequence[Any]]] = {}
    for linear in layer.linears:
        name, *values = _linear_row(linear)
        name = re.sub(r"(?<=experts\.)\d+", "*", prefix.sub("", name))
        groups.setdefault(name, []).append(values)
    return [
        [name if len(rows) == 1 else f"{name} ({len(rows)})", *map(_merged, zip(*rows, strict=True))]
        for name, rows in groups.items()
    ]


def _merged(values: Sequence[Any]) -> Any:
    """One value for several: the mean of numbers, or each text once."""
    known = [value for value in values if value is not None and value != ""]
    if known and all(isinstance(value, int | float) for value in known):
        average = fmean(known)
        return Percent(average) if isinstance(known[0], Percent) else average
    return ", ".join(dict.fromkeys(known)) or None


def _linear_row(linear: LinearReport) -> Sequence[Any]:
    clip = linear.clip
    gain = None if clip is None or not clip.unclipped_loss else Percent(1 - clip.loss / clip.unclipped_loss)
    share = None if clip is None else Percent(clip.clipped_share)
    notes = _extra(linear, SHOWN_OF_LINEAR)
    held_out = (linear.method, linear.held_out_rtn_error, linear.held_out_error)
    return (linear.module, linear.format, linear.bits, linear.rtn_error, linear.error, share, gain, *held_out, notes)


def _scale_row(scale: ScaleReport) -> Sequence[Any]:
    ratio = scale.loss / scale.identity_loss if scale.identity_loss else None
    curve = Html(sparkline(list(scale.losses.values())))
    return (scale.source, ", ".join(scale.consumers), scale.chosen, ratio, curve)


def _held_out(report: HeldOutReport | None) -> str:
    if report is None:
        return ""
    found = (
        f"On {report.tokens:,} held-out tokens the layer's error is {number(report.error)}, that of plain rounding "
        f"{number(report.rtn_error)}."
    )
    return f"<p>{escape(found + (f' {report.fallback}.' if report.fallback else ''))}</p>"


def _experts(report: ExpertsReport | None) -> str:
    if report is None:
        return ""
    few = ", ".join(map(str, report.without_statistics))
    found = f"Experts with too few tokens, rounded to nearest: {few}." if few else "Every expert saw enough tokens."
    tokens = list(report.tokens.values())
    return f"<p>{found}</p>" + bar_chart(tokens, title="Tokens of each expert", x_label="expert", y_label="tokens")


def _mixed(mixed: MixedPrecisionReport) -> str:
    measured = {
        "bits of a weight, asked for": mixed.bits,
        "reached": mixed.reached,
        "sum of the chosen candidates' KL": f"{number(mixed.kl)} nats per token",
        "tokens": mixed.num_tokens,
        "seconds": mixed.seconds,
    }
    groups = table(GROUP_COLUMNS, [(group.modules, group.chosen, group.kl) for group in mixed.groups], "Candidates")
    chosen = f"<details><summary>Choice for {len(mixed.groups)} groups of linears</summary>{groups}</details>"
    return pairs(measured, "Mixed precision") + chosen


def _refined(refined: RefineReport) -> str:
    rows = {
        "KL on held-out rows, before": f"{number(refined.kl_before)} nats per token",
        "after": f"{number(refined.kl)} nats per token",
        "held-out tokens": refined.held_out_tokens,
        "steps": refined.steps,
        "rows": refined.rows,
        "seconds": refined.seconds,
    }
    return pairs(rows if refined.fallback is None else rows | {"note": refined.fallback}, "Refined")


def _calibration(calibration: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in calibration.items() if name != "sources"}
    rows = [dict(source) for source in calibration.get("sources", ())]
    sources = table(list(rows[0]), [list(row.values()) for row in rows], "Sources of the calibration") if rows else ""
    return pairs(plain, "Calibration") + sources


def _extra(struct: msgspec.Struct, shown: set[str]) -> str:
    """The fields that have no column of their own, if they are not empty."""
    values = msgspec.to_builtins(struct)
    return "; ".join(
        f"{name}: {text(value)}" for name, value in values.items() if name not in shown and value not in (None, [], {})
    )


def _without_folders(value: Any) -> Any:
    """Builtins without the folders of absolute paths."""
    if isinstance(value, Mapping):
        return {name: _without_folders(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(part) for part in value]
    return without_folders(value) if isinstance(value, str) else value
