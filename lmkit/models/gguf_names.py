"""Where a GGUF file has the tensors of a model: llama.cpp's name for each role, and the order of its rows.

A role may be a part of a tensor (q, k and v in attn_qkv, gate and up in ffn_up, an expert in ffn_up_exps). Rows are cut
and reordered as bytes, so what is quantized stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmkit.errors import CheckpointError
from lmkit.formats.gguf import GgufReader, Piece
from lmkit.layers.blocks.base import ValueHeads
from lmkit.layers.blocks.delta import CONVS
from lmkit.layers.blocks.moe import EXPERT_SCALE, SCORE_BIAS
from lmkit.models import roles
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.spec import ModelSpec

NAMES = {
    "norm.attn": "attn_norm", "norm.mlp": "ffn_norm", "norm.attn_out": "post_attention_norm",
    "norm.mlp_out": "post_ffw_norm", "attn.q": "attn_q", "attn.k": "attn_k", "attn.v": "attn_v",
    "attn.o": "attn_output", "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm", "attn.sinks": "attn_sinks",
    "attn.q_a": "attn_q_a", "attn.q_b": "attn_q_b", "attn.q_a_norm": "attn_q_a_norm", "attn.kv_a": "attn_kv_a_mqa",
    "attn.kv_a_norm": "attn_kv_a_norm", "attn.kv_b": "attn_kv_b", "attn.qkv": "attn_qkv", "attn.z": "attn_gate",
    "attn.b": "ssm_beta", "attn.a": "ssm_alpha", "attn.conv": "ssm_conv1d", "attn.a_log": "ssm_a",
    "attn.dt_bias": "ssm_dt", "attn.delta_norm": "ssm_norm", "mlp.gate": "ffn_gate", "mlp.up": "ffn_up",
    "mlp.down": "ffn_down", "mlp.router": "ffn_gate_inp", SCORE_BIAS: "exp_probs_b",
    "mlp.shared_router": "ffn_gate_inp_shexp", "mlp.shared.gate": "ffn_gate_shexp", "mlp.shared.up": "ffn_up_shexp",
    "mlp.shared.down": "ffn_down_shexp", "mlp.experts.{}.gate": "ffn_gate_exps", "mlp.experts.{}.up": "ffn_up_exps",
    "mlp.experts.{}.down": "ffn_down_exps", "per_layer.gate": "inp_gate", "per_layer.out": "proj",
    "norm.per_layer_out": "post_norm", "stream_scale": "layer_output_scale", "mlp.router_norm": "ffn_gate_inp",
    EXPERT_SCALE: "ffn_down_exps", "mlp.experts_norm": "pre_ffw_norm_2", "mlp.shared_out_norm": "post_ffw_norm_1",
    "mlp.experts_out_norm": "post_ffw_norm_2", "attn.gate": "attn_gate", "attn.index_q": "indexer.attn_q_b",
    "attn.index_k": "indexer.attn_k", "attn.index_k_norm": "indexer.k_norm", "attn.index_weights": "indexer.proj",
    "attn.q_conv": "ssm_conv1d_q", "attn.k_conv": "ssm_conv1d_k", "attn.v_conv": "ssm_conv1d_v",
    "attn.a_low": "ssm_f_a", "attn.z_low": "ssm_g_a", "ssm.in": "ssm_in", "ssm.taps": "ssm_conv1d",
    "ssm.a_log": "ssm_a", "ssm.d": "ssm_d", "ssm.dt_bias": "ssm_dt", "norm.ssm": "ssm_norm", "ssm.out": "ssm_out",
    "conv.in": "shortconv.in_proj", "conv.taps": "shortconv.conv", "conv.out": "shortconv.out_proj",
    "mlp.latent_in": "ffn_latent_down", "mlp.latent_out": "ffn_latent_up",
}  # fmt: skip
# Roles whose tensors end otherwise than ".weight".
ENDINGS = {
    SCORE_BIAS: "bias",
    **dict.fromkeys(("attn.dt_bias", "ssm.dt_bias"), "bias"),
    **dict.fromkeys(("attn.a_log", "ssm.a_log", "ssm.d"), ""),
    "mlp.router_norm": "scale",
    EXPERT_SCALE: "scale",
}
# What an architecture names otherwise. The norm before the MLP is the one after attention, for most of these.
_NORM = {"norm.mlp": "post_attention_norm"}
OWN = {
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe", "glm4moe", "seed_oss", "gpt-oss"), _NORM),
    "bert": {"norm.attn": "attn_output_norm", "norm.mlp": "layer_output_norm"},
}
# Linears that stand with another one, so many groups of rows in turns (LayerSpec.row_groups): tensor, place in a group.
IN_GROUPS = {"attn.q": ("attn_q", 0), "attn.gate": ("attn_q", 1), "attn.b": ("ssm_ba", 0), "attn.a": ("ssm_ba", 1)}
# Rows of q and k are in rotary pairs: 0, half, 1, ...
PAIRED = "llama", "granite", "granitemoe", "granitehybrid", "granite_swa", "arcee", "internlm2", "smollm3", "mistral3"
# Value heads are in turns: the first of each key head, then the second of each, ...
IN_TURNS = "qwen35", "qwen35moe"
OUTER = {
    roles.EMBED + ".weight": "token_embd.weight",
    roles.FINAL_NORM + ".weight": "output_norm.weight",
    roles.FINAL_NORM + ".bias": "output_norm.bias",
    roles.LM_HEAD + ".weight": "output.weight",
    roles.POSITIONS + ".weight": "position_embd.weight",
    roles.TOKEN_TYPES + ".weight": "token_types.weight",
    roles.EMBED_NORM + ".weight": "token_embd_norm.weight",
    roles.EMBED_NORM + ".bias": "token_embd_norm.bias",
    roles.PER_LAYER_TABLE + ".weight": "per_layer_token_embd.weight",
    roles.PER_LAYER_PROJECTION + ".weight": "per_layer_model_proj.weight",
    roles.PER_LAYER_NORM + ".weight": "per_layer_proj_norm.weight",
}
OWN_OUTER = {kind: {roles.FINAL_NORM + ".weight": "token_embd_norm.weight"} for kind in ("lfm2", "lfm2moe")}
Rows = Callable[[Tensor], Tensor]


class Place(NamedTuple):
    """Rows of a tensor of a layer, named by the end of its name without ".weight"."""

    name: str
    rows: Rows | None = None


def pieces(reader: GgufReader, spec: ModelSpec) -> dict[str, Piece]:
    """Every tensor of the model that the file has, by the model's names. Raises CheckpointError for a tensor that does
    not have the rows that it must have."""
    maker = _Maker(reader, spec)
    outer = OUTER | OWN_OUTER.get(maker.kind, {})
    found = {name: maker.piece(name, (source,), None) for name, source in outer.items() if maker.has(source)}
    if spec.norm_offset and (norm := roles.FINAL_NORM + ".weight") in found:
        found[norm] = found[norm]._replace(offset=spec.norm_offset)
    for name in (roles.EMBED, roles.LM_HEAD):
        if (weight := f"{name}.weight") in found:
            found[weight] = found[weight]._replace(kept=True)
    for index, layer in enumerate(spec.layers):
        found |= dict(maker.layer(index, layer))
    for name in maker.unbiased():
        if (weight := name.removesuffix("bias") + "weight") in found:
            found.setdefault(name, found[weight]._replace(rows=None, make=torch.zeros_like))
    return found


class _Maker:
    def __init__(self, reader: GgufReader, spec: ModelSpec) -> None:
        self.reader, self.spec, self.kind = reader, spec, str(reader.file.metadata["general.architecture"])
        self.tensors = reader.file.tensors

    def has(self, source: str) -> bool:
        return source in self.tensors

    def unbiased(self) -> Iterator[str]:
        """The biases of LayerNorms that lack them."""
        if self.spec.layers[-1].norms_lack_bias:
            yield from (f"{norm}.bias" for norm in (roles.FINAL_NORM, roles.EMBED_NORM))
        for index, layer in enumerate(self.spec.layers):
            if layer.norms_lack_bias:
                norms = (role for each in layer.blocks for role in each.norms)
                yield from (f"{layer.module_name(index, role)}.bias" for role in norms)

    def layer(self, index: int, layer: LayerSpec) -> Iterator[tuple[str, Piece]]:
        every = (*layer.linears, *layer.routers, *layer.vectors, *layer.matrices)
        for role in every:
            base, bias = role.removesuffix(".bias"), role.endswith(".bias")  # of a LayerNorm
            kinds = (("bias", True),) if bias else (("weight", False), ("bias", True))
            for suffix, is_bias in kinds:
                if is_bias and not bias and role not in layer.linears and role not in layer.routers:
                    continue
                if (made := self._role(index, layer, base, is_bias)) is not None:
                    yield f"{layer.module_name(index, base)}.{suffix}", made

    def _role(self, index: int, layer: LayerSpec, role: str, is_bias: bool) -> Piece | None:
        """The tensor of a role; None if the file has none."""
        if role == "attn.kv_b" and not is_bias and self.has(f"blk.{index}.attn_k_b.weight"):
            return self._absorbed(index, layer)
        ending = "bias" if is_bias else ENDINGS.get(role, "weight")
        for name, rows in self._places(layer, role):
            source = f"blk.{index}.{name}"  # without an ending of its own in some files
            source = f"{source}.{ending}" if is_bias or self.has(f"{source}.{ending}") else source
            if not self.has(source):
                continue
            rows = self._in_order(layer, role, rows)
            if not is_bias and role in VALUES:
                return self.piece(role, (source,), None, _after(rows, VALUES[role]))
            offset = self.spec.norm_offset if role in layer.vectors and not is_bias else 0.0
            kept, order = role in layer.linears and not is_bias, None
            if kept and self.kind in IN_TURNS and (heads := layer.value_heads.get(role)) and heads.inputs:
                order = _grouped(torch.arange(self.tensors[source].shape[-1]), heads).int()
            return self.piece(role, (source,), rows, kept=kept)._replace(offset=offset, order=order)
        return None

    def _places(self, layer: LayerSpec, role: str) -> Iterator[Place]:
        """Where a role may be, the first place that is there first."""
        expert, part = roles.expert_of(role), role.rpartition(".")[2]
        names = NAMES | OWN.get(self.kind, {}) | layer.gguf_names
        if expert is not None:
            yield Place(names[f"mlp.experts.{{}}.{part}"], lambda weight: weight[expert])
            yield Place(f"ffn_{part}.{expert}")  # as files of 2023 have it
            if part in ("gate", "up"):
                yield Place("ffn_gate_up_exps", lambda weight: _half(weight[expert], part))
            return
        if role in layer.row_groups:
            source, which = IN_GROUPS[role]
            if names.get(role, source) != source:
                yield Place(names[role])
            yield Place(source, lambda weight: _of_groups(weight, layer.row_groups[role], which))
            return
        if role in roles.QKV and layer.kv is not None and not layer.kv.shared:
            sizes = tuple(layer.linears.get(each, (0, 0))[0] for each in roles.QKV)
            start = sum(sizes[: roles.QKV.index(role)])
            size = sizes[roles.QKV.index(role)]
            yield Place(names[role])
            yield Place("attn_qkv", lambda weight: _cut(weight, start, size, sum(sizes)))
            return
        if role in ("mlp.gate", "mlp.up") and self.kind in FUSED_MLP:
            yield Place("ffn_up", lambda weight: _half(weight, part))
            return
        yield Place(names[role])

    def _in_order(self, layer: LayerSpec, role: str, rows: Rows | None) -> Rows | None:
        """Rows of q and k in the order of halves, where the file has them as rotary pairs: 0, half, 1, half + 1, ...
        Those of value heads by their key head, where the file has them in turns."""
        if self.kind in IN_TURNS and (heads := layer.value_heads.get(role)) and not heads.inputs:
            return _after(rows, lambda weight: _grouped(weight, heads))
        counts = {"attn.q": layer.num_heads, "attn.k": layer.num_kv_heads}
        if self.kind not in PAIRED or role not in counts:
            return rows
        return lambda weight: _as_halves(weight if rows is None else rows(weight), counts[role])

    def _absorbed(self, index: int, layer: LayerSpec) -> Piece:
        """kv_b of latent attention from its two parts, of which the file has that of the keys transposed."""
        sources = tuple(f"blk.{index}.attn_{part}_b.weight" for part in "kv")

        def make(keys: Tensor, values: Tensor) -> Tensor:
            return torch.cat([keys.float().transpose(1, 2), values.float()], dim=1).flatten(0, 1)

        return self.piece("attn.kv_b", sources, None, make)

    def piece(
        self,
        name: str,
        sources: tuple[str, ...],
        rows: Rows | None,
        make: Callable[..., Tensor] | None = None,
        kept: bool = False,
    ) -> Piece:
        """A piece with the shape that its functions give. Raises CheckpointError if they cannot work."""
        shapes = [self.tensors[source].shape if source in self.tensors else () for source in sources]
        parts: list[Any] = [torch.empty(shape, device="meta") for shape in shapes]
        try:
            parts = [part if rows is None else rows(part) for part in parts]
            shape = tuple((parts[0] if make is None else make(*parts)).shape)
        except (RuntimeError, IndexError, ValueError) as error:
            found = ", ".join(f"{source} {list(shape)}" for source, shape in zip(sources, shapes, strict=True))
            raise CheckpointError(
                f"{self.reader.path}: {found} cannot hold {name}: {str(error).splitlines()[0]}"
            ) from None
        return Piece(sources, shape, rows, make, kept)


FUSED_MLP = ("phi3", "glm4", "chatglm", "modern-bert")  # gate and up are in ffn_up
# What some small tensors hold otherwise than the checkpoint: the decay itself, negative or not, and other dimensions.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("attn.a_log", "ssm.a_log"), lambda decay: decay.float().abs().log().flatten()),
    **dict.fromkeys(
        (*CONVS, "attn.conv", "conv.taps", "ssm.taps"), lambda taps: taps.float().reshape(-1, 1, taps.shape[-1])
    ),
    **dict.fromkeys((SCORE_BIAS, "ssm.d", "norm.ssm"), torch.flatten),
    "mlp.shared_router": lambda weight: weight.float().reshape(1, -1),
}


def _after(rows: Rows | None, change: Rows) -> Rows:
    return change if rows is None else lambda weight: change(rows(weight))


def _grouped(weight: Tensor, heads: ValueHeads) -> Tensor:
    """Rows of value heads in turns of all key heads -> by key head. Those before them stay."""
    before, values = weight[: heads.first], weight[heads.first :]
    by_turn = values.reshape(-1, heads.groups, heads.rows, *weight.shape[1:])
    return torch.cat([before, by_turn.transpose(0, 1).reshape(values.shape)])


def _half(weight: Tensor, part: str) -> Tensor:
    return _cut(weight, 0 if part == "gate" else len(weight) // 2, len(weight) // 2, len(weight))


def _cut(weight: Tensor, start: int, size: int, total: int) -> Tensor:
    if len(weight) != total:
        raise ValueError(f"expected {total} rows")
    return weight[start : start + size]


def _of_groups(weight: Tensor, groups: int, which: int) -> Tensor:
    """Of each of so many equal groups of rows, the first or the second half."""
    return weight.reshape(groups, 2, -1, *weight.shape[1:])[:, which].flatten(0, 1)


def _as_halves(weight: Tensor, heads: int) -> Tensor:
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
