"""Checkpoints that keep several linears of a layer in one tensor, shown with a tensor for each linear.

The order of the outputs, from the first on:

    self_attn.qkv_proj          q | k | v                          Phi-3
    attn.Wqkv                   q | k | v                          ModernBERT
    attention.wqkv              for each KV head: its q heads | k | v      InternLM 2
    self_attn.q_proj            for each head: q | gate            Qwen3-Next, Qwen3.5
    mlp.gate_up_proj            gate | up                          Phi-3, GLM-4
    mlp.Wi                      gate | up                          ModernBERT
    shared_mlp.input_linear     gate | up                          Granite 4
    mlp.experts.gate_up_proj    [experts, gate | up, in]           transformers 5
    mlp.experts.down_proj       [experts, out, in]                 transformers 5

gpt-oss has gate and up side by side for each output, and its float tensors are [experts, in, out]. So are those of
Qwen3-VL-MoE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise, product

import torch
from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.formats.awq import awq_version
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.mxfp4 import BLOCKS, SCALES
from lmkit.formats.views import SUFFIXES, Rows, View, expert_of, flat, named, rows_of
from lmkit.layers.blocks.moe import EXPERT_SCALE, SCORE_BIAS, MoESpec
from lmkit.models import roles
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.spec import ModelSpec

WHOLE = Rows(Fraction(0), Fraction(1))
HALVES = Rows(Fraction(0), Fraction(1, 2)), Rows(Fraction(1, 2), Fraction(1))
# Other names of the parts before and after the layers.
OUTER = {
    "model.tok_embeddings": roles.EMBED,
    "output": roles.LM_HEAD,
    "model.language_model.embed_tokens": roles.EMBED,
    "model.language_model.norm": roles.FINAL_NORM,
    "model.language_model.embed_tokens_per_layer": roles.PER_LAYER_TABLE,
    "model.language_model.per_layer_model_projection": roles.PER_LAYER_PROJECTION,
    "model.language_model.per_layer_projection_norm": roles.PER_LAYER_NORM,
    "model.word_embeddings": roles.EMBED,
    "model.embedding_norm": roles.FINAL_NORM,
    "model.final_layernorm": roles.FINAL_NORM,
    "backbone.embeddings": roles.EMBED,
    "backbone.norm_f": roles.FINAL_NORM,
    "model.decoder.embed_tokens": roles.EMBED,
    "model.decoder.embed_positions": roles.POSITIONS,
    "model.decoder.project_in": roles.PROJECT_IN,
    "model.decoder.project_out": roles.PROJECT_OUT,
    "model.decoder.final_layer_norm": roles.FINAL_NORM,
    "model.decoder.layer_norm": roles.FINAL_NORM,
}
OF_ENCODERS = {
    "word_embeddings": roles.EMBED,
    "position_embeddings": roles.POSITIONS,
    "token_type_embeddings": roles.TOKEN_TYPES,
    "LayerNorm": roles.EMBED_NORM,
}
OUTER |= {f"{prefix}embeddings.{old}": new for prefix in ("", "bert.", "roberta.") for old, new in OF_ENCODERS.items()}
OF_MODERNBERT = {
    "embeddings.tok_embeddings": roles.EMBED,
    "embeddings.norm": roles.EMBED_NORM,
    "final_norm": roles.FINAL_NORM,
}
OUTER |= {prefix + old: new for prefix in ("", "model.") for old, new in OF_MODERNBERT.items()}
EXPERTS = {
    **dict.fromkeys(
        (
            "mlp.experts.gate_up_proj",
            "experts.gate_up_proj",
            "feed_forward.experts.gate_up_proj",
            "block_sparse_moe.input_linear",
        ),
        ("gate", "up"),
    ),
    **dict.fromkeys(
        (
            "mlp.experts.down_proj",
            "experts.down_proj",
            "feed_forward.experts.down_proj",
            "block_sparse_moe.output_linear",
        ),
        ("down",),
    ),
}
# What ends the name of such a tensor, and the name of an expert's.
ENDINGS = {"": "weight", ".weight": "weight", "_bias": "bias", "_blocks": BLOCKS, "_scales": SCALES}
ADAPTERS = {f"attn.{x}": f"linear_{x}" for x in "qkv"} | dict.fromkeys(("mlp.gate", "mlp.up"), "gate_up_proj")  # Zamba2
ROUTER = "mlp.gate"  # beside experts in one tensor
UNSUFFIXED = (
    "attn.sinks",
    SCORE_BIAS,
    "attn.a_log",
    "attn.dt_bias",
    "ssm.a_log",
    "ssm.d",
    "ssm.dt_bias",
    "stream_scale",
    "mlp.router_norm",
    EXPERT_SCALE,
)  # vectors whose names in a checkpoint do not end with "weight"


def stored_name(spec: ModelSpec, index: int, role: str) -> str:
    """The name by which other programs know a dense tensor of a layer. `role` may end with ".bias"."""
    return spec.module_name(index, role) if role in UNSUFFIXED else spec.tensor_name(index, role)


# What transformers writes: it renames a norm of other layers, and this one with it.
OTHER_NAMES = {"post_attention_layernorm": "feedforward_layer_norm"}  # OLMo Hybrid
OTHER_NAMES |= {f"mlp.{x}_proj": f"block_sparse_moe.{x}_proj" for x in ("gate", "up", "down")}  # Kimi Linear


def views(reader: CheckpointReader, spec: ModelSpec) -> dict[str, View]:
    """The tensors of the model that the checkpoint holds inside others. Raises CheckpointError if they do not fit."""
    found = {}
    for (old, new), suffix in product(OUTER.items(), SUFFIXES):
        if reader.has(source := f"{old}.{suffix}"):
            found[f"{new}.{suffix}"] = named(source, reader.info(source).shape)
    if spec.tie_embeddings and not _is_there(reader, found, roles.EMBED) and _is_there(reader, found, roles.LM_HEAD):
        found[f"{roles.EMBED}.weight"] = _head_as_embeddings(reader, found)
    norms = [roles.FINAL_NORM, roles.EMBED_NORM] if spec.layers[-1].norms_lack_bias else []
    for index, layer in enumerate(spec.layers):
        if layer.norms_lack_bias:
            norms += [layer.module_name(index, role) for each in layer.blocks for role in each.norms]
        found |= dict(_linears(reader, index, layer)) | dict(_borrowed(reader, index, layer))
        for role in (layer.vectors | layer.matrices).keys() & UNSUFFIXED:
            if reader.has(source := layer.module_name(index, role)):
                shape = reader.info(source).shape
                found[source + ".weight"] = flat(source, shape)
        for name, other in OTHER_NAMES.items():
            ours, source = (f"{layer.path(index)}{x}.weight" for x in (name, other))
            if name in layer.names.values() and reader.has(source) and not reader.has(ours):
                found[ours] = named(source, reader.info(source).shape)
        if layer.mixture is not None:
            found |= dict(_experts(reader, index, layer, layer.mixture))
    return found | dict(_without_bias(reader, norms, found))


def _without_bias(reader: CheckpointReader, norms: list[str], found: dict[str, View]) -> Iterator[tuple[str, View]]:
    """The factors of LayerNorms, and zeros for their biases. A checkpoint that lmkit has quantized has the zeros."""
    for name in norms:
        source = found[f"{name}.weight"].source if f"{name}.weight" in found else f"{name}.weight"
        if reader.has(source) and not reader.has(f"{name}.bias"):
            shape = reader.info(source).shape
            yield source, named(source, shape)
            yield f"{name}.bias", View(source, shape, torch.zeros_like)


def _is_there(reader: CheckpointReader, found: dict[str, View], module: str) -> bool:
    return f"{module}.weight" in found or reader.has(f"{module}.weight")


def _head_as_embeddings(reader: CheckpointReader, found: dict[str, View]) -> View:
    """A tied model may be stored with its head alone, which is then shown as the embeddings."""
    name = f"{roles.LM_HEAD}.weight"
    return found.pop(name, None) or named(name, reader.info(name).shape)


def _linears(reader: CheckpointReader, index: int, layer: LayerSpec) -> Iterator[tuple[str, View]]:
    version = awq_version(reader.config)
    for module, parts in fused_linears(layer).items():
        for suffix in SUFFIXES:
            if reader.has(source := f"{layer.path(index)}{module}.{suffix}"):
                shape, outputs = reader.info(source).shape, sum(layer.linears[role][0] for role in parts)
                for role, rows in parts.items():
                    view = rows_of(source, shape, rows, outputs, version=version)
                    yield f"{layer.module_name(index, role)}.{suffix}", view


def _borrowed(reader: CheckpointReader, index: int, layer: LayerSpec) -> Iterator[tuple[str, View]]:
    """Weights that the checkpoint has with another layer. Each use adds the product of two small matrices to some of
    them (Zamba2). A checkpoint that lmkit has quantized has the sums of each layer."""
    for first, use, shared in (block.borrowed for block in layer if block.borrowed):
        for role in shared:
            name, source = (f"{layer.module_name(i, role)}.weight" for i in (index, first))
            parent, rows, adapter = source.rpartition(".weight")[0].rpartition(".")[0], WHOLE, ADAPTERS.get(role)
            if adapter == "gate_up_proj" and reader.has(whole := f"{parent}.{adapter}.weight"):
                source, rows = whole, HALVES[role == "mlp.up"]
            if not reader.has(source) or (first != index and reader.has(name)):
                continue
            small = tuple(f"{parent}.{adapter}_adapter_list.{use}.{i}.weight" for i in (0, 1))
            small = small if all(map(reader.has, small)) else ()
            shape = reader.info(source).shape
            part = rows_of(source, shape, rows, shape[0])
            yield name, View(source, part.shape, partial(_summed, part.take), small)


def _summed(take: Callable[[Tensor], Tensor], weight: Tensor, *small: Tensor) -> Tensor:
    """Some rows of a weight [out, in], plus those of the product of `small` [rank, in] and [out, rank] if there is
    one."""
    part = take(weight)
    return (part.float() + take(small[1]).float() @ small[0].float()).to(part.dtype) if small else part


def fused_linears(layer: LayerSpec) -> dict[str, dict[str, Rows]]:
    """The fused linears that a checkpoint may have of this layer, by the end of their names: the rows of each role."""
    fused: dict[str, dict[str, Rows]] = {}
    if layer.kv is not None and layer.num_heads:
        shares = _shares(layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        grouped = _shares(layer.num_heads // layer.num_kv_heads, 1, 1)
        by_head = [Rows(rows.start, rows.stop, layer.num_kv_heads) for rows in grouped]
        fused["self_attn.qkv_proj"] = fused["attn.Wqkv"] = dict(zip(roles.QKV, shares, strict=True))
        fused["attention.wqkv"] = dict(zip(roles.QKV, by_head, strict=True))
    if (gated := ("attn.q", "attn.gate"))[1] in layer.row_groups:
        halves = [replace(half, groups=layer.row_groups["attn.gate"]) for half in HALVES]
        fused["self_attn.q_proj"] = dict(zip(gated, halves, strict=True))
    if "mlp.gate" in layer.linears:
        fused["mlp.gate_up_proj"] = fused["mlp.Wi"] = dict(zip(("mlp.gate", "mlp.up"), HALVES, strict=True))
    for mlp in ("mlp", "mlp.shared"):
        if f"{mlp}.gate" in layer.linears:
            fused["shared_mlp.input_linear"] = dict(zip((f"{mlp}.gate", f"{mlp}.up"), HALVES, strict=True))
    return fused


def _shares(*sizes: int) -> list[Rows]:
    """Parts of these sizes, one after the other."""
    ends = [Fraction(sum(sizes[:i]), sum(sizes)) for i in range(len(sizes) + 1)]
    return [Rows(start, stop) for start, stop in pairwise(ends)]


def _experts(reader: CheckpointReader, index: int, layer: LayerSpec, moe: MoESpec) -> Iterator[tuple[str, View]]:
    prefix = layer.path(index)
    for (module, parts), (ending, suffix) in product(EXPERTS.items(), ENDINGS.items()):
        if not reader.has(source := prefix + module + ending):
            continue
        shape = reader.info(source).shape
        if len(shape) < 2 or shape[0] != moe.num_experts:
            raise CheckpointError(
                f"{reader.path}: {source} is {list(shape)}, expected [{moe.num_experts} experts, outputs, ...]"
            )
        groups = moe.expert.intermediate_size if moe.interleaved else 1
        shares = [replace(half, groups=groups) for half in HALVES] if len(parts) == 2 else [WHOLE]
        outputs, inputs = layer.linears[f"mlp.experts.0.{parts[0]}"]
        turned = shape[1:] == (inputs, outputs * len(parts)) != (outputs * len(parts), inputs)
        transposed = not ending and (moe.interleaved or turned)
        for expert, (part, rows) in product(range(moe.num_experts), zip(parts, shares, strict=True)):
            name = layer.module_name(index, f"mlp.experts.{expert}.{part}")
            yield f"{name}.{suffix}", expert_of(source, shape, expert, rows, transposed=transposed)
    router, source = layer.module_name(index, "mlp.router") + ".weight", f"{prefix}{ROUTER}.weight"
    if router != source and reader.has(source) and not reader.has(router):
        yield router, named(source, reader.info(source).shape)
