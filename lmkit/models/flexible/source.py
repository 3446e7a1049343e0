"""A checkpoint whose architecture is no family of lmkit's, opened: transformers' module of it computes the layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import WeightFormat, resolve_format
from lmkit.formats.gguf import GgufReader
from lmkit.formats.parts import FLOATS
from lmkit.formats.safetensors_file import DTYPES
from lmkit.log import get_logger
from lmkit.models.flexible.calibrated import Calibrated, ForeignHead, named_as_stored
from lmkit.models.flexible.checks import checked
from lmkit.models.flexible.decoder import FlexibleDecoder
from lmkit.models.flexible.experts import pairs_of_experts
from lmkit.models.flexible.fused import Gated, find_gated, fuse_gates, fuse_norms, pack_tied
from lmkit.models.flexible.image_checks import tower_of
from lmkit.models.flexible.layer import OBSERVED, ForeignLayer
from lmkit.models.flexible.linears import Uses, all_sites, linear_source
from lmkit.models.flexible.module import load_module, outline, read_config, reads_images
from lmkit.models.flexible.names import WEIGHT, Names
from lmkit.models.flexible.spec import spec_of
from lmkit.models.flexible.tower import ForeignTower
from lmkit.models.flexible.trace import FLOAT_BYTES, trace
from lmkit.models.identity import Packing
from lmkit.models.opened import open_checkpoint
from lmkit.models.registry import architecture_of
from lmkit.models.rounding import scheme_for
from lmkit.models.source import ModelSource
from lmkit.text.processor_process import processor_class

log = get_logger(__name__)


class FlexibleSource(ModelSource):
    """See ModelSource. Nothing is read of weights but their headers: a pass on the meta device shows the rest.

    Raises UnsupportedError for an architecture that transformers does not know, needs code of the repository for, or
    cannot compute.
    """

    def __init__(
        self, path: str | Path, *, attention_sinks: int = 0, rounding: str = "none", floats: bool = False
    ) -> None:
        """lmkit.conflicts refuses `attention_sinks` to engines. `floats` is for GGUF files, which it refuses itself."""
        self.reader = open_checkpoint(path)
        self.config = self.reader.config
        architecture = architecture_of(self.config)
        if isinstance(self.reader, GgufReader):
            raise UnsupportedError(f"{self.reader.path}: {architecture}: GGUF files are read for lmkit's own families")
        self.rounding, self.has_head = rounding, True
        self.format: WeightFormat = resolve_format(self.config)
        self.hf_config = read_config(self.reader.path, architecture)
        module = outline(self.hf_config, architecture)
        self.sites = all_sites(module)
        self.num_weights = sum(math.prod(part.shape) for part in module.parameters())
        tied = bool(getattr(module, "all_tied_weights_keys", None))
        with Uses(module) as self.uses:
            self.seen = trace(module, architecture)
        self.shared = [*self.uses.shared, *pairs_of_experts(module)]
        together = {name: group for group in self.uses.shared for name in group}
        self.gated = [
            mlp for mlp in find_gated(module, together) if not {mlp.gate, mlp.up, mlp.down} & self.uses.outside
        ]
        spec = spec_of(module, self.seen, self.hf_config, architecture, self._stored_dtype(), tied)
        self.runtime_prefix = spec.layers[0].prefix  # of the layers' names in the module
        self.names = Names(module, self.reader)
        self.reader.show(self.names.views)
        self.spec = named_as_stored(spec, self.names, self.uses, _num_experts(self.hf_config))
        self.how_attends, self.captures = self.seen.text, self.seen.packs
        self.sees = reads_images(self.hf_config)
        self.how_sees = self._reader_of_images() if self.sees else None
        if not self.seen.calls and not self.seen.cache:
            raise UnsupportedError(f"{architecture}: transformers keeps nothing of a sequence between its tokens")

    def _reader_of_images(self) -> str:
        try:
            return f"{processor_class(self.reader.path, self.hf_config.model_type).__name__} of transformers"
        except ValueError as error:
            return f"refused: {error}"

    def _stored_dtype(self) -> str:
        """The dtype of most dense weights."""
        sizes: dict[str, int] = {}
        for info in (self.reader.info(name) for name in self.reader.names()):
            if info.dtype in FLOATS:
                sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        if not sizes:
            raise CheckpointError(f"{self.reader.path}: it has no weights")
        return str(DTYPES[max(sizes, key=lambda name: sizes[name])]).removeprefix("torch.")

    def weight_bytes(
        self, dtype: str | None, lm_head: str = "auto", device: str = "cpu", activations: str = "int8"
    ) -> int:
        """Bytes of the loaded module: linears as kernels have them, all else in float32."""
        linears = {file: self.sites[name].shape for name, file in self.packed.items()}
        rounded = {file for name, file in self.packed.items() if name in self.places}
        total = FLOAT_BYTES * (self.num_weights - sum(map(math.prod, linears.values())))
        tied: torch.dtype = getattr(torch, dtype or self.spec.dtype)
        total += sum(math.prod(self.sites[name].shape) for name in self.uses.embedded) * tied.itemsize
        for name in self.reader.names():
            module, _, kind = name.rpartition(".")
            if module not in linears or kind == "bias":
                continue
            info, shape = self.reader.info(name), linears[module]
            if module in rounded and (scheme := scheme_for(self.rounding, shape[1])) is not None:
                total += scheme.num_bytes(shape)
            elif kind == "weight" and info.dtype in FLOATS:
                total += math.prod(shape) * getattr(torch, dtype or str(DTYPES[info.dtype])[6:]).itemsize
            else:
                total += info.nbytes * self._growth(name, FLOAT_BYTES, device, activations)
        return total

    @functools.cached_property
    def packed(self) -> dict[str, str]:
        """The linears of the model that lmkit packs, with their modules of the file. Those whose weight something else
        reads are not, nor plain ones beside the language part: transformers' towers compute in float32."""
        files = {name: file for file, name in self.names.modules.items() if name in self.sites}
        beside = {name for name in files if not name.startswith(self.seen.language)} - self.uses.ran
        plain = {name for name in beside if self._is_plain(files[name] + WEIGHT)}
        return {name: file for name, file in files.items() if name not in self.uses.direct | plain}

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, str]]:
        """Layer and role of the linears of layers, by their names in the model. Heads and routers are none."""
        return {
            f"{self.runtime_prefix}.{index}.{role}": (index, role)
            for index, layer in enumerate(self.spec.layers)
            for role in layer.linears
        }

    def _is_plain(self, weight: str) -> bool:
        return self.reader.has(weight) and self.reader.info(weight).dtype in FLOATS

    def decoder(self, packing: Packing) -> FlexibleDecoder:
        """The module with its weights, checked against transformers' own attention. Raises UnsupportedError if both
        differ."""
        try:
            return self._decoder(packing, self.gated, self.uses.normed if self.seen.packs else {})
        except UnsupportedError as error:
            log.info("%s; once more with parts of transformers alone", error)
            return self._decoder(packing, (), None)

    def _decoder(
        self, packing: Packing, gated: Iterable[Gated], normed: Mapping[str, set[str]] | None
    ) -> FlexibleDecoder:
        """The decoder with fused parts: MLPs with a gate, and norms, unless `normed` is None. `normed` has the linears
        that read a norm, by its name."""
        mlps = {(mlp.gate, mlp.up): mlp for mlp in gated if {mlp.gate, mlp.up, mlp.down} <= self.packed.keys()}
        activations = {pair: mlp.activation for pair, mlp in mlps.items()}
        linears = linear_source(self, packing, self.sites, self.packed, self.places, self.shared, activations)
        module = load_module(self.reader.path, self.hf_config, self.spec.architecture, linears)
        dtype = self.spec.dtype if packing.as_stored else packing.dtype
        pack_tied(module, self.uses.embedded, getattr(torch, dtype), packing.activations)
        fuse_gates(module, mlps.values())
        norms = fuse_norms(module, normed) if normed is not None else ()
        return checked(FlexibleDecoder(self.spec, module, self.seen, self.places, packing.device, norms))

    def tower(self, decoder: FlexibleDecoder, max_pixels: int) -> ForeignTower:
        """What encodes images for a decoder of this source. Raises UnsupportedError if nothing does."""
        return tower_of(decoder, self.reader.path, max_pixels)

    def module(self) -> nn.Module:
        """The module on the meta device, to discover its linears."""
        return outline(self.hf_config, self.spec.architecture)

    @functools.cached_property
    def _calibrated(self) -> Calibrated:
        attention = OBSERVED if self.seen.calls else "eager"
        return Calibrated(self, self.hf_config, self.module(), self.runtime_prefix, attention, self.names)

    def layer(self, index: int, dtype: torch.dtype | None = None, device: str = "cpu") -> ForeignLayer:  # type: ignore[override]
        """A layer with plain weights, for calibration."""
        return self._calibrated.layer(index, dtype, device)

    def head(self, dtype: torch.dtype | None = None, device: str = "cpu") -> ForeignHead:  # type: ignore[override]
        """What stands before the layers."""
        return ForeignHead(self._calibrated.passage)

    def logits(self, hidden: Tensor) -> Tensor:
        """States float32 [seq_len, hidden] after the last layer -> logits float32 [seq_len, vocab]."""
        return self._calibrated.passage.logits(hidden)

    def stored(self, index: int, role: str, weight: Tensor) -> Tensor:
        """A tensor of a layer as the checkpoint stores it."""
        stored = super().stored(index, role, weight)
        return stored.T.contiguous() if self._calibrated.is_transposed(index, role) else stored

    def read_back(self, index: int, role: str, weight: Tensor) -> Tensor:
        """The tensor float32 that is read back after it was stored."""
        return super().stored(index, role, weight).float()


def _num_experts(config: Any) -> set[int]:
    """How many experts layers have: a linear with so many outputs chooses among them."""
    text = config.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return {count for name in names if isinstance(count := getattr(text, name, None), int)}
