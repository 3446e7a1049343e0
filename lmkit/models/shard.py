"""The part of a model that one rank of an engine holds.

    tensor parallelism
    attn.q|k|v     the rows of its heads         mlp.gate|up   its rows          lm_head   its rows
    attn.q_b|kv_b  the same                      mlp.down      its columns       the rest  whole
    attn.o         the columns of its heads

    expert parallelism
    mlp.experts.*  its experts, whole            lm_head       its rows          the rest  whole

A rank is a model with fewer heads and narrower MLPs, or with fewer experts, so that a ModelSpec describes it. The
products of attn.o and mlp.down are sums over the ranks, which add them up. Without expert parallelism experts are split
like other MLPs. With both, experts are whole, and all else is split. If there are fewer KV heads than ranks, ranks
share them. Latent attention has one, so that each rank keeps all rows. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmkit.errors import UnsupportedError
from lmkit.models import roles
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from lmkit.layers.linear import Weights
    from lmkit.models.kv_storage import KVStorage
    from lmkit.qtensor import QTensor

ROWS, COLUMNS = ("gate", "up"), ("o", "down")  # last parts of roles


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size`. If both numbers of ranks are above 1, they are equal."""

    rank: int = 0
    tp: int = 1  # ranks that share each linear
    ep: int = 1  # ranks that share the experts

    @property
    def size(self) -> int:
        return max(self.tp, self.ep)

    def part(self, total: int) -> slice:
        """The rank's part of `total` things, which may be uneven."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def kv_heads(self, count: int) -> slice:
        """The rank's KV heads. If there are fewer heads than ranks, it shares one."""
        if self.tp == 1:
            return slice(count)
        if count >= self.size:
            return self.part(count)
        head = self.rank * count // self.size
        return slice(head, head + 1)

    def model(self, spec: ModelSpec) -> ModelSpec:
        """The model of this rank. `vocab_size` stays that of the whole. Raises UnsupportedError for an uneven split."""
        if self.size == 1:
            return spec
        if spec.sees_all:
            raise UnsupportedError(f"tp={self.size}: {spec.architecture} reads each text as a whole, in one process")
        if self.ep > 1 and not any(layer.is_sparse for layer in spec.kinds):
            raise UnsupportedError(f"ep={self.ep}: {spec.architecture} has no experts; use tp={self.ep}")
        new = {layer: self._layer(layer) for layer in spec.kinds}
        if self.tp > 1 and all(layer == part for layer, part in new.items()):
            raise UnsupportedError(f"tp={self.size}: no layer of {spec.architecture} is split over processes; use tp=1")
        return replace(spec, layers=tuple(new[layer] for layer in spec.layers))

    def _layer(self, spec: LayerSpec) -> LayerSpec:
        parts = (replace(each, block=each.block.share(self.rank, self.tp, self.ep)) for each in spec.blocks)
        return replace(spec, blocks=tuple(parts))

    def storage(self, storage: KVStorage, num_kv_heads: int) -> KVStorage:
        """The storage of this rank's heads. `num_kv_heads` is that of the whole layer."""
        heads = self.kv_heads(num_kv_heads)
        k_scales, v_scales = storage.k_scales[heads], storage.v_scales[heads]
        return replace(storage, transform=storage.transform.heads(heads), k_scales=k_scales, v_scales=v_scales)

    def weights(self, spec: LayerSpec, weights: Weights) -> Weights:
        """This rank's part of a layer's weights by role; experts are its own. `spec` is the whole layer. Raises
        UnsupportedError if a group of a quantized weight would be cut."""
        return weights if self.tp == 1 else {role: self._cut(spec, role, weights[role]) for role in weights}

    def _cut(self, spec: LayerSpec, role: str, weight: Tensor | QTensor) -> Tensor | QTensor:
        from lmkit.qtensor import QTensor

        base, is_bias = role.removesuffix(".bias"), role.endswith(".bias")
        last = base.rpartition(".")[2]
        if (
            base in spec.routers
            or (spec.recurrent and spec.kv is None and base.startswith("attn."))
            or base.startswith(("norm.", "per_layer."))
            or (self.ep > 1 and roles.expert_of(role) is not None)
        ):
            return weight
        if base == "attn.sinks":
            return self.rows(weight, self.part(spec.num_heads))
        if last in COLUMNS:
            if isinstance(weight, QTensor) or not is_bias:
                return self._columns(role, weight)
            return weight * (self.rank == 0)  # added once
        if base in (heads_of := spec.rows_of_heads):
            heads = self.kv_heads(spec.num_kv_heads) if last in ("k", "v") else self.part(spec.num_heads)
            return self.rows(weight, slice(heads.start * heads_of[base], heads.stop * heads_of[base]))
        if last in ROWS:
            return self.rows(weight, self.part(spec.mlps[base.rpartition(".")[0]].intermediate_size))
        return weight

    @staticmethod
    def rows(weight: Tensor | QTensor, rows: slice) -> Tensor | QTensor:
        """Some outputs of a weight [out, in], or some numbers of a vector."""
        from lmkit.qtensor import QTensor, plain

        if not isinstance(weight, QTensor):
            return weight[rows].contiguous()
        whole = plain(weight)
        zeros = whole.zeros[rows] if len(whole.zeros) else whole.zeros
        factor = None if whole.factor is None else whole.factor[rows]
        return replace(
            whole, codes=whole.codes[rows].contiguous(), scales=whole.scales[rows], zeros=zeros, factor=factor
        )

    def _columns(self, role: str, weight: Tensor | QTensor) -> Tensor | QTensor:
        from lmkit.qtensor import QTensor, plain

        if not isinstance(weight, QTensor):
            return weight[:, self.part(weight.shape[1])].contiguous()
        if weight.order is not None:
            raise UnsupportedError(
                f"tp={self.size}: {role} has its inputs in activation order, so a group's inputs are on several ranks; "
                "use tp=1"
            )
        whole = plain(weight)
        width, group = whole.codes.shape[1], whole.scheme.group_size
        codes = whole.codes[:, self.part(width)].contiguous()
        if group == -1:
            return QTensor(codes, whole.scales, whole.zeros, whole.scheme)
        if width % (group * self.size):
            raise UnsupportedError(
                f"tp={self.size}: {role} has {width} inputs in groups of {group}, and a rank needs whole groups; "
                "use a smaller tp, or quantize with smaller groups"
            )
        groups, factor = self.part(width // group), whole.factor
        zeros = whole.zeros[:, groups].contiguous() if len(whole.zeros) else whole.zeros
        if factor is not None:
            if factor.shape[1] % self.size:
                raise UnsupportedError(
                    f"tp={self.size}: {role} has {width} inputs in super-groups of {width // factor.shape[1]}, and a "
                    "rank needs whole ones; use a smaller tp"
                )
            factor = factor[:, self.part(factor.shape[1])].contiguous()
        return QTensor(codes, whole.scales[:, groups].contiguous(), zeros, whole.scheme, factor=factor)


WHOLE = Shard()
