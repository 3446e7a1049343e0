"""kv_config.json: the storage of a checkpoint's KV cache layer by layer, and the statistics of calibration.

The engine computes the cache's scales for each token and head while serving. The file has the types of the codes, and
the transforms of keys before rounding. The statistics explain the choices. docs/formats.md describes every field.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta

from lmkit.config import PositiveInt, StrictStruct
from lmkit.errors import CheckpointError
from lmkit.formats.atomic import write_file
from lmkit.jsonfile import read_json, to_json
from lmkit.kv_dtype import KV_DTYPES, CodedName, KVDtype

FILE_NAME = "kv_config.json"
FORMAT, VERSIONS = "lmkit-kv-config", (2, 3)  # 3 has `balance`, `first_key`, `first_value` and `values_turned`
MAX_BYTES = 512 << 20  # most of it matrices

Storage = Literal["dense"] | CodedName
Statistic = Annotated[float, Meta(ge=0, le=1e38)]
LARGEST_CONDITION = 1e6  # of a balance: its inverse keeps most digits of float64
Number = Annotated[float, Meta(ge=-1e30, le=1e30)]
# (i, b_i, b_{i + R/2}) of a RoPE pair: the elements i and i + R/2 of a key rotate together; R elements rotate in all.
PairMean = tuple[Annotated[int, Meta(ge=0)], Number, Number]


class Numbers(StrictStruct, frozen=True):
    """An array of float16: little-endian bytes, the last dimension innermost. In the file they are base64."""

    shape: tuple[PositiveInt, ...]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != 2 * math.prod(self.shape):
            raise ValueError(f"{len(self.data)} bytes for shape {list(self.shape)} in float16")
        if not np.isfinite(self.array()).all():
            raise ValueError("a number is not finite")

    def __repr__(self) -> str:
        return f"Numbers({list(self.shape)}, sha256 {hashlib.sha256(self.data).hexdigest()})"

    @classmethod
    def of(cls, x: np.ndarray) -> Numbers:
        """Round x to float16. Numbers beyond its range become its largest."""
        largest = np.finfo(np.float16).max
        return cls(x.shape, np.clip(x, -largest, largest).astype("<f2").tobytes())

    def array(self) -> np.ndarray:
        """The numbers as float32."""
        return np.frombuffer(self.data, "<f2").reshape(self.shape).astype(np.float32)

    def heads(self, heads: slice) -> Numbers:
        """A part of the first dimension."""
        return Numbers.of(self.array()[heads])


class KVLayerConfig(StrictStruct, frozen=True, kw_only=True):
    """One layer. A list by KV head has one item for each head, or none."""

    k: Storage  # "dense": in the type of the dense weights
    v: Storage
    smoothing: Annotated[float, Meta(ge=0, le=1)] | None = None  # for information; it is in the weights
    key_mean: tuple[tuple[PairMean, ...], ...] = ()  # by head: subtracted before RoPE, attention adds its part
    hadamard: bool = False  # keys are stored rotated by the Walsh-Hadamard matrix of head_dim
    balance: Numbers | None = None  # by head, A [head_dim, head_dim]: keys are stored as A k, queries become A^-T q
    first_key: Numbers | None = None  # by head: subtracted from the key of position 0, attention adds its part
    first_value: Numbers | None = None  # the same of the value
    values_turned: bool = False  # for information: v_proj and o_proj are rotated in each head
    k_absmax: tuple[Statistic, ...] = ()  # largest |key| after RoPE, before anything is subtracted
    v_absmax: tuple[Statistic, ...] = ()  # largest |value|
    k_mean_ratio: tuple[Statistic, ...] = ()  # max over the head's channels of |mean| / std over tokens, before RoPE

    def problem(self, num_kv_heads: int, head_dim: int) -> str | None:
        """The reason why this cannot be a layer of such a model, or None."""
        for dtype in (KV_DTYPES[name] for name in (self.k, self.v) if name in KV_DTYPES):
            if head_dim % dtype.unit:
                return f"{dtype.needs_of_rows}, not {head_dim}"
        if self.hadamard and head_dim & (head_dim - 1):
            return f"hadamard needs a head_dim that is a power of two, not {head_dim}"
        if self.hadamard and self.balance is not None:
            return "hadamard and balance exclude each other"
        of_head = num_kv_heads, head_dim
        sizes: dict[str, tuple[int, ...]] = {
            "balance": (*of_head, head_dim),
            "first_key": of_head,
            "first_value": of_head,
        }
        for name, shape in sizes.items():
            numbers: Numbers | None = getattr(self, name)
            if numbers is not None and numbers.shape != shape:
                return f"{name} is {list(numbers.shape)}, expected {list(shape)}"
        if self.balance is not None and not all(c < LARGEST_CONDITION for c in np.linalg.cond(self.balance.array())):
            return "balance: a matrix has no inverse"
        for name in ("k_absmax", "v_absmax", "k_mean_ratio", "key_mean"):
            count = len(getattr(self, name))
            if count not in (0, num_kv_heads):
                return f"{name} has {count} items for {num_kv_heads} KV heads"
        for pairs in self.key_mean:
            places = [pair for pair, _, _ in pairs]
            if len(set(places)) < len(places) or max(places, default=0) >= head_dim // 2:
                return f"key_mean: pairs {places} are not {head_dim // 2} different ones at most, counted from 0"
        return None


class KVConfig(StrictStruct, frozen=True, kw_only=True):
    """The whole file."""

    format: Literal["lmkit-kv-config"] = "lmkit-kv-config"
    version: Literal[2, 3] = 3
    granularity: Literal["per_token_per_head"] = "per_token_per_head"
    symmetric: bool = False
    params_dtype: Literal["float16"] = "float16"
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    layers: tuple[KVLayerConfig, ...]

    def __post_init__(self) -> None:
        if self.symmetric:
            raise ValueError("`symmetric` true is not defined in this version; the cache is asymmetric")
        for index, layer in enumerate(self.layers):
            if problem := layer.problem(self.num_kv_heads, self.head_dim):
                raise ValueError(f"layer {index}: {problem}")

    def check(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise CheckpointError unless this file fits a model with these numbers."""
        described = {"layers": len(self.layers), "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        model = {"layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, count in described.items():
            if count != model[name]:
                raise CheckpointError(
                    f"{FILE_NAME}: made for {count} {name}, the model has {model[name]}; "
                    "remove the file or quantize the model again"
                )

    def dtypes(self, layer: int, dense: KVDtype) -> tuple[KVDtype, KVDtype]:
        """Storage types of a layer's (K, V); dense ones are `dense`."""
        stored = self.layers[layer]
        return KV_DTYPES.get(stored.k, dense), KV_DTYPES.get(stored.v, dense)


def storage_name(dtype: KVDtype | None) -> Storage:
    """The name of a coded type in the file; None = dense."""
    return cast(Storage, "dense" if dtype is None else dtype.name)


def load_kv_config(folder: str | Path) -> KVConfig | None:
    """The checkpoint's kv_config.json; None if there is none. Raises CheckpointError if it cannot be used."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        if path.exists():
            raise CheckpointError(f"{path}: not a regular file")
        return None
    data = read_json(path, MAX_BYTES)
    if data.get("format") != FORMAT:
        raise CheckpointError(f"{path}: `format` is {data.get('format')!r}, expected {FORMAT!r}")
    version = data.get("version")
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise CheckpointError(f"{path}: version {version!r}, and this lmkit reads versions {known}")
    missing = [name for name in KVConfig.__struct_fields__ if name not in data]
    if missing:
        raise CheckpointError(f"{path}: {', '.join(missing)} missing")
    try:
        return msgspec.convert(data, KVConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from None


def save_kv_config(config: KVConfig, folder: str | Path) -> None:
    """Write kv_config.json into an existing folder."""
    write_file(Path(folder) / FILE_NAME, to_json(msgspec.to_builtins(config)))
