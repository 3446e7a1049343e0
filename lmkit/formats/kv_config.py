"""kv_config.json: how a checkpoint's KV cache is stored, layer by layer, and what calibration saw of it.

Scales of the cache are computed per token and head while serving; nothing here is needed to decode it but the bits.
The statistics say why the bits were chosen. docs/formats.md describes every field.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lmkit.config import PositiveInt, StrictStruct
from lmkit.errors import CheckpointError
from lmkit.formats.atomic import write_file
from lmkit.formats.jsonfile import read_json, to_json

FILE_NAME = "kv_config.json"
FORMAT, VERSION = "lmkit-kv-config", 1
MAX_BYTES = 10 << 20

# Above this |mean| / std, a channel's offset takes most of a token's 16 levels and INT4 keys lose the rest.
INT4_MEAN_RATIO = 8.0

KVBits = Literal[16, 8, 4]
Statistic = Annotated[float, Meta(ge=0, le=1e38)]


class KVLayerConfig(StrictStruct, frozen=True, kw_only=True):
    """One layer. Statistics hold one number per KV head, or nothing if they were not measured."""

    k_bits: KVBits
    v_bits: KVBits
    k_absmax: tuple[Statistic, ...] = ()  # largest |key| after RoPE, as it enters the cache
    v_absmax: tuple[Statistic, ...] = ()  # largest |value|
    k_mean_ratio: tuple[Statistic, ...] = ()  # max over the head's channels of |mean| / std over tokens of the keys

    @property
    def risky_int4_keys(self) -> bool:
        """Whether some key channel is mostly a constant offset, which 4 bits per token and head cannot afford."""
        return max(self.k_mean_ratio, default=0.0) > INT4_MEAN_RATIO


class KVConfig(StrictStruct, frozen=True, kw_only=True):
    """The whole file."""

    format: Literal["lmkit-kv-config"] = "lmkit-kv-config"
    version: Literal[1] = 1
    granularity: Literal["per_token_per_head"] = "per_token_per_head"
    symmetric: bool = False
    params_dtype: Literal["float16"] = "float16"
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    layers: tuple[KVLayerConfig, ...]

    def __post_init__(self) -> None:
        if self.symmetric:
            raise ValueError("`symmetric` true is not defined in version 1; the cache is asymmetric")
        for index, layer in enumerate(self.layers):
            if self.head_dim % 2 and 4 in (layer.k_bits, layer.v_bits):
                raise ValueError(f"layer {index}: 4 bits need an even head_dim, not {self.head_dim}")
            for name in ("k_absmax", "v_absmax", "k_mean_ratio"):
                count = len(getattr(layer, name))
                if count not in (0, self.num_kv_heads):
                    raise ValueError(f"layer {index}: {name} has {count} numbers for {self.num_kv_heads} KV heads")

    def check(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise CheckpointError unless this file describes a model of these numbers."""
        described = {"layers": len(self.layers), "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        model = {"layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, count in described.items():
            if count != model[name]:
                raise CheckpointError(
                    f"{FILE_NAME}: made for {count} {name}, the model has {model[name]}; "
                    "remove the file or quantize the model again"
                )

    def dtypes(self, layer: int, dense_dtype: str) -> tuple[str, str]:
        """Storage types of a layer's (K, V), keys of kernels.ops.KV_BITS; 16 bits are `dense_dtype`."""
        storage = {16: dense_dtype, 8: "int8", 4: "int4"}
        return storage[self.layers[layer].k_bits], storage[self.layers[layer].v_bits]


def load_kv_config(folder: str | Path) -> KVConfig | None:
    """The checkpoint's kv_config.json; None if there is none. Raises CheckpointError if it cannot be honoured."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        if path.exists():
            raise CheckpointError(f"{path}: not a regular file")
        return None
    data = read_json(path, MAX_BYTES)
    if data.get("format") != FORMAT:
        raise CheckpointError(f"{path}: `format` is {data.get('format')!r}, expected {FORMAT!r}")
    if data.get("version") != VERSION or isinstance(data.get("version"), bool):
        raise CheckpointError(
            f"{path}: version {data.get('version')!r}, and this lmkit reads version {VERSION}; upgrade lmkit"
        )
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
