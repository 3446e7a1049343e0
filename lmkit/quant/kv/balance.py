"""Statistics and formulas of INT4 keys and values: what is left out of the cache, and the matrices that spread the
rest over all channels.

A token's key shares 16 levels over head_dim channels, so one wide channel costs all others their digits. A key's error
counts as much as the queries that meet it. `balanced` gives the matrix A for which keys A k and queries A^-T q have the
same diagonal covariance, which minimizes the error of their products for noise that is alike in all channels; a
rotation after it makes the channels equally wide. Values are rotated alone, in the weights that make and read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.layers.blocks.attention import SelfAttentionSpec
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.kv_transform import MeanByHead
from lmkit.models.layer_spec import LayerSpec

RIDGE = 1e-4  # of the mean variance of a channel, added to each


@dataclass
class Moments:
    """Sums over tokens that are not the first of their sequence, by KV head, on the CPU.

    `keys` are the products of u = (key after RoPE, cosines, sines of its angles) with itself. The covariance of keys
    without RoPE_t(b) is a product of it with numbers of b, which is known only when all tokens were seen.
    """

    keys: Tensor  # float64 [num_kv_heads, D + R, D + R]
    queries: Tensor  # float64 [num_kv_heads, D, D], of the query heads of a KV head together
    num_tokens: int = 0

    @classmethod
    def empty(cls, spec: SelfAttentionSpec) -> Moments:
        heads, dim = spec.num_kv_heads, spec.head_dim
        wide = dim + spec.rope.rotary_dim
        return cls(torch.zeros(heads, wide, wide).double(), torch.zeros(heads, dim, dim).double())

    def add(self, keys: Tensor, queries: Tensor, rope: tuple[Tensor, Tensor], positions: Tensor) -> None:
        """keys [tokens, num_kv_heads, D] and queries [tokens, num_heads, D] after RoPE by `rope`, cosines and sines
        [tokens, R/2]."""
        later = positions > 0
        heads = keys.shape[1]
        angles = torch.cat(rope, dim=-1)[:, None].expand(-1, heads, -1)
        wide = torch.cat([keys, angles], dim=-1)[later].double()
        self.keys += torch.einsum("thd,the->hde", wide, wide).cpu()
        grouped = queries[later].double().view(len(wide), heads, -1, keys.shape[2]).transpose(0, 1).flatten(1, 2)
        self.queries += (grouped.transpose(1, 2) @ grouped).cpu()
        self.num_tokens += len(wide)

    def without(self, b: Tensor) -> Tensor:
        """E[k k^T] of keys k - RoPE_t(b), float64 [num_kv_heads, D, D]. b float64 [num_kv_heads, D]."""
        heads, dim = b.shape
        half = (self.keys.shape[1] - dim) // 2
        i, wide = torch.arange(half), torch.zeros(heads, dim, dim + 2 * half, dtype=torch.float64)
        wide[:, :, :dim] = torch.eye(dim, dtype=torch.float64)
        first, second = b[:, :half], b[:, half : 2 * half]
        wide[:, i, dim + i], wide[:, i, dim + half + i] = -first, second
        wide[:, half + i, dim + i], wide[:, half + i, dim + half + i] = -second, -first
        return wide @ self.keys @ wide.transpose(1, 2) / max(self.num_tokens, 1)


def mean_vector(mean: MeanByHead, spec: SelfAttentionSpec) -> Tensor:
    """b of the pairs, float64 [num_kv_heads, D]."""
    b, half = torch.zeros(spec.num_kv_heads, spec.head_dim, dtype=torch.float64), spec.rope.rotary_dim // 2
    for head, pairs in enumerate(mean):
        for i, first, second in pairs:
            b[head, i], b[head, i + half] = first, second
    return b


def balanced(keys: Tensor, queries: Tensor) -> Tensor:
    """A, float64 [heads, D, D], for the second moments of keys and queries, float64 [heads, D, D] each. Its rows have
    length 1 on average."""
    dim = keys.shape[-1]
    keys, queries = (x + RIDGE * _mean_variance(x) * torch.eye(dim, dtype=x.dtype) for x in (keys, queries))
    root = torch.linalg.cholesky(keys)
    variances, directions = torch.linalg.eigh(root.transpose(1, 2) @ queries @ root)
    scales = variances.clamp_min(torch.finfo(torch.float64).tiny) ** 0.25
    a = scales[..., None] * directions.transpose(1, 2) @ torch.linalg.inv(root)
    turned: Tensor = rotation(dim) @ a
    turned *= math.sqrt(dim) / torch.linalg.matrix_norm(turned)[:, None, None]
    return turned


def _mean_variance(moments: Tensor) -> Tensor:
    """[heads, 1, 1]; 1 for a head that is always 0."""
    mean = moments.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    return mean.masked_fill(mean <= 0, 1 / RIDGE)


def rotation(dim: int) -> Tensor:
    """An orthonormal, symmetric matrix whose numbers are about equally large, float64 [D, D]: the Walsh-Hadamard
    matrix of a power of two, otherwise the discrete Hartley transform."""
    if dim & (dim - 1) == 0:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < dim:
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
        return matrix / math.sqrt(dim)
    n = torch.arange(dim, dtype=torch.float64)
    angles = 2 * math.pi / dim * n[:, None] * n
    return (angles.cos() + angles.sin()) / math.sqrt(dim)


def turns_values(spec: LayerSpec) -> bool:
    """Whether values can be rotated in the weights: no number of attention's output is changed by itself before
    attn.o."""
    attention = spec.fitted_kv
    return attention is not None and not (attention.gated or attention.key_is_value)


def turn_values(layer: DecoderLayer) -> None:
    """Rotate each head of values in attn.v, and back in attn.o. The layer's outputs change by rounding errors only."""
    spec, weights = layer.spec, layer.weights
    h = rotation(spec.head_dim)

    def rotated(role: str, dim: int) -> None:
        weight = weights.get(role)
        if isinstance(weight, Tensor):
            heads = weight.double().unflatten(dim, (-1, spec.head_dim)).movedim(dim + 1, -1)
            turned = (heads @ h.to(weight.device)).movedim(-1, dim + 1).flatten(dim, dim + 1)
            weights[role] = turned.to(weight.dtype).contiguous()

    for role, dim in (("attn.v", 0), ("attn.v.bias", 0), ("attn.o", 1)):
        rotated(role, dim)
