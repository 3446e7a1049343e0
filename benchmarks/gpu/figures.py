"""Figures from the rows: each figure beside its bound, its share of the bound, and its target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.gpu import anchors
from benchmarks.gpu.context import Row

Rows = list[Row]
PRODUCTS = ("qkv", "o", "gate+up", "down")


@dataclass(frozen=True)
class Figure:
    """`value` is None if it was not measured. `note` says why, or names figures to compare with."""

    name: str
    value: float | None
    unit: str
    target: float | None
    bound: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """The share of the bound."""
        return self.value / self.bound if self.value is not None and self.bound else None

    @property
    def is_reached(self) -> bool | None:
        return self.value >= self.target if self.value is not None and self.target is not None else None


def figures(rows: Rows) -> list[Figure]:
    """All figures, measured or not."""
    found = [*_machine(rows), *_numerics(rows), *_gemm(rows), *_attention(rows), *_engine(rows)]
    return [_with_anchors(figure) for figure in found]


def _with_anchors(figure: Figure) -> Figure:
    published = "; ".join(f"{a.value:,.4g} {a.unit}: {a.what} ({a.source})" for a in anchors.of(figure.name))
    note = "; ".join(part for part in (figure.note, published) if part)
    return Figure(figure.name, figure.value, figure.unit, figure.target, figure.bound, note)


def _select(rows: Rows, section: str, what: str | Callable[[str], bool], **values: object) -> Rows:
    matches = what if callable(what) else what.__eq__
    return [
        row
        for row in rows
        if row["section"] == section
        and matches(row["what"])
        and all(row.get(key) == value for key, value in values.items())
    ]


def _one(rows: Iterable[Row], key: str) -> float | None:
    return next((row[key] for row in rows if key in row), None)


def _machine(rows: Rows) -> list[Figure]:
    units = (
        ("copy bandwidth", "bytes/s"),
        ("read bandwidth", "bytes/s"),
        ("bfloat16 matmul", "flops"),
        ("kernel in a graph", "s"),
    )
    return [Figure(what, _one(_select(rows, "machine", what), "value"), unit, None) for what, unit in units]


def _numerics(rows: Rows) -> list[Figure]:
    found = []
    for what in ("tests", "memcheck", "racecheck"):
        row = next((r for r in _select(rows, "numerics", what)), None)
        share = None
        note = "not run" if row is None else str(row.get("error", ""))
        if row is not None and "passed" in row and row["passed"] + row["failed"]:
            share = row["passed"] / (row["passed"] + row["failed"])
            note = f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
        found.append(Figure(f"numerics: {what}", share, "of tests", 1.0, note=note))
    return found


def _gemm(rows: Rows) -> list[Figure]:
    """The worst of the four shapes, as a share of the copy bandwidth. The note compares with the other kernels."""
    found = []
    for m in (1, 2, 4, 8, 16):
        ours = [_ours(rows, shape, m) for shape in PRODUCTS]
        values = [row["of_bandwidth"] for row in ours if row is not None]
        worst = min(values) if len(values) == len(PRODUCTS) else None
        found.append(Figure(f"W4A16 GEMM M={m}", worst, "of bandwidth", 0.8, 1.0, _beside(rows, m)))
    return found


def _ours(rows: Rows, shape: str, m: int) -> Row | None:
    found = [
        row
        for row in _select(rows, "gemm", lambda what: what.startswith("lmkit "), shape=shape, m=m)
        if "seconds" in row
    ]
    return min(found, key=lambda row: float(row["seconds"]), default=None)


def _beside(rows: Rows, m: int) -> str:
    """The speed relative to each of the other kernels: the least ratio over the four shapes."""
    ratios: dict[str, list[float]] = {}
    for shape in PRODUCTS:
        ours = _ours(rows, shape, m)
        for row in _select(rows, "gemm", lambda what: not what.startswith("lmkit "), shape=shape, m=m):
            if ours is not None and "seconds" in row:
                ratios.setdefault(row["what"], []).append(row["seconds"] / ours["seconds"])
    return ", ".join(f"{min(values):.2f}x {name}" for name, values in ratios.items())


def _attention(rows: Rows) -> list[Figure]:
    found = []
    for kv, target in (("float16", 0.8), ("int8", 0.8), ("int4", 0.65), ("fp8", None)):
        value = _one(_select(rows, "attention", "decode", kv=kv, batch=16, context=8192), "of_bandwidth")
        found.append(Figure(f"decode attention b16 x 8k, {kv} KV", value, "of bandwidth", target, 1.0))
    value = _one(_select(rows, "attention", "prefill", kv="float16", batch=1, context=8192, new=8192), "of_matmul")
    return [*found, Figure("prefill attention 8k, float16 KV", value, "of matmul", None, 1.0)]


def _engine(rows: Rows) -> list[Figure]:
    found = []
    for model, batch, target in (
        ("Llama-3-8B", 1, 550.0), ("Llama-3-8B", 16, 6700.0), ("Llama-3-8B", 64, 17000.0), ("Llama-3-8B", 256, 23000.0),
        ("Qwen2.5-7B", 1, None), ("Qwen2.5-7B", 64, None), ("Llama-3.2-1B", 1, None), ("Llama-3.2-1B", 64, None),
    ):  # fmt: skip
        name = f"{model} decode b{batch}"
        row = _select(rows, "engine", name, storage="w4")
        found.append(Figure(name, _one(row, "tokens_per_s"), "tok/s", target, _one(row, "bound")))
    for model, least in (("Llama-3-8B", 0.6), ("Qwen2.5-7B", None), ("Llama-3.2-1B", None)):
        row = _select(rows, "engine", f"{model} prefill")
        rate = _one(row, "tokens_per_s")
        note = "" if rate is None else f"{rate:,.0f} tok/s"
        found.append(Figure(f"{model} prefill", _one(row, "share"), "of matmul", least, 1.0, note))
    return [*found, *_ratios(rows)]


def _ratios(rows: Rows) -> list[Figure]:
    def rate(section: str, batch: int, **values: object) -> float | None:
        return _one(_select(rows, section, f"Llama-3-8B decode b{batch}", **values), "tokens_per_s")

    def ratio(name: str, ours: float | None, other: float | None, target: float) -> Figure:
        return Figure(name, ours / other if ours and other else None, "x", target)

    return [
        ratio(
            "W4A16 over our bfloat16, b1", rate("engine", 1, storage="w4"), rate("engine", 1, storage="bfloat16"), 2.4
        ),
        ratio("over transformers, b64", rate("engine", 64, storage="w4"), rate("transformers", 64), 10.0),
    ]
