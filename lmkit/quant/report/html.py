"""report.html: a QuantReport as one page. The page needs no scripts, no other files and no network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import yaml

from lmkit.quant.report.chart import bar_chart, line_chart, sparkline
from lmkit.quant.report.evaluate import EvalResult
from lmkit.quant.report.layer_report import LayerReport, LinearReport, ScaleReport
from lmkit.quant.report.report import MixedPrecisionReport, QuantReport

FILE_NAME = "report.html"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1rem } svg text { font: 11px system-ui, sans-serif; fill: #444 }
th, td { text-align: left; padding: .15rem .7rem; border-bottom: 1px solid #ddd; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums } pre { background: #f5f5f5; padding: .7rem }
summary { cursor: pointer; padding: .2rem 0 } h2 { margin-top: 2rem }
"""
LINEAR_COLUMNS = (
    "linear", "format", "bits", "RTN error", "error", "groups clipped", "clip's gain", "rounded by",
    "held out: RTN error", "error", "notes",
)  # fmt: skip
SCALE_COLUMNS = ("scaled into", "for", "chosen", "loss / unscaled", "losses of the candidates")
SHOWN_OF_LINEAR = {
    "module", "format", "bits", "rtn_error", "error", "clip", "method", "held_out_rtn_error", "held_out_error",
}  # fmt: skip
GROUP_COLUMNS = ("linears", "chosen", "KL of each candidate alone")
EVALUATION = {
    "perplexity": "perplexity", "perplexity_stderr": "± standard error", "reference": "reference",
    "reference_perplexity": "the reference's perplexity", "log_ratio": "ln of the ratio",
    "log_ratio_stderr": "± standard error", "kl_mean": "KL, mean (nats)", "kl_stderr": "± standard error",
    "kl_median": "KL, median", "kl_p99": "KL, 99 %", "kl_p999": "KL, 99.9 %", "same_top": "same most likely token",
    "same_top_stderr": "± standard error", "same_top5": "same five most likely tokens",
    "same_top5_stderr": "± standard error", "top_in_top5": "reference's most likely among five",
    "num_tokens": "tokens", "seq_len": "tokens of a window", "kv_dtype": "KV cache", "activations": "activations",
    "lm_head": "head", "seconds": "seconds", "protocol": "protocol",
}  # fmt: skip


def save_html(report: QuantReport, folder: Path) -> None:
    (folder / FILE_NAME).write_text(render(report), "utf-8")


def render(report: QuantReport) -> str:
    """The whole page. Every text of the report is escaped. A field without a value shows as a dash."""
    title = f"Quantization of {report.model}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        _summary(report),
        "" if report.evaluation is None else "<h2>Evaluation</h2>" + _evaluation(report.evaluation),
        "<h2>Layers</h2>" + _charts(report.layers),
        *(_layer(layer) for layer in report.layers),
        "" if report.mixed_precision is None else "<h2>Mixed precision</h2>" + _mixed(report.mixed_precision),
        "<h2>Calibration</h2>" + _calibration(report.calibration),
        f"<h2>Recipe</h2><pre>{escape(yaml.safe_dump(msgspec.to_builtins(report.recipe), sort_keys=False))}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{chr(10).join(sections)}\n</body></html>\n'


def mean(errors: Iterable[float | None]) -> float | None:
    """The mean of the errors that are known and finite."""
    known = [error for error in errors if error is not None and math.isfinite(error)]
    return fmean(known) if known else None


def _summary(report: QuantReport) -> str:
    share = f" ({report.bytes_after / report.bytes_before:.1%} of the source)" if report.bytes_before else ""
    bits = mean(linear.bits for layer in report.layers for linear in layer.linears)
    rows = {
        "weights": f"{report.bytes_before:,} bytes before, {report.bytes_after:,} after{share}",
        "bits per weight, mean of linears": bits,
        "time": f"{report.seconds:.1f} s",
        "peak memory": None if report.peak_bytes is None else f"{report.peak_bytes / 2**30:.2f} GiB",
        "lmkit": report.lmkit_version,
    }
    return _pairs(rows)


def _evaluation(result: EvalResult) -> str:
    values = msgspec.to_builtins(result)
    divergence = values.pop("divergence") or {}
    first = {name: values.pop(name) for name in ("perplexity", "perplexity_stderr")}
    every = first | divergence | {name: value for name, value in values.items() if name != "model"}
    return _table(("", ""), ((EVALUATION.get(name, name), value) for name, value in every.items()))


def _charts(layers: Sequence[LayerReport]) -> str:
    errors: dict[str, list[float | None]] = {
        "RTN, mean of linears": [mean(linear.rtn_error for linear in layer.linears) for layer in layers],
        "stored, mean of linears": [mean(linear.error for linear in layer.linears) for layer in layers],
        "whole layer": [layer.error for layer in layers],
    }
    seconds = [layer.seconds for layer in layers]
    return (
        "<p>Relative squared error on calibration tokens</p>"
        + line_chart(errors, title="relative squared error of each layer", x_label="layer")
        + "<p>Seconds</p>"
        + bar_chart(seconds, title="seconds of each layer", x_label="layer")
    )


def _layer(layer: LayerReport) -> str:
    extra = _extra(layer, {"index", "linears", "scales", "error", "seconds"})
    title = f"layer {layer.index}: error {_number(layer.error)}, {layer.seconds:.1f} s{extra and '; ' + extra}"
    body = _table(LINEAR_COLUMNS, map(_linear_row, layer.linears))
    if layer.scales:
        body += _table(SCALE_COLUMNS, map(_scale_row, layer.scales))
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _linear_row(linear: LinearReport) -> Sequence[Any]:
    clip = linear.clip
    gain = None if clip is None or not clip.unclipped_loss else 1 - clip.loss / clip.unclipped_loss
    share = None if clip is None else f"{clip.clipped_share:.0%}"
    notes = _extra(linear, SHOWN_OF_LINEAR)
    errors = (linear.rtn_error, linear.error)
    clipped = (share, None if gain is None else f"{gain:.1%}")
    held_out = (linear.method, linear.held_out_rtn_error, linear.held_out_error)
    return (linear.module, linear.format, linear.bits, *errors, *clipped, *held_out, notes)


def _scale_row(scale: ScaleReport) -> Sequence[Any]:
    ratio = scale.loss / scale.identity_loss if scale.identity_loss else None
    curve = _Html(sparkline(list(scale.losses.values())))
    return (scale.source, ", ".join(scale.consumers), scale.chosen, ratio, curve)


def _mixed(mixed: MixedPrecisionReport) -> str:
    measured = {
        "bits of a weight, asked for": mixed.bits,
        "reached": mixed.reached,
        "sum of the chosen candidates' KL": mixed.kl,
        "tokens": mixed.num_tokens,
        "seconds": mixed.seconds,
    }
    rows = ((group.modules, group.chosen, group.kl) for group in mixed.groups)
    return _pairs(measured) + _table(GROUP_COLUMNS, rows)


def _calibration(calibration: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in calibration.items() if name != "sources"}
    rows = [dict(source) for source in calibration.get("sources", ())]
    columns = list(rows[0]) if rows else []
    return _pairs(plain) + (_table(columns, (row.values() for row in rows)) if rows else "")


def _extra(struct: msgspec.Struct, shown: set[str]) -> str:
    """The fields that have no column of their own, if they are not empty."""
    values = msgspec.to_builtins(struct)
    return "; ".join(
        f"{name}: {_text(value)}" for name, value in values.items() if name not in shown and value not in (None, [], {})
    )


class _Html(str):
    """Text that is markup already."""


def _pairs(rows: Mapping[str, Any]) -> str:
    return _table(("", ""), rows.items())


def _table(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if any(columns) else ''}{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, _Html):
        return f"<td>{value}</td>"
    kind = ' class="number"' if isinstance(value, int | float) else ""
    return f"<td{kind}>{escape(_text(value))}</td>"


def _text(value: Any) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items() if part is not None)
    return ", ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"
