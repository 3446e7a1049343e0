"""Which tasks of attention read a storage, and the form of the queries that they take, by instruction set and shape."""

from __future__ import annotations

from lmkit.kernels.cpu import attention_stages
from lmkit.kernels.cpu.amx import attention_stages as amx_stages
from lmkit.kernels.cpu.attention_arguments import BYTES, FLOAT_PLANES, FLOATS, WORD_PLANES, WORDS, Storage
from lmkit.kernels.cpu.attention_panels import fits
from lmkit.kernels.cpu.attention_tiles import LARGEST_WORD, key_chunk
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task, float_bits
from lmkit.kernels.ops import KVTensor
from lmkit.kernels.reference.attention import small_query_limit
from lmkit.kv_dtype import FLOAT16_BYTES, INT4, KVDtype

DIRECT_ROWS = 8  # more rows than this share a copy
# Rows of a tile, at least and at most, and of a strip: without strips, with strips, and on tile registers
PLAIN, STRIPS, ON_TILES = (48, 48, 48), (48, 384, 24), (128, 512, 32)


def storage(isa: Isa, cache: KVTensor, dim: int, *, keys: bool) -> Storage:
    assert cache.data.is_contiguous()
    assert cache.params.is_contiguous()
    few, many = (_task(isa, cache.dtype, dim, few=few, keys=keys) for few in (True, False))
    row_bytes = cache.data.shape[3] * cache.data.element_size()
    params = cache.params.data_ptr() if cache.dtype.coded else 0
    param_bytes = FLOAT16_BYTES * cache.dtype.num_params(dim)
    lowest = float_bits(-cache.dtype.largest / 2) if cache.dtype.levels else 0
    direct = int(_reads_directly(isa, cache.dtype, dim, keys=keys))
    data = cache.data.data_ptr()
    return Storage(many.address, few.address, data, params, param_bytes, lowest, row_bytes, direct)


def _task(isa: Isa, kind: KVDtype, dim: int, *, few: bool, keys: bool) -> Task:
    if _takes_tiles(isa, kind, dim, few=few, keys=keys):
        return amx_stages.score_task(isa, kind) if keys else amx_stages.value_task(isa, kind)
    if not keys:
        return attention_stages.value_task(isa, kind)
    if few or not has_panels(isa, kind, dim):
        return attention_stages.score_task(isa, kind)
    stages = attention_stages
    return stages.code_score_task(isa, kind) if kind.has_minimum else stages.float_score_task(isa, kind)


def has_panels(isa: Isa, kind: KVDtype, dim: int) -> bool:
    """Whether many rows read keys from panels, which stay for strips of rows. ARM multiplies with lanes of a query."""
    return fits(kind, dim) if kind.has_minimum or on_tiles(isa, kind, dim) else not isa.neon


def tile_rows(isa: Isa, keys: KVDtype, values: KVDtype, dim: int) -> tuple[int, int, int]:
    """(at least, at most, of a strip): how many rows a tile has. All rows are one strip if the first two are equal."""
    if on_tiles(isa, keys, dim) and on_tiles(isa, values, dim):
        return ON_TILES
    return STRIPS if has_panels(isa, keys, dim) else PLAIN


def scratch_bytes(isa: Isa, padded: int) -> int:
    """Bytes of the scratch of each stage."""
    copies = attention_stages.scratch_bytes(padded)
    return max(copies, amx_stages.scratch_bytes(padded)) if isa.tiles else copies


def query_limit(kind: KVDtype, dim: int) -> int:
    """The largest word of a query for keys of a kind, such that sums of products with codes fit int32. 0: floats."""
    if kind.has_short_codes:
        return small_query_limit(dim, kind)
    return min(LARGEST_WORD, (2**31 - 1) // (255 * dim)) if kind.has_minimum else 0


def query_form(isa: Isa, kind: KVDtype, dim: int, *, few: bool) -> int:
    tiles = _takes_tiles(isa, kind, dim, few=few, keys=True)
    if not kind.has_minimum:
        return FLOAT_PLANES if tiles else FLOATS
    if kind.has_short_codes and (tiles or (few and _reads_directly(isa, kind, dim, keys=True))):
        return BYTES
    return WORD_PLANES if tiles else WORDS


def on_tiles(isa: Isa, kind: KVDtype, dim: int) -> bool:
    """Whether many rows are multiplied on tile registers."""
    return isa.tiles and fits(kind, dim)


def _takes_tiles(isa: Isa, kind: KVDtype, dim: int, *, few: bool, keys: bool) -> bool:
    """The same of few or many rows. Few rows read codes directly, with the same sums."""
    return on_tiles(isa, kind, dim) and not (few and kind.has_minimum and _reads_directly(isa, kind, dim, keys=keys))


def _reads_directly(isa: Isa, kind: KVDtype, dim: int, *, keys: bool) -> bool:
    """Whether rows of the storage are whole vectors, so that a few rows need no copy of it."""
    width = 4 * isa.lanes if kind == INT4 else isa.value_tile
    return dim % max(width, key_chunk(isa, kind) if keys else 0) == 0
