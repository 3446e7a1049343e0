"""A GGUF file as an open checkpoint: config.json made of its metadata, tensors by the names of the model.

Linears in all types but TQ1_0 and TQ2_0 are QTensors without loss, of the file's bits. Other quantized tensors are
floats, with the bits that llama.cpp decodes them to. `models.gguf_names` tells which parts of the file are the model's
tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmkit.codes import Integers, Shifted
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.dense import read_dense
from lmkit.formats.gguf_blocks import CHUNK, CODED, IQ4, values
from lmkit.formats.gguf_config import make_config
from lmkit.formats.gguf_file import Storage
from lmkit.formats.gguf_grids import SUPER, levels
from lmkit.formats.gguf_model import FLOATS, GgufModel
from lmkit.formats.mxfp4 import MXFP4
from lmkit.formats.read_only import ReadOnlyFormat
from lmkit.formats.safetensors_file import NAMES, TensorInfo
from lmkit.qtensor import QTensor, QuantScheme, int_scheme
from lmkit.scales import SuperGroups

METHOD = "gguf"  # quant_method
GROUP = 32
SMALL, LARGE = SuperGroups(16), SuperGroups(8)  # of 16 and of 32 inputs: 256 together


def _levels(steps: Iterable[int]) -> Integers:
    """Codes of at most 16 steps."""
    return Integers(8, symmetric=True, values=tuple(step + 128 for step in steps))


LEVELS = _levels(IQ4)
OWN = {
    "Q4_0": int_scheme(4, GROUP),
    "Q8_0": int_scheme(8, GROUP, symmetric=True),
    "MXFP4": MXFP4.plain,
    "Q4_1": QuantScheme(Shifted(4), GROUP),
    "Q5_0": int_scheme(5, GROUP, symmetric=True),
    "Q5_1": QuantScheme(Shifted(5), GROUP),
    "Q2_K": QuantScheme(Shifted(2), 16, scales=SMALL),
    "Q3_K": QuantScheme(Integers(3, symmetric=True), 16, scales=SMALL),
    "Q4_K": QuantScheme(Shifted(4), GROUP, scales=LARGE),
    "Q5_K": QuantScheme(Shifted(5), GROUP, scales=LARGE),
    "Q6_K": QuantScheme(Integers(6, symmetric=True), 16, scales=SMALL),
    "IQ4_NL": QuantScheme(LEVELS, GROUP),
    "IQ4_XS": QuantScheme(LEVELS, GROUP, scales=LARGE),
    **{name: QuantScheme(_levels(levels(name)), 256 // kind.groups, scales=kind) for name, kind in SUPER.items()},
}  # the file's own grids
GRIDS = {name: OWN[name] for name in ("Q4_0", "Q8_0", "MXFP4")} | dict.fromkeys(
    ("Q5_0", "IQ4_NL", "IQ4_XS"), int_scheme(8, GROUP, symmetric=True)
)  # those that other formats hold, too


class Piece(NamedTuple):
    """A tensor of the model in the file."""

    sources: tuple[str, ...]  # names of the file's tensors
    shape: tuple[int, ...]
    rows: Callable[[Tensor], Tensor] | None = None  # takes some, or reorders them; works on their bytes, too
    make: Callable[..., Tensor] | None = None  # of the sources' floats, in place of `rows`
    kept: bool = False  # a linear, which stays quantized if it can
    offset: float = 0.0  # the file has the tensor plus this number
    order: Tensor | None = None  # int32 [in]: the column of the file that belongs to each input


class GgufReader(CheckpointReader):
    """An open GGUF model. See CheckpointReader; `path` is the model's first file.

    It has no tensors before `show_pieces` tells them. With `floats` nothing is quantized: what is in the file becomes
    floats of config.json's dtype. Raises CheckpointError, and UnsupportedError for unknown types or architectures.
    """

    def __init__(self, path: str | Path, *, floats: bool = False) -> None:
        self.file = GgufModel(Path(path))
        self.path, self.is_base = self.file.path, False
        self.config: dict[str, Any] = make_config(self.file)
        self._floats, self._narrow, self._pieces = floats, floats, dict[str, Piece]()
        self._grids: Mapping[str, QuantScheme] = {} if floats else OWN
        matrices = {info.storage.name for info in self.file.tensors.values() if len(info.shape) > 1}
        if matrices & self._grids.keys():
            self.config["quantization_config"] = {"quant_method": METHOD}

    def show_pieces(self, pieces: Mapping[str, Piece]) -> None:
        """Show these tensors of the model."""
        self._pieces |= pieces

    def narrow(self) -> None:
        self._narrow = True

    def move(self) -> None:
        """Show what no other format holds as floats, and what it holds in another form in that form."""
        self._grids = {} if self._floats else GRIDS

    def names(self) -> list[str]:
        return sorted(self._pieces)

    def has(self, name: str) -> bool:
        return name in self._pieces

    def info(self, name: str) -> TensorInfo:
        """`dtype` U8: a quantized linear. `nbytes` are those of the file."""
        piece = self._piece(name)
        kinds = [self.file.tensors[source] for source in piece.sources]
        whole = sum(prod(info.shape) for info in kinds)
        nbytes = sum(info.nbytes for info in kinds) * prod(piece.shape) // max(whole, 1)
        if self.scheme(name) is not None and name != EMBED:
            return TensorInfo("U8", piece.shape, nbytes, 0)
        return TensorInfo(NAMES[self._dtype(piece)], piece.shape, nbytes, 0)

    def storage(self, name: str) -> str | None:
        """The type of a quantized linear in the file; None for other tensors."""
        piece = self._piece(name)
        kind = self.file.tensors[piece.sources[0]].storage.name
        return kind if piece.kept and name != EMBED and kind not in FLOATS else None

    def scheme(self, name: str) -> QuantScheme | None:
        """The scheme of a linear that stays quantized; None if `tensor` has it in floats."""
        piece = self._piece(name)
        if not piece.kept or piece.make is not None or len(piece.shape) != 2:
            return None
        storage = self.file.tensors[piece.sources[0]].storage
        found = self._grids.get(storage.name)
        apart = found and piece.order is not None and _blocks(piece.order, storage.block) is None
        return replace(found, act_order=True) if found and apart else found

    def tensor(self, name: str) -> Tensor:
        """A tensor as floats, those of a quantized one float32 with llama.cpp's bits, unless all are to be floats."""
        piece = self._piece(name)
        if piece.make is not None:
            tensor = piece.make(*(self._floats_of(source, None) for source in piece.sources)).reshape(piece.shape)
        else:
            tensor = self._floats_of(piece.sources[0], piece.rows, piece.order).reshape(piece.shape)
        tensor = tensor.float() - piece.offset if piece.offset else tensor
        tensor = tensor.to(self._dtype(piece))
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{self._where(name)}: holds numbers that are not finite")
        return tensor

    def quantized(self, name: str) -> QTensor:
        """The codes of a linear that has a `scheme`."""
        piece, scheme = self._piece(name), self.scheme(name)
        assert scheme is not None
        storage, raw = self._raw(piece.sources[0], piece.rows, piece.order)
        found = _quantized(storage, replace(scheme, act_order=False), raw, piece.shape, self._where(name))
        if piece.order is None or not scheme.act_order:
            return found
        return replace(found, scheme=scheme, order=piece.order.argsort().int())

    def nbytes(self, prefix: str = "") -> int:
        """Bytes in the file of all tensors whose names begin with `prefix`."""
        return sum(self.info(name).nbytes for name in self.names() if name.startswith(prefix))

    def content_digest(self) -> str:
        return self.file.content_digest()

    def release(self) -> None:
        self.file.release()

    def close(self) -> None:
        """Release the file. It is unmapped together with the last of its tensors."""
        self._pieces = {}

    def _piece(self, name: str) -> Piece:
        if name not in self._pieces:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return self._pieces[name]

    def _where(self, name: str) -> str:
        return f"{self.path}: {' and '.join(self._piece(name).sources)}"

    def _dtype(self, piece: Piece) -> torch.dtype:
        """Of `tensor`. A tensor that is made of others has no type in the file."""
        storage = self.file.tensors[piece.sources[0]].storage.name
        if storage in FLOATS and piece.make is None and not piece.offset:
            dtype: torch.dtype = getattr(torch, FLOATS[storage])
            return dtype
        is_matrix = storage not in FLOATS
        return getattr(torch, self.config["dtype"]) if self._narrow and is_matrix else torch.float32

    def _raw(
        self, source: str, rows: Callable[[Tensor], Tensor] | None, order: Tensor | None = None
    ) -> tuple[Storage, Tensor]:
        """The bytes of some rows, uint8. Of a vector of floats each number is a row. Columns stand in `order` where
        whole blocks are moved."""
        info = self.file.tensors[source]
        raw = torch.frombuffer(self.file.raw(source), dtype=torch.uint8)
        lead = info.shape if info.storage.block == 1 else info.shape[:-1]
        raw = raw.reshape(*lead, -1)
        raw = raw if rows is None else rows(raw)
        if order is not None and (moved := _blocks(order, info.storage.block)) is not None:
            raw = raw.reshape(len(raw), len(moved), -1)[:, moved].reshape(raw.shape)
        return info.storage, raw.contiguous()

    def _floats_of(self, source: str, rows: Callable[[Tensor], Tensor] | None, order: Tensor | None = None) -> Tensor:
        storage, raw = self._raw(source, rows, order)
        if storage.name in FLOATS:
            return raw.view(getattr(torch, FLOATS[storage.name])).squeeze(-1)
        decoded = values(storage.name, raw.flatten(), storage.nbytes).reshape(*raw.shape[:-1], -1)
        return decoded if order is None or _blocks(order, storage.block) is not None else decoded[:, order]


def convert_gguf(model: str | Path, output: str | Path, format_name: str | None = None, **options: Any) -> Any:
    """See models.gguf_convert. It knows the names of a model's tensors, so it stands on a higher floor."""
    return importlib.import_module("lmkit.models.gguf_convert").convert_gguf(model, output, format_name, **options)


EMBED = "model.embed_tokens.weight"  # read as floats by rows, and as codes by a head that is tied to it


class GgufFormat(ReadOnlyFormat):
    name = METHOD

    def accepts(self, config: dict[str, Any]) -> str | None:
        return None

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        """A linear's weight [out, in], quantized if it has a scheme."""
        if not isinstance(reader, GgufReader):
            raise UnsupportedError(f"{reader.path}: quant_method {METHOD} is for .gguf files; this is a folder")
        name = module + ".weight"
        return reader.quantized(name) if reader.has(name) and reader.scheme(name) else read_dense(reader, module)


def _quantized(storage: Storage, scheme: QuantScheme, raw: Tensor, shape: tuple[int, ...], where: str) -> QTensor:
    """Blocks -> codes uint8 [out, in], and scales, zeros or offsets, and factors as the scheme has them. Some rows at a
    time: the codes of a whole head take many times its memory."""
    some = raw.view(shape[0], -1).split(max(1, CHUNK * GROUP // shape[1]))
    of_rows = _own_rows if scheme.in_planes else _rows_on_grid
    parts = [of_rows(storage, scheme, part, where) for part in some]
    codes, scales, zeros, factor = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
    return QTensor(codes, scales, zeros, scheme, factor=factor if factor.numel() else None)


def _blocks(order: Tensor, size: int) -> Tensor | None:
    """The order of whole blocks of `size` columns; None if columns leave their blocks."""
    if len(order) % size:
        return None
    starts = order.view(-1, size)[:, 0]
    whole = (starts[:, None] + torch.arange(size)).flatten()
    return starts // size if not bool((starts % size).any()) and bool((whole == order).all()) else None


Rows = tuple[Tensor, Tensor, Tensor, Tensor]  # codes, scales, zeros and factors of some rows; factors may be empty


def _own_rows(storage: Storage, scheme: QuantScheme, raw: Tensor, where: str) -> Rows:
    coded, rows = CODED[storage.name](raw.view(-1, storage.nbytes)), len(raw)
    middle = int(scheme.codes.zeros((1,))[0])  # of codes with offsets: 0
    codes = (coded.codes.view(torch.uint8) + middle).reshape(rows, -1)  # modulo 256
    if not all(
        bool(part.isfinite().all()) for part in (coded.scales, coded.offsets, coded.factors) if part is not None
    ):
        raise CheckpointError(f"{where}: holds scales that are not finite")
    if coded.factors is None:
        scales, factor = coded.scales.reshape(rows, -1).half(), torch.empty(rows, 0)
        offsets = None if coded.offsets is None else coded.offsets.half()
    else:
        scales, offsets = coded.scales.reshape(rows, -1), coded.offsets
        factor = (coded.factors * 2.0**scheme.scales.shift).half().reshape(rows, -1, coded.factors.shape[1])
    zeros = scheme.codes.zeros(tuple(scales.shape)) if offsets is None else offsets.reshape(rows, -1)
    return codes, scales.contiguous(), zeros.contiguous(), factor


def _rows_on_grid(storage: Storage, scheme: QuantScheme, raw: Tensor, where: str) -> Rows:
    """Scales become positive: float16, those of IQ4_XS and MXFP4 float32."""
    coded, rows = CODED[storage.name](raw.view(-1, storage.nbytes)), len(raw)
    codes, scales = coded.codes.reshape(rows, -1, GROUP), coded.numbers()[0].reshape(rows, -1)
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"{where}: holds scales that are not finite")
    negative = scales.signbit()
    if storage.name == "Q8_0" and bool(negative.any()):  # -128 has no opposite
        raise CheckpointError(f"{where}: holds negative scales")
    zeros = torch.full(scales.shape, 1 << (scheme.bits - 1), dtype=torch.uint8)
    if storage.name == "Q4_0":
        # c d = (~c - (-1)) (-d): half of Q4_0's scales are negative and become positive, with a zero of 7.
        codes, zeros = codes ^ -negative[..., None].to(torch.int8), zeros - negative.to(torch.uint8)
    else:
        codes = codes * (1 - 2 * negative[..., None].to(torch.int8))
    codes = (codes.view(torch.uint8) + (1 << (scheme.bits - 1))).flatten(1)  # modulo 256
    scales = scales.abs() if storage.name in ("IQ4_XS", "MXFP4") else scales.abs().half()
    return codes, scales, zeros, torch.empty(rows, 0)
