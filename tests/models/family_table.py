"""The table of docs/families.md, made from the specifications: `python -m tests.models.family_table` writes it anew."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from lmkit.errors import UnsupportedError
from lmkit.kv_dtype import INT4, INT8
from lmkit.layers.blocks.base import Block
from lmkit.layers.blocks.delta import DeltaSpec
from lmkit.layers.blocks.mamba import MambaSpec
from lmkit.layers.blocks.short_conv import ShortConvSpec
from lmkit.models import load_spec
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.shard import Shard
from lmkit.models.spec import ModelSpec
from tests.models import tiny
from tests.test_readme import ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
COLUMNS = "model", "architecture", "norms", "attention", "MLP", "`lmkit quantize`", "KV int8, int4", "`--tp`"
HEADER = f"| {' | '.join(COLUMNS)} | steps on a GPU |"


RECURRENT: dict[type[Block], str] = {
    DeltaSpec: "linear",
    MambaSpec: "Mamba-2",
    ShortConvSpec: "short convolutions",
}


def attending(spec: ModelSpec) -> LayerSpec:
    """The first layer with keys and values. Without any, the first layer."""
    return next((layer for layer in spec.layers if layer.kv), spec.layers[0])


def norms(layer: LayerSpec) -> str:
    where = {(True, False): "before", (True, True): "before and after", (False, True): "after"}
    where[False, False] = "before"  # inside of the block
    kind = ", LayerNorm" if layer.norm_bias else ""
    return where[layer.pre_norms, layer.post_norms] + (", on q and k" if "attn.q_norm" in layer.vectors else "") + kind


def attention(spec: ModelSpec) -> str:
    layer = attending(spec)
    is_latent = layer.kv is not None and layer.kv.shared
    parts = ["latent"] if is_latent else []
    parts += ["chosen keys"] if spec.chosen_keys else []
    parts += ["shared by some layers"] if spec.reads_embeddings else []
    for kind in spec.kinds:
        where = "beside it" if kind.kv else "in most layers"
        where = "in all layers" if spec.reads_embeddings or not spec.has_kv else where
        names = [RECURRENT[type(part)] for part in kind.mixer.members if type(part) in RECURRENT]
        parts += [found for name in names if (found := f"{name} {where}") not in parts]
    parts += ["gated"] if "attn.gate" in layer.linears else []
    parts += ["sliding windows"] if any(spec.windows) else []
    unturned = [x.rope.kind == "none" for x in spec.kinds if x.kv]
    if any(unturned):
        without = "without RoPE" if all(unturned) else "some layers without RoPE"
        parts.append(without if spec.first_position is None else "learned positions")
    parts += ["RoPE on a part"] if not is_latent and layer.rope.rotary_dim < layer.head_dim else []
    parts += ["pairs of neighbours"] if layer.rope.interleaved else []
    parts += ["soft cap"] if layer.attention.softcap else []
    parts += ["learned sinks"] if "attn.sinks" in layer.vectors else []
    return ", ".join(parts) or "full"


def mlp(spec: ModelSpec) -> str:
    sparse = [layer.mixture for layer in spec.layers if layer.mixture]
    if sparse:
        chosen = "experts by sigmoid" if sparse[0].sigmoid else "experts"
        return f"{chosen} and a shared one" if sparse[0].shared else chosen
    mlps = next((layer.mlps for layer in spec.layers if layer.mlps), None)
    return "none" if mlps is None else mlps["mlp"].activation.partition("_")[0]


def steps(spec: ModelSpec) -> str:
    """As turbo.runners.cuda_captured says."""
    fixed = all(layer.pre_norms and not layer.is_sparse for layer in spec.layers) and not spec.dynamic_length
    return "captured" if fixed else "launched"


def split(spec: ModelSpec) -> str:
    try:
        Shard(0, 2).model(spec)
    except UnsupportedError:
        return "no"
    return "yes"


def row(model: str, architecture: str, name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tiny.make(Path(folder), name)
        spec = load_spec(json.loads((Path(folder) / "config.json").read_text()))
    layer = attending(spec)
    kv = (
        "none" if not spec.has_kv else "yes" if all(layer.kv_token_bytes(kind, kind) for kind in (INT8, INT4)) else "no"
    )
    cells = [
        model,
        f"`{architecture}`",
        norms(layer),
        attention(spec),
        mlp(spec),
        "yes",
        kv,
        split(spec),
        steps(spec),
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    lines = [HEADER, "|---" * HEADER.count(" |") + "|"]
    return "\n".join(lines + [row(model, *of_model) for model, of_model in ROWS.items()]) + "\n"


def written(page: str, header: str = HEADER) -> str:
    """The table on the page that begins with this header."""
    return page[page.index(header) :].split("\n\n")[0].rstrip("\n") + "\n"


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(page.replace(written(page), table()))
