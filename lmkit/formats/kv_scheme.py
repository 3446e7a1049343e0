"""`kv_cache_scheme` of compressed-tensors: an 8-bit KV cache with scales in the checkpoint.

Beside the weights of an attention block there are `k_scale` and `v_scale`: one number each, or one for each KV head. x
~ code * scale, with int8 or float8 e4m3 codes. vLLM, llm-compressor and SGLang read and write it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lmkit.config import StrictStruct
from lmkit.errors import CheckpointError
from lmkit.kv_dtype import FP8, INT8, KVDtype

# Fields of a quantization scheme that do not concern a cache, and the values for which that is true.
_MEANINGLESS = ("group_size", "block_structure", "actorder", "scale_dtype", "zp_dtype")
_HOW_IT_WAS_MADE = ("observer", "observer_kwargs")


class KVScheme(StrictStruct, frozen=True, kw_only=True):
    """The 8-bit type and the granularity of the scales. `dynamic`: there are none, and each token has its own."""

    num_bits: Literal[8] = 8
    type: Literal["int", "float"]
    strategy: Literal["tensor", "attn_head"] = "tensor"
    dynamic: bool = False
    symmetric: Literal[True] = True

    @property
    def dtype(self) -> KVDtype:
        return INT8 if self.type == "int" else FP8

    def entry(self) -> dict[str, Any]:
        """The scheme as an entry of the quantization_config."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


def parse_kv_scheme(config: dict[str, Any]) -> KVScheme | None:
    """The scheme in a config.json; None if there is none. Raises CheckpointError if it cannot be used."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    data = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    if data is None:
        return None
    where = "config.json: kv_cache_scheme"
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: expected an object, not {data!r}")
    for name in _MEANINGLESS:
        if data.get(name) is not None:
            raise CheckpointError(f"{where}: {name} = {data[name]!r} has no meaning for a KV cache of lmkit's")
    kept = {name: value for name, value in data.items() if name not in (*_MEANINGLESS, *_HOW_IT_WAS_MADE)}
    try:
        return msgspec.convert(kept, KVScheme)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{where}: {error}") from None
