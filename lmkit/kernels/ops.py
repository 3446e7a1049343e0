"""Every op once: signature, shapes, formula. The bodies are in reference/ (torch, fp32 accumulation: the oracle for the
others), cpu/ (numba) and cuda/. Symbols: T tokens in the step, B sequences, H hidden, D head_dim, N out, K in features.

A blocked KV cache of one layer is two KVTensors (keys, values), each in one of eight storage types:

    float32, bfloat16, float16   data [num_blocks, num_kv_heads, block_size, D]
    int8                         data uint8 [num_blocks, num_kv_heads, block_size, D]
    fp8                          as int8; codes are the bits of float8 e4m3 (finite, up to 448), the minimum is 0
    int4                         data uint8 [..., D/2]: byte j has element j in its low, j + D/2 in its high nibble
    int3, int2                   data uint8 [..., D bits/8], units of 32: byte i < 8 has the low 2 bits of i, i + 8,
                                 i + 16, i + 24; then in int3 byte 8 + j has the high bits of 8 j .. 8 j + 7
    params (int8, fp8, int4)     float16 [..., 2] = (scale, minimum) per token and head: x ~ code * scale + minimum
    params (int3, int2)          float16 [..., 1] = the best scale: x ~ (levels[code] - largest / 2) * scale (kv_dtype)

Token t of a sequence lives in slot block_table[t // block_size] * block_size + t % block_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels.delta import DeltaWeights
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import op
from lmkit.kv_dtype import KVDtype

FP8_MAX = 448.0
ACTIVATIONS, UNGATED = ("silu", "gelu_tanh", "clamped_swish"), ("relu", "gelu", "relu2")  # with a gate, without
UNIT_EPS = 1e-6  # of unit vectors of linear attention
CLAMP, SWISH = 7.0, 1.702  # of clamped_swish


@dataclass(frozen=True)
class BatchGeometry:
    """The positions of a step's tokens in their sequences, and the blocks of a KV cache that hold the sequences."""

    query_start: Tensor  # int32 [B + 1]: rows query_start[b] .. query_start[b + 1] belong to sequence b
    context_lens: Tensor  # int32 [B], tokens in the cache after this step
    block_tables: Tensor  # int32 [B, max_blocks], padded with anything
    slots: Tensor  # int32 [T], where each token's KV goes: block * block_size + offset; -1 = nowhere


@dataclass(frozen=True)
class KeyMean:
    """b, the part that a head's keys have in common before RoPE: a large key bias. It is left out of the storage, so
    that codes are spent on the differences. Attention adds its share of a score, which is exact. With a query (x, y) at
    elements i and i + R/2 after RoPE, and a key at position t,

        q . RoPE_t(b) = sum over pairs i of (x b_i + y b_{i+R/2}) cos(t theta_i) + (y b_i - x b_{i+R/2}) sin(t theta_i)
    """

    vector: Tensor  # float32 [num_kv_heads, D], b; 0 outside of `pairs`
    pairs: Tensor  # int32 [num_kv_heads, P]: each i once; a head with fewer pairs fills up with other i, where b = 0
    table: Tensor  # float32 [R/2, 2, positions]: ops.rope_angles of every position, cosines and sines


@dataclass(frozen=True)
class Balance:
    """A matrix A for each KV head. Keys are stored as A k, and queries meet them as A^-T q: scores stay as they are."""

    keys: Tensor  # float32 [num_kv_heads, D, D], A^T
    queries: Tensor  # float32 [num_kv_heads, D, D], A^-1


@dataclass(frozen=True)
class KVTensor:
    """The keys or the values of one layer in blocked storage; `params` is empty unless `dtype` is coded.

    A reader does not see the other fields. Keys without their mean, keys multiplied by the orthonormal Walsh-Hadamard
    matrix of D (`hadamard`: D is a power of two) or by `balance`, and vectors of position 0 without `first` are read as
    plain ones.
    """

    data: Tensor
    params: Tensor
    dtype: KVDtype
    mean: KeyMean | None = None
    hadamard: bool = False
    scales: Tensor | None = None  # float32 [num_kv_heads], of codes: fixed scales instead of one per token
    balance: Balance | None = None  # of keys, in place of `hadamard`
    first: Tensor | None = None  # float32 [num_kv_heads, D], subtracted from the vector of position 0, after RoPE

    @property
    def block_size(self) -> int:
        return self.data.shape[2]

    @property
    def dim(self) -> int:
        """D"""
        return self.dtype.values(self.data.shape[3])


@dataclass(frozen=True)
class Norm:
    """An RMSNorm, or with a bias a LayerNorm. With a residual, the sum x + residual is normalized, and the residual
    becomes that sum."""

    weight: Tensor  # [H]
    eps: float
    residual: Tensor | None = None  # [T, H] in x's dtype or float32, overwritten
    dtype: torch.dtype | None = None  # of the result; None = x's
    bias: Tensor | None = None  # [H]


@op
def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """y = s / sqrt(mean(s^2, -1) + eps) * weight, s = x or x + residual. x and y [..., H], any leading shape.

    With a bias, s is replaced by s - mean(s, -1), and the bias is added to y (LayerNorm, arXiv 1607.06450).
    """


@op
def embedding(table: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    """float32 table[rows] * scale. table [N, H], rows int64 [T] in 0 .. N - 1; result [T, H]."""


@op
def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    """y[t, j] = x[t, order[j]]. x and y [T, K], of one dtype; order int32 [K] in 0 .. K - 1."""


@op
def add_positions(x: Tensor, table: Tensor, positions: Tensor) -> None:
    """x[t] += table[positions[t]], in place. x float32 [T, H], table float32 [P, H], positions int32 [T] below P."""


@op
def keep(x: Tensor, residual: Tensor | None, out: Tensor, scale: float = 1.0) -> None:
    """out = (x + residual) * scale. x, residual float32 [T, H]; out too, rows at any stride. out may be x itself."""


@op
def ungated_activation(x: Tensor, activation: str) -> Tensor:
    """x <- f(x), in place, and x. x [T, I]. relu: max(x, 0); relu2: its square; gelu: x / 2 (1 + erf(x / sqrt(2)))."""


@op
def multiply_gates(x: Tensor, gates: Tensor, activation: str) -> Tensor:
    """x * f(gates), [T, N] both, rows at any stride. f is the sigmoid, of ACTIVATIONS silu or gelu_tanh, or
    gelu_exact: f(x) = x / 2 (1 + erf(x / sqrt(2)))."""


@op
def softcap(x: Tensor, cap: float) -> Tensor:
    """x <- cap * tanh(x / cap), in place. x float32 [R, V]; returns x."""


@op
def known_tokens(token_ids: Tensor, last_token: Tensor) -> None:
    """Replace ids below 0, in place: last_token[-1 - id], or 0 if that is below 0 too (no token could be sampled).
    token_ids int64 [T], last_token int64 [slots]. An id below 0 is a token that the host did not know when it launched
    the step.
    """


@op
def rope_angles(positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """(cos, sin) float32 [T, R/2] of positions int32 [T] times inv_freq float32 [R/2], both times `magnitude`."""


@op
def rope_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor,
    positions: Tensor | None = None,
) -> None:  # fmt: skip
    """Rotate q and k in place, then `kv_append` k and v.

    The first R of D elements rotate in pairs (i, i + R/2) (Llama/NeoX order): with cos and sin float32 [T, R/2],
    x_i' = x_i cos - x_{i+R/2} sin, x_{i+R/2}' = x_{i+R/2} cos + x_i sin. q [T, num_heads, D], k and v [T, num_kv_heads
    or 0, D] may be views into one tensor. A `mean` of the key cache is subtracted from k before that. `positions` as in
    kv_append.
    """


@op
def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """f(gate) * g(up). gate_up [T, 2I] = gate | up; result [T, I] in the same dtype. `activation`: of ACTIVATIONS.

    silu         f(x) = x / (1 + e^-x)
    gelu_tanh    f(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), an approximation of GELU (arXiv 1606.08415)

    g(y) = y for both. Those of gpt-oss are bounded:

    clamped_swish  f(x) = m / (1 + e^(-SWISH m)), m = min(x, CLAMP); g(y) = 1 + max(-CLAMP, min(y, CLAMP))
    """


@op
def kv_append(
    k: Tensor, v: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor, positions: Tensor | None = None
) -> None:
    """Store k and v [T, num_kv_heads, D] (float32/bfloat16) at int32 slots [T]; slots are unique, -1 = skip.

    If the cache has a `mean`, k comes without it. With `hadamard`, each head is stored as k H / sqrt(D), where H is the
    matrix of natural order (Sylvester's), with a `balance` as k @ balance.keys. `first` is subtracted before that from
    tokens whose `positions` (int32 [T], the index in the sequence) is 0. Without `positions` there are none.

    int8 and int4 quantize per token and head over D, asymmetric: minimum = min(x) rounded to float16,
    scale = (max(x) - minimum) / (2^bits - 1) rounded to float16,
    code = clamp(round_half_even((x - minimum) / scale), 0, 2^bits - 1). A constant vector gets scale 0 and code 0, so
    it reads back as its minimum. Codes are chosen against the rounded parameters. Values beyond the float16 range are
    clamped to it.

    fp8: scale = max|x| / 448 rounded to float16, code = e4m3(clamp(x / scale, -448, 448)), halves to even, minimum 0.
    With `scales` (numbers that float16 represents) the scale is the head's, and the minimum of int8 and int4 is
    -2^(bits - 1) * scale: the grid is symmetric, and values beyond it are clamped.
    """


@op
def paged_attention(
    q: Tensor,
    k_cache: KVTensor,
    v_cache: KVTensor,
    geometry: BatchGeometry,
    spec: AttentionSpec,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Causal attention of mixed query lengths over blocked KV; prefill, chunked prefill and decode alike.

    q [T, num_heads, D] float32 or bfloat16. Rows query_start[b] .. query_start[b+1] belong to sequence b. They are its
    last n_b positions, context_lens[b] - n_b .. context_lens[b] - 1. The keys of these positions are already appended;
    `slots` is not read. Query head h reads KV head h // (num_heads / num_kv_heads). Key j is visible to a query at
    position p iff

        j <= p and (window == 0 or j > p - window or j < sinks)

    These are attention sinks (arXiv 2309.17453), except that positions stay absolute: nothing is rotated again when the
    window moves on. Scores are s = q . k * scale, or c * tanh(s / c) of that if softcap c is above 0 (Gemma 2, arXiv
    2408.00118). The result is softmax(s) @ v, [T, num_heads, v_cache.dim] in q's dtype. `sink_logits` [num_heads] are
    the scores of one more key of each head, which every query sees and whose value is 0. With a `mean`, the key of
    position t is the stored key + RoPE_t(b); with a `first`, key and value 0 are the stored ones + `first`. Blocks may
    hold anything, even NaN, at keys that no query sees; the table's entries for them only have to be valid.

    An implementation may multiply keys of 4 bits or less by queries of 8 bits. The CPU and the reference do. Then x =
    q * scale (multiplied by the Hadamard matrix or balance.queries, if the keys are) is replaced by round_half_even(x /
    step) * step, with step = max|x| / L of each row and head and L = min(127, floor(32767 / (2 m ceil(D / 32)))), m the
    largest number of a code, so that sums of products fit int16. The error is some 17 times smaller than that of int4
    keys, whose steps are a 15th of their range. The shares of a `mean` and of a `first` are computed from q itself.
    """


@op
def rope_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: KVTensor,
    v_cache: KVTensor,
    geometry: BatchGeometry,
    spec: AttentionSpec,
    sink_logits: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """`rope_append` of the tokens, then `paged_attention` of their queries. q and k are undefined afterwards."""


@op
def gated_delta(
    y: Tensor, gates: Tensor, weights: DeltaWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    """y and gates float32 [T, ...] -> [T, Hv * Dv]. `rows` int32 [B, 6]: the states of each. See kernels.delta."""


@op
def draw(
    logits: Tensor, rows: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, share: Tensor
) -> Tensor:
    """A token for each of `rows` (int64 [n]) of logits float32 [R, V]. It is the first id, in ascending order, at which
    the sum of the kept weights exceeds `share` of their total.

    A weight is e^((logit - greatest) / temperature), in float64. Three filters keep weights, one after the other. top_k
    keeps the top_k greatest logits (0 = all); of equal logits it keeps the lower ids. top_p keeps the fewest weights
    that reach top_p of their total (1 = all; nucleus sampling, arXiv 1904.09751). min_p keeps the weights of at least
    min_p. top_k is int64 [n], the others are float64 [n]; share is in [0, 1), temperature is above 0. A drawn row has a
    finite greatest logit and no NaN. Result int64 [n]; a row's result does not depend on other rows.
    """


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen from its logits. layers.blocks.moe.MoESpec says what the fields mean."""

    experts_per_token: int
    normalize: bool
    sigmoid: bool
    num_groups: int
    groups_per_token: int
    group_top: int
    scale: float


TINY = 1e-20  # added to a sum of scores: sigmoids may all be 0


@op
def route(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, k], experts int64 [T, k], ascending) from logits float32 [T, E]; bias float32 [E].

    A token's experts are those with the greatest scores, see MoESpec. Of equal ones the lower numbers win.
    """


@dataclass(frozen=True)
class Places:
    """The pairs (token, expert) of T tokens with k experts each, by expert, then by token."""

    tokens: Tensor  # int64 [T * k], the token of each place
    of_token: Tensor  # int64 [T, k], the places of each token, ascending
    active: Tensor  # int64 [1 + 3 * min(H, T * k)]: n; expert, first place, end, of each of the n held ones with tokens

    @property
    def max_active(self) -> int:
        return len(self.active) // 3


@op
def expert_places(experts: Tensor, num_experts: int, held: range) -> Places:
    """The places of experts int64 [T, k]. `active` has the H `held` ones, numbered from their first."""


@op
def sum_places(y: Tensor, weights: Tensor, places: Places, out: Tensor) -> None:
    """out [T, N] = the sum over a token's places p, ascending, of weight * y[p]. y float32 [T * k, N]."""


@op
def add_rows(out: Tensor, tokens: Tensor, y: Tensor, factors: Tensor) -> None:
    """out[tokens[i]] += factors[i] * y[i], in place. out float32 [T, N], y [R, N], tokens int64 [R], each once, factors
    float32 [R]. Added place by place, the bits are those of `sum_places`."""


@op
def add_shared(out: Tensor, y: Tensor, logits: Tensor | None) -> None:
    """out += y * sigmoid(logits), in place; with no logits, out += y. out and y float32 [T, N], logits [T, 1]."""


# Every linear: `pack(weight, activation=None)`; x [T, K] -> [T, N] in x's dtype, accumulated in float32.
# With a norm, x is replaced by rms_norm(x, norm) first. With an activation the weight is gated: its rows are gate | up,
# N = 2I, and the result [T, I] is that of gated_activation. A bias stays [N]. A layer that selects a kernel for a gated
# weight passes the trait `activation`.
# Implementations with `epilogue` (registry.Implementation) also take one of two keywords. `dtype` is the result's
# dtype. `residual`, float32 [T, N], is returned after the result was added to it in place, unrounded.


@op
def linear_dense(x: Tensor, packed: Any, bias: Tensor | None, norm: Norm | None = None) -> Tensor:
    """x @ W^T + bias. `pack(weight [N, K])`.

    Activations are exact here and in linear_w4a16, linear_w8a16 and linear_fp8. On tile registers they keep 16 bits, an
    error of 2^-17 at most; float32 and float16 weights are not multiplied there.
    """


@op
def linear_heads(x: Tensor, packed: Any) -> Tensor:
    """y[t, h] = W_h x[t, h]: x [T, heads, K] -> [T, heads, N] in x's dtype. `pack(W [heads, N, K])` of x's dtype."""


@op
def linear_w4a16(x: Tensor, packed: Any, bias: Tensor | None, norm: Norm | None = None) -> Tensor:
    """x @ dequantize(W)^T + bias, activations exact. `pack(QTensor bits=4)`."""


@op
def linear_w4a8(x: Tensor, packed: Any, bias: Tensor | None, norm: Norm | None = None) -> Tensor:
    """As linear_w4a16, with int8 activations. Per token and per weight group g of K,
    sx = max|x_g| / 127 (0 -> the group contributes 0), xq = round_half_even(x_g / sx),
    y += sw * sx * (sum(code * xq) - zero * sum(xq)). Group sizes: multiples of 32, and -1.
    """


@op
def linear_w8a8(x: Tensor, packed: Any, bias: Tensor | None, norm: Norm | None = None) -> Tensor:
    """As linear_w4a8 with 8-bit codes (zero = 128 if symmetric per output channel). `pack(QTensor bits=8)`."""


@op
def linear_w8a16(x: Tensor, packed: Any, bias: Tensor | None, norm: Norm | None = None) -> Tensor:
    """As linear_w4a16 with 8-bit codes. `pack(QTensor bits=8, kind="int")`."""


@op
def linear_fp8(x: Tensor, packed: Any, bias: Tensor | None, norm: Norm | None = None) -> Tensor:
    """x @ dequantize(W)^T + bias, activations exact. `pack(QTensor kind="float")`."""


@op
def linear_fp8_a8(x: Tensor, packed: Any, bias: Tensor | None, norm: Norm | None = None) -> Tensor:
    """As linear_fp8, with e4m3 activations. Per token and per weight group g of K, sx = max|x_g| / 448 (0 -> the group
    contributes 0), and x_g is replaced by sx * e4m3(clamp(x_g / sx, -448, 448)), halves to even.
    """
