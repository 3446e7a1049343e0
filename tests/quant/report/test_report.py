"""report.html shows what a report has, stands alone, and lets nothing of the report become markup."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
import torch

from lmkit.formats.hub import DEMO_FOLDER
from lmkit.qtensor import QuantScheme, quantize
from lmkit.quant.report.chart import bar_chart, line_chart, sparkline
from lmkit.quant.report.evaluate import Divergence, EvalResult
from lmkit.quant.report.html import model_name, render
from lmkit.quant.report.layer_report import (
    ClipReport,
    HeldOutReport,
    LayerReport,
    LinearReport,
    ScaleReport,
    stored_bits,
)
from lmkit.quant.report.markup import STYLE, text, without_folders
from lmkit.quant.report.report import MixedPrecisionGroup, MixedPrecisionReport, QuantReport

EVIL = "<script>alert(1)<b>&\"'"  # without a slash: of a path only the last part is shown
VOID = {"meta"}


class Parser(HTMLParser):
    """Collects tags, attributes and text, and asserts that every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def linear(**fields: Any) -> LinearReport:
    return LinearReport(**({"module": "model.layers.0.self_attn.q_proj", "format": "awq", "bits": 4.15625} | fields))


def report(evaluation: EvalResult | None = None, **linear_fields: Any) -> QuantReport:
    clip = ClipReport(loss=0.75, unclipped_loss=1.0, clipped_share=0.5)
    scale = ScaleReport(
        "norm.attn", ("attn.q", EVIL), "duo 0.35", 0.5, 1.0, {"identity": 1.0, "duo 0.35": 0.5, "x": None}
    )
    layers = [
        LayerReport(0, (linear(clip=clip, rtn_error=0.02, error=0.0125, **linear_fields),), (scale,), 0.004, 1.5),
        LayerReport(1, (linear(module=EVIL, format="dense", bits=16, reason=EVIL),), (), math.nan, 2.5),
    ]
    source = {"source": EVIL, "weight": None, "samples": 4, "documents": 9, "empty": 0, "short": 1, "sha256": "feed"}
    return QuantReport(
        lmkit_version="1", model=EVIL, recipe={"steps": [{"step": "rtn"}], "note": EVIL},
        calibration={"dataset": (EVIL,), "rows": 4, "seq_len": 32, "sha256": "cafe", "sources": [source]},
        layers=tuple(layers), bytes_before=1000, bytes_after=310, evaluation=evaluation, seconds=4.0,
        peak_bytes=3 << 29,
    )  # fmt: skip


def evaluation() -> EvalResult:
    shares = {"same_top": 0.95, "same_top_stderr": 0.01, "same_top5": 0.5, "same_top5_stderr": 0.02, "top_in_top5": 1.0}
    far = Divergence(
        reference=EVIL, reference_perplexity=9.5, log_ratio=0.05, log_ratio_stderr=0.001, kl_mean=0.0123,
        kl_stderr=0.0004, kl_median=0.01, kl_p99=0.1, kl_p999=0.2, **shares,
    )  # fmt: skip
    return EvalResult(
        model=EVIL, perplexity=10.25, perplexity_stderr=0.5, divergence=far, num_tokens=4096, seq_len=512,
        kv_dtype="int8", activations="int8", lm_head="auto", seconds=3.0,
    )  # fmt: skip


def test_the_page_shows_what_the_report_has() -> None:
    page = Parser(render(report(evaluation())))
    for shown in (
        "31.0% of the source", "1.50 GiB", "4.0 s", "0.0123", "same five most likely tokens", "10.25", "0.0125",
        "50.0%", "25.0%", "duo 0.35", "4.156", "feed", "cafe", "- step: rtn", "norm.attn",
    ):  # fmt: skip
        assert shown in page.text, shown
    assert page.text.count(EVIL) >= 8
    charts = [label for name, label in page.attributes if name == "aria-label" and label]
    assert {"Error of each layer", "Time of each layer", "2 values from 0.5 to 1"} <= set(charts)
    assert page.tags.count("details") == 2


def test_the_headline_has_the_figures_that_matter() -> None:
    page = render(report(evaluation()))
    cards = re.findall(r"<div><dt>(.*?)</dt><dd class=\"value\">(.*?)</dd>", page)
    assert cards == [
        ("Weights", "1 kB → 0.31 kB"), ("Bits per weight", "10.08"), ("KL divergence", "0.0123"),
        ("Same top token", "95.0%"), ("Perplexity", "10.25"), ("KV cache", "–"),
    ]  # fmt: skip
    bare = Parser(render(report())).text
    assert "Not evaluated." in bare
    assert "KL divergence" not in bare


def test_the_page_names_no_folder_of_the_machine() -> None:
    home = "/home/somebody/secret"
    base, result = report(), evaluation()
    assert result.divergence is not None
    far = msgspec.structs.replace(result.divergence, reference=f"{home}/model")
    page = render(
        msgspec.structs.replace(
            base,
            model=f"{home}/model",
            recipe={"calibration": {"dataset": [f"{home}/a.txt", f"text of {home}/b.txt"]}},
            calibration={"dataset": [f"{home}/a.txt"], "sources": [{"source": f"{home}/a.txt"}]},
            evaluation=msgspec.structs.replace(result, divergence=far),
        )
    )
    assert "secret" not in page
    assert "somebody" not in page
    assert "<h1>Quantization of model</h1>" in page
    assert page.count("a.txt") == 3
    assert "text of b.txt" in page


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (str(DEMO_FOLDER), "demo"),
        ("/cache/hub/models--org--some-model/snapshots/0abc", "org/some-model"),
        ("/data/llama/", "llama"),
        ("org/name", "name"),
        (".", "."),
    ],
)
def test_a_model_has_its_name(path: str, name: str) -> None:
    assert model_name(path) == name


def test_a_text_that_is_no_path_stays() -> None:
    for words in ("KL / token", "int4/int8", EVIL, "a~b", "https://host/x", "99 % / 99.9 %"):
        assert without_folders(words) == words
    assert text(["/a/b", 1234, None]) == "b, 1,234, –"


def test_the_page_fits_a_phone_and_has_a_dark_mode() -> None:
    page = Parser(render(report(evaluation())))
    assert ("name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in STYLE
    # A wide table scrolls in its own frame, which the keyboard reaches and which has a name.
    assert page.attributes.count(("class", "scroll")) == page.tags.count("table")
    assert page.attributes.count(("role", "region")) == page.tags.count("table")


def luminance(color: str) -> float:
    parts = color if len(color) == 6 else "".join(2 * part for part in color)
    shares = [int(parts[index : index + 2], 16) / 255 for index in (0, 2, 4)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_colours_have_enough_contrast(dark: bool) -> None:
    colors = dict(re.findall(r"--(\w+): #(\w+)", STYLE.split("prefers-color-scheme")[dark]))

    def contrast(name: str, behind: str) -> float:
        one, other = sorted((luminance(colors[name]), luminance(colors[behind])))
        return (other + 0.05) / (one + 0.05)

    for behind in ("page", "panel"):
        for name in ("text", "soft"):
            assert contrast(name, behind) >= 4.5, (name, behind)
    for number in range(5):
        assert contrast(f"s{number}", "page") >= 3, number  # what graphics need


def test_experts_share_a_row() -> None:
    def expert(index: int, error: float) -> LinearReport:
        return linear(module=f"model.layers.0.mlp.experts.{index}.up_proj", error=error)

    layer = msgspec.structs.replace(report().layers[0], linears=(expert(0, 0.1), expert(1, 0.3), expert(2, 0.2)))
    page = Parser(render(msgspec.structs.replace(report(), layers=(layer,))))
    assert "mlp.experts.*.up_proj (3)" in page.text
    assert page.text.count("up_proj") == 1
    assert "0.2\n" in page.text


def test_the_page_stands_alone_and_nothing_of_the_report_becomes_markup() -> None:
    page = render(report(evaluation()))
    parsed = Parser(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not {name for name, _ in parsed.attributes} & {"src", "href", "onload", "onclick"}
    assert not re.search(r"https?:|url\(|@import", page)


def test_unknown_values_and_new_fields_are_shown_as_they_are() -> None:
    class Extended(LinearReport, frozen=True):
        rank: str | None = None

    base = report()
    assert base.evaluation is None
    new = Extended(module="m", format="awq", error=math.inf, method="gptq", damping=0.015, rank=EVIL)
    layer = msgspec.structs.replace(base.layers[0], linears=(new, Extended(module="n", format="awq")), scales=())
    page = Parser(render(msgspec.structs.replace(base, layers=(layer,), peak_bytes=None, calibration={"rows": 1})))
    assert "gptq" in page.text
    assert f"damping: 0.015; rank: {EVIL}" in page.text
    assert page.text.count("damping") == 1
    assert "inf" not in page.text
    assert "–" in page.text
    assert Parser(render(msgspec.structs.replace(base, layers=(), bytes_before=0))).tags.count("svg") == 0


def test_mixed_precision_and_held_out_rows_are_shown() -> None:
    group = MixedPrecisionGroup(modules=(EVIL, "b"), chosen="int8", kl={"int4 g128": 0.125, "int8": 0.0625}, bits={})
    mixed = MixedPrecisionReport(bits=4.5, reached=4.48, kl=0.0625, num_tokens=1024, groups=(group,), seconds=2.0)
    held_out = HeldOutReport(tokens=2048, error=0.25, rtn_error=0.75)
    base = report()
    layer = msgspec.structs.replace(base.layers[0], held_out=held_out)
    text = Parser(render(msgspec.structs.replace(base, layers=(layer,), mixed_precision=mixed))).text
    for shown in (
        "4.48",
        f"{EVIL}, b",
        "int4 g128 0.125, int8 0.0625",
        "On 2,048 held-out tokens the layer's error is 0.25, that of plain rounding 0.75.",
        "of 4.5 allowed",
    ):
        assert shown in text, shown


def heights(chart: str) -> list[float]:
    return [float(y) for y in re.findall(r'circle cx="[0-9.]+" cy="([0-9.]+)"', chart)]


def ticks(chart: str) -> dict[float, float]:
    """y by the number at it."""
    found = re.findall(r'y="([0-9.]+)" text-anchor="end">([^<]+)<', chart)
    return {float(label): float(y) - 4 for y, label in found}


def test_lines_are_at_their_values() -> None:
    names = {"title": "t", "x_label": "x", "y_label": "y"}
    chart = line_chart({"a": [1.0, 0.1, None, 0.01], "b": [math.nan, 0.0, -1.0]}, **names)
    first, second, third = heights(chart)
    assert second - first == pytest.approx(third - second, abs=0.11)  # powers of ten are evenly spaced
    assert first < second
    assert {1.0: first, 0.1: second, 0.01: third}.items() <= ticks(chart).items()
    assert "y (log scale)" in chart
    assert chart.count("<polyline") == 2  # the gap is not bridged
    assert Parser(chart).text.count("\na\n") == 1  # the legend is text of the page, under the chart
    assert line_chart({"a": [None, 0.0]}, **names) == ""


@pytest.mark.parametrize("values", [[3.0], [1.0, 1.0], [0.0019, 0.0051], [1e-9, 40.0], [10.0], [999.0, 1001.0]])
def test_ticks_surround_the_values(values: list[float]) -> None:
    lines = ticks(line_chart({"a": values}, title="t", x_label="x", y_label="y"))
    assert len(lines) >= 2
    assert min(lines) <= min(values) <= max(values) <= max(lines)
    bars = ticks(bar_chart(values, title="t", x_label="x", y_label="y"))
    assert min(bars) == 0
    assert max(values) <= max(bars) * (1 + 1e-9) <= 2 * max(values)


def test_bars_start_at_zero() -> None:
    bars = bar_chart([1.0, 2.0], title="t", x_label="x", y_label="s")
    sizes = [float(height) for height in re.findall(r'height="([0-9.]+)" class', bars)]
    assert sizes[1] == pytest.approx(2 * sizes[0], abs=0.2)
    assert "x 1: 2 s" in bars
    assert bar_chart([], title="t", x_label="x", y_label="s") == ""
    assert sparkline([1.0, None]) == ""
    assert "polyline" in sparkline([1.0, 1.0])


def test_bits_count_scales_and_zeros() -> None:
    weight = torch.randn(8, 128)
    assert stored_bits(quantize(weight, QuantScheme(4, 32)), 16) == 4 + (16 + 4) / 32
    assert stored_bits(weight, 16) == 16
