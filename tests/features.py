"""docs/features.md: which feature goes with which kind of model, as the code that refuses at the start says.

A tiny checkpoint of each kind is opened with each feature's options, up to where weights would be loaded. What raises
there is the footnote of a "no".
"""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lmkit import conflicts
from lmkit.config import EngineConfig
from lmkit.errors import LMKitError
from lmkit.models import load_spec
from lmkit.models.engines import open_source
from lmkit.models.kv_layout import layout_of
from lmkit.models.mtp import MTPSource
from lmkit.models.resolved import ResolvedModel, resolved
from lmkit.quant.plan import make_plan
from lmkit.quant.recipe import DEFAULT_RECIPE, load_recipe
from lmkit.text.audio import DEAF
from lmkit.text.images import TEXT_ONLY
from lmkit.turbo.engine.loading import load_options, traits_of
from lmkit.turbo.engine.memory import kv_limits
from tests.flexible import tiny as foreign
from tests.models import speech, tiny
from tests.quant.helpers import tiny_checkpoint

MADE = "Made from the code by `python -m tests.pages`; a test compares it."
TEXT = """\
Rows are features, columns are kinds of models. A number leads to a footnote: the line with which the start refuses.
The table is made by asking the code that refuses, with a tiny model of each kind ({models}).
What one model lacks may be there in another of its kind: [families](families.md) has the models,
[reference](reference.md#options-that-do-not-go-together) the options that exclude each other.

- "short": contexts are shorter with this feature.
- Several processes are two here, and `--ep` is alone. Roles are those of `lmkit serve --role`."""
MEMORY = 64 << 30
KEY, ADDRESS = {"kv_key_file": "key"}, "127.0.0.1:7400"


class Kind(NamedTuple):
    """A column."""

    model: str  # as it is called on the page
    make: Callable[[Path], Any]


def _family(name: str, **overrides: Any) -> Callable[[Path], Any]:
    return lambda path: tiny_checkpoint(path, name, **overrides)


WIDE = {"head_dim": 32}  # as INT3 needs
KINDS: dict[str, Kind] = {
    "dense": Kind("Llama", _family("llama", **WIDE)),
    "windows": Kind("Gemma 3", _family("gemma3", **WIDE)),
    "experts": Kind("Qwen3-MoE", _family("qwen3-moe", num_experts=8, **WIDE)),
    "latent": Kind("DeepSeek-V3", _family("deepseek-v3", num_key_value_heads=4)),
    "sparse latent": Kind("GLM-5", _family("glm-5", num_key_value_heads=4, index_topk=8)),
    "delta rule": Kind("Qwen3.5", _family("qwen3.5", **WIDE)),
    "delta rule with experts": Kind("Qwen3.5-MoE", _family("qwen3.5-moe", num_experts=8, **WIDE)),
    "Mamba-2": Kind("Granite 4", _family("granite-hybrid", hidden_size=128)),
    "short convolutions": Kind("LFM2", _family("lfm2", **WIDE)),
    "images": Kind("Qwen3-VL", _family("qwen3-vl", **WIDE)),
    "audio": Kind("Whisper", speech.make),
    "encoder": Kind("BERT", lambda path: tiny.make_encoder(path, "Bert")),
    "flexible": Kind("StableLM", lambda path: foreign.make(path, "stablelm")),
    "flexible with states": Kind("Jamba", lambda path: foreign.make(path, "jamba")),
    "flexible with own caches": Kind("MiniMax", lambda path: foreign.make(path, "minimax")),
}


class Feature(NamedTuple):
    """A row. `ask` raises what the code says beside the options, or gives a reason."""

    options: dict[str, Any] = {}
    traits: tuple[str, ...] = ()
    ask: Callable[[ResolvedModel, EngineConfig], str | None] = lambda model, config: None


def _quantized(model: ResolvedModel, config: EngineConfig) -> None:
    recipe = load_recipe(DEFAULT_RECIPE, {"calibration": {"seq_len": 8}, "scheme": {"group_size": 32}})
    source = open_source(model.reader.path, "auto", floats=True)
    try:
        make_plan(source, recipe.for_model(source.spec))
    finally:
        source.close()


def _sees(model: ResolvedModel, config: EngineConfig) -> str | None:
    return None if model.spec.vision is not None or model.source.sees else TEXT_ONLY


def _drafts(model: ResolvedModel, config: EngineConfig) -> None:
    if model.spec.mtp is None:
        MTPSource(model)


def _caches(model: ResolvedModel, config: EngineConfig) -> str | None:
    layout = layout_of(model.spec, 0, [storage.dtypes for storage in model.storages])
    if kv_limits(model.spec, config, layout, 64, num_snapshots=int(model.spec.is_recurrent)).prefix_cache:
        return None
    return "a text is read as a whole, and nothing of it is kept" if model.spec.sees_all else "nothing is reused"


FEATURES: dict[str, Feature] = {
    "`--tp`": Feature({"tp": 2}),
    "`--ep`": Feature({"ep": 2}),
    "`--pp`": Feature({"pp": 2}),
    "role prefill": Feature({"kv_listen": ADDRESS, "kv_host_memory": 1 << 24, **KEY}, (conflicts.PREFILL,)),
    "role decode": Feature({"kv_peer": ADDRESS, **KEY}, (conflicts.DECODE,)),
    "KV of another engine": Feature({"kv_peer": ADDRESS, **KEY}),
    "KV events": Feature({"kv_events": "tcp://127.0.0.1:5557"}),
    "prefix cache": Feature(ask=_caches),
    "sessions": Feature(ask=_caches),
    "KV in host memory": Feature({"kv_host_memory": 1 << 24}),
    "KV on a disk": Feature({"kv_disk_path": "folder"}),
    "INT8 KV": Feature({"kv_dtype": "int8"}),
    "INT4 KV": Feature({"kv_dtype": "int4"}),
    "INT3 KV": Feature({"kv_dtype": "int3"}),
    "adapters": Feature({"adapter_root": "folder"}),
    "images": Feature(ask=_sees),
    "audio": Feature(ask=lambda model, config: None if model.spec.audio else DEAF),
    "`--speculate ngram`": Feature({"speculate": "ngram"}),
    "`--speculate mtp`": Feature({"speculate": "mtp"}, ask=_drafts),
    "weights beyond the memory": Feature({"weights_memory": 1 << 30}),
    "`lmkit quantize`": Feature(ask=_quantized),
    "`--quantize fp8`": Feature({"quantize": "fp8"}),
    "GPU": Feature({"device": "cuda"}),
    "GPUs, `--tp`": Feature({"device": "cuda", "tp": 2}),
    "GPUs, `--pp`": Feature({"device": "cuda", "pp": 2}),
}


def _answer(model: ResolvedModel, feature: Feature, config: EngineConfig) -> str:
    """ "yes", or what stands before a colon in a cell, and why."""
    model.stage.cut(model.spec)
    model.check_cut()
    if reason := feature.ask(model, config):
        return f"no: {reason}"
    if not model.spec.foreign and model.spec.max_position < load_spec(model.reader.config).max_position:
        return "short: the context ends where an indexer would not choose every key"
    return "yes"


def answers(path: Path) -> Iterator[str]:
    """The answer for each feature. A checkpoint is opened again only if the options change how."""
    plain = EngineConfig(device="cpu").on("cpu", MEMORY)
    with resolved(path, **load_options(plain)) as whole:
        for feature in FEATURES.values():
            config = EngineConfig(**{"device": "cpu"} | feature.options)
            config = config.on(config.device, MEMORY)
            try:
                traits = traits_of(whole.spec, config)
                conflicts.check(config, *feature.traits, *traits, architecture="this model")
                if load_options(config) == load_options(plain):
                    yield _answer(whole, feature, config)
                else:
                    with resolved(path, **load_options(config)) as model:
                        yield _answer(model, feature, config)
            except LMKitError as error:
                yield f"no: {error}".replace(f"{path}: ", "").replace(str(path), "the model")


@cache
def features() -> str:
    """docs/features.md."""
    notes: dict[str, int] = {}
    columns = []
    for kind in KINDS.values():
        with tempfile.TemporaryDirectory() as folder:
            kind.make(Path(folder))
            columns.append([answer.partition(": ") for answer in answers(Path(folder))])
    rows = [f"| | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
    for name, cells in zip(FEATURES, zip(*columns, strict=True), strict=True):
        shown = [
            word + (f" [{notes.setdefault(reason, len(notes) + 1)}](#footnotes)" if reason else "")
            for word, _, reason in cells
        ]
        rows.append(f"| {name} | {' | '.join(shown)} |")
    models = ", ".join(f"{name}: {kind.model}" for name, kind in KINDS.items())
    found = [f"{number}. {reason}" for reason, number in notes.items()]
    told = _folded(TEXT.partition("\n\n")[0].format(models=models))
    text = [
        f"# Features and kinds of models\n\n{MADE}",
        told,
        TEXT.partition("\n\n")[2],
        "\n".join(rows),
        "## Footnotes",
    ]
    return "\n\n".join([*text, "\n".join(map(_folded, found))]) + "\n"


def _folded(line: str) -> str:
    """Lines of at most 120 columns."""
    after = "   " if line[:1].isdigit() else ""
    return textwrap.fill(line, 120, subsequent_indent=after, break_long_words=False, break_on_hyphens=False)
