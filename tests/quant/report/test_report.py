"""report.html shows what a report has, stands alone, and lets nothing of the report become markup."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from lmkit.formats.hub import DEMO_FOLDER
from lmkit.quant.report.answers import Answers, Example
from lmkit.quant.report.chart import bar_chart, line_chart, sparkline
from lmkit.quant.report.evaluate import Divergence, EvalResult
from lmkit.quant.report.html import model_name, render
from lmkit.quant.report.layer_report import (
    ClipReport,
    ExpertsReport,
    HeldOutReport,
    LayerReport,
    LinearReport,
    ScaleReport,
)
from lmkit.quant.report.markup import STYLE, pairs, without_folders
from lmkit.quant.report.report import MixedPrecisionGroup, MixedPrecisionReport, QuantReport

EVIL = "<script>alert(1)&\"'"
FOLDER = "/home/someone/private"
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
    source = {
        "source": f"{FOLDER}/{EVIL}",
        "weight": None,
        "samples": 4,
        "documents": 9,
        "empty": 0,
        "short": 1,
        "sha256": "feed",
    }
    return QuantReport(
        lmkit_version="1", model=f"{FOLDER}/{EVIL}",
        recipe={"steps": [{"step": "rtn"}], "note": EVIL, "data": f"{FOLDER}/a b.txt"},
        calibration={"dataset": (EVIL, f"{FOLDER}/a b.txt"), "rows": 4, "seq_len": 32,
                     "sha256": "cafe", "sources": [source]},
        layers=tuple(layers), bytes_before=1000, bytes_after=310, evaluation=evaluation, seconds=4.0,
        peak_bytes=3 << 29,
    )  # fmt: skip


def evaluation() -> EvalResult:
    shares = {"same_top": 0.95, "same_top_stderr": 0.01, "same_top5": 0.5, "same_top5_stderr": 0.02, "top_in_top5": 1.0}
    far = Divergence(
        reference=f"{FOLDER}/{EVIL}", reference_perplexity=9.5, log_ratio=0.05, log_ratio_stderr=0.001, kl_mean=0.0123,
        kl_stderr=0.0004, kl_median=0.01, kl_p99=0.1, kl_p999=0.2, **shares,
        answers=Answers(0.625, 256, 16, (Example(f"def {EVIL}", "yes", "no", 0.875),)),
    )  # fmt: skip
    return EvalResult(
        model=f"{FOLDER}/{EVIL}", perplexity=10.25, perplexity_stderr=0.5, divergence=far, num_tokens=4096, seq_len=512,
        kv_dtype="int8", activations="int8", lm_head="auto", seconds=3.0,
    )  # fmt: skip


def test_the_page_shows_what_the_report_has() -> None:
    page = Parser(render(report(evaluation())))
    for shown in (
        "62%", "of 256, 16 tokens each", "87.5%",
        "31.0% of the source", "1.50 GiB", "4.0 s", "0.0123", "same five most likely tokens", "10.25", "0.0125",
        "50.0%",
        "25.0%", "duo 0.35", "4.156", "feed", "cafe", "- step: rtn", "norm.attn",
        "1 kB → 0.31 kB", "+7.89%",
    ):  # fmt: skip
        assert shown in page.text, shown
    assert page.text.count(EVIL) >= 8
    charts = [label for name, label in page.attributes if name == "aria-label" and "layer" in (label or "")]
    assert page.tags.count("figure") == 2, charts
    assert page.tags.count("details") == 2


def test_the_page_stands_alone_and_nothing_of_the_report_becomes_markup() -> None:
    page = render(report(evaluation()))
    parsed = Parser(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not {name for name, _ in parsed.attributes} & {"src", "href", "onload", "onclick"}
    assert not re.search(r"https?:|url\(|@import", page)
    assert "/home" not in page
    assert "private" not in page


def test_the_page_suits_a_phone_a_dark_screen_and_a_screen_reader() -> None:
    page = render(report(evaluation()))
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<table>") == page.count('<div class="scroll" role="region" tabindex="0" aria-label="')
    assert page.count("<th") - page.count("<thead") == page.count('<th scope="')
    assert page.count('role="img" aria-label="') == page.count("<svg") - page.count('aria-hidden="true"')


def test_colours_have_contrast_on_either_background() -> None:
    def luminance(colour: str) -> float:
        parts = [int(digit * (2 if len(colour) == 3 else 1), 16) / 255 for digit in re.findall(
            "." if len(colour) == 3 else "..", colour)]  # fmt: skip
        return sum(w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
                   for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))  # fmt: skip

    light, dark, *_ = STYLE.split("@media")
    for style in (light, dark.partition("}")[0]):
        colours = dict(re.findall(r"--([a-z0-9]+): #([0-9a-f]+)", style))
        for name, wanted in {"text": 4.5, "soft": 4.5, "s0": 3, "s1": 3, "s2": 3, "s3": 3, "s4": 3}.items():
            for background in ("page", "panel"):
                pair = sorted((luminance(colours[name]), luminance(colours[background])))
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= wanted, (name, background)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (str(DEMO_FOLDER), "demo"),
        ("/home/me/.cache/huggingface/hub/models--org--a--b/snapshots/0123", "org/a--b"),
        ("/home/me/models/tiny", "tiny"),
        ("tiny", "tiny"),
    ],
)
def test_a_model_is_shown_by_name(path: str, name: str) -> None:
    assert model_name(path) == name


def test_a_path_inside_a_text_loses_its_folders() -> None:
    assert without_folders("no rows in /home/me/a.txt, skipped") == "no rows in a.txt, skipped"
    for words in ("KL / token", "int4/int8", "a~b", "https://host/x", "99 % / 99.9 %", "<b>x</b>"):
        assert without_folders(words) == words


def test_a_value_is_beside_its_label() -> None:
    assert pairs({"rows": 64}, "t").count("<td>64</td>") == 1  # not at the far edge, where a column's numbers are


def test_experts_share_a_row_and_what_no_layer_has_takes_no_column() -> None:
    experts = [linear(module=f"model.layers.0.mlp.experts.{i}.up_proj", error=i / 4, rtn_error=0.5) for i in range(3)]
    counts = ExpertsReport(tokens={"0": 500, "1": 7, "2": 300}, without_statistics=(1,))
    layer = LayerReport(0, tuple(experts), (), 0.5, 1.0, experts=counts)
    page = render(msgspec.structs.replace(report(), layers=(layer,)))
    assert "mlp.experts.*.up_proj (3)" in page
    assert '<td class="number">0.25</td>' in page
    assert "Experts with too few tokens, rounded to nearest: 1." in page
    assert "expert 1: 7 tokens" in page
    assert "groups clipped" not in page
    assert "Not evaluated." in page


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
    ):
        assert shown in text, shown


def test_lines_are_at_their_values() -> None:
    chart = line_chart({"a": [1.0, 0.1, None, 0.01], "b": [math.nan, 0.0, -1.0]}, title="t", x_label="x", y_label="y")
    heights = [float(y) for y in re.findall(r'circle cx="[0-9.]+" cy="([0-9.]+)"', chart)]
    assert len(heights) == 3
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1])  # powers of ten are evenly spaced
    assert heights[0] < heights[1]
    assert "y (log scale)" in chart
    assert chart.count("<polyline") == 2  # the gap stays one
    assert line_chart({"a": [None, 0.0]}, title="t", x_label="x", y_label="y") == ""
    bars = bar_chart([1.0, 2.0], title="t", x_label="x", y_label="y")
    sizes = [float(height) for height in re.findall(r'height="([0-9.]+)" class="mark', bars)]
    assert sizes[1] == pytest.approx(2 * sizes[0])
    assert bar_chart([], title="t", x_label="x", y_label="y") == ""
    assert sparkline([1.0, None]) == ""
    assert "polyline" in sparkline([1.0, 1.0])


@pytest.mark.parametrize("values", [[3.0], [1.0, 1.0], [0.0019, 0.0051], [1e-9, 40.0], [10.0], [999.0, 1001.0]])
def test_ticks_surround_the_values_and_bars_start_at_zero(values: list[float]) -> None:
    def ticks(chart: str) -> list[float]:
        return [float(label) for label in re.findall(r'text-anchor="end">([^<]+)<', chart)]

    lines = ticks(line_chart({"a": values}, title="t", x_label="x", y_label="y"))
    assert len(lines) >= 2
    assert min(lines) <= min(values) <= max(values) <= max(lines)
    bars = ticks(bar_chart(values, title="t", x_label="x", y_label="y"))
    assert min(bars) == 0
    assert max(values) <= max(bars) <= 2 * max(values)
