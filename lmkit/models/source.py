"""An open checkpoint's pieces, one at a time. Calibration holds a single layer, serving holds all of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmkit.devices import named
from lmkit.errors import CheckpointError, ConfigError
from lmkit.formats.base import WeightFormat, resolve_format
from lmkit.formats.gptq import GptqFormat, stored_bits
from lmkit.formats.mxfp4 import BLOCKS
from lmkit.formats.mxfp4 import SCALES as MX_SCALES
from lmkit.formats.parts import FLOATS, missing_parts
from lmkit.formats.safetensors_file import DTYPES
from lmkit.kernels.cuda.module import tensor_device
from lmkit.kernels.ops import Norm
from lmkit.layers.blocks.moe import SCORE_BIAS
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.layers.per_layer import PerLayerWeights
from lmkit.models import load_spec, roles
from lmkit.models.decoder import Decoder
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.head import ASKED_HEAD, HEAD_SCHEME, has_own_head, quantize_rows, rounded_head, untied
from lmkit.models.opened import coded_scheme, open_checkpoint, show_tensors
from lmkit.models.placed import held_bytes, placed
from lmkit.models.registry import BASE, CLASSIFIER
from lmkit.models.rounding import check_rounding, saved_bytes, scheme_for
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QTensor, QuantScheme, dequantize

NVFP4_CODES = ("weight", "weight_packed")  # the last parts of the names of bytes with two codes each
SCALES = (".scales", ".qzeros", ".scaled_zeros", ".weight_scale", ".weight_scale_inv", ".input_scale")


class ModelSource:
    """An open checkpoint: its specification, weight format and pieces. Raises CheckpointError/UnsupportedError.

    `rounding` is a name of `models.rounding`: linears of its layers are rounded as they are read. Raises ConfigError if
    they are quantized already.
    """

    how_attends = ""  # of the flexible engine: where attention and states are, in words
    captures = True  # whether steps may be captured, see Decoder
    sees = False  # of the flexible engine: whether transformers has the model for images and text
    how_sees: str | None = None  # of such a model: what reads its images, in words

    def __init__(
        self,
        path: str | Path,
        *,
        attention_sinks: int = 0,
        rounding: str = "none",
        part: ModelSpec | None = None,
        floats: bool = False,
    ) -> None:
        """`part`: the specification of another part of the checkpoint, in place of the model's. `floats`: see
        models.opened."""
        self.reader = open_checkpoint(path, floats=floats or rounding != "none")
        self.config: dict[str, Any] = self.reader.config
        self.spec: ModelSpec = part or load_spec(self.config).with_sinks(attention_sinks)
        self.format: WeightFormat = resolve_format(self.config)
        self.rounding = rounding
        if rounding != "none" and self.format.name != "dense":
            raise ConfigError(
                f"quantize={rounding}: {self.reader.path} is quantized already ({self.format.name}); leave quantize out"
            )
        if rounding != "none":
            check_rounding(self.spec, rounding, self.reader.path)
        show_tensors(self.reader, self.spec)
        if self.spec.tie_embeddings and has_own_head(self.reader):
            self.spec, self.config = replace(self.spec, tie_embeddings=False), untied(self.config)
        classifies = self.spec.architecture.endswith(CLASSIFIER)
        writes = not (classifies or self.spec.sees_all)
        self.has_head = writes and (self.spec.tie_embeddings or not self.lacks_head())
        if not self.has_head:
            self.spec = replace(self.spec, tie_embeddings=True)  # what computes logits has some head; nobody sees them
        self._check_names()

    def lacks_head(self) -> bool:
        """Whether it was saved without its head on purpose."""
        is_base = self.reader.is_base or self.spec.architecture.endswith(BASE)
        return is_base and bool(missing_parts(self.reader, roles.LM_HEAD))

    def _check_names(self) -> None:
        """Check that every weight of the specification exists and that dense vectors fit, before anything is read."""
        spec, reader = self.spec, self.reader
        hidden, width = spec.hidden_size, spec.projected or spec.hidden_size
        dense: dict[str, tuple[int, ...]] = {roles.EMBED + ".weight": (spec.vocab_size, width)}
        if spec.projected:
            dense |= {roles.PROJECT_IN + ".weight": (hidden, width), roles.PROJECT_OUT + ".weight": (width, hidden)}
        if spec.final_norm:
            dense[roles.FINAL_NORM + ".weight"] = (hidden,)
        if spec.final_norm and spec.layers[-1].norm_bias:
            dense[roles.FINAL_NORM + ".bias"] = (spec.hidden_size,)
        if spec.first_position is not None:
            dense[roles.POSITIONS + ".weight"] = (spec.first_position + spec.max_position, spec.hidden_size)
        if spec.token_types:
            dense[roles.TOKEN_TYPES + ".weight"] = (spec.token_types, hidden)
        if spec.embed_norm:
            dense |= {f"{roles.EMBED_NORM}.{part}": (hidden,) for part in ("weight", "bias")}
        if spec.per_layer:
            dense[roles.PER_LAYER_TABLE + ".weight"] = (spec.per_layer_vocab, spec.per_layer)
            dense[roles.PER_LAYER_NORM + ".weight"] = (spec.layers[0].per_layer,)
        for index, layer in enumerate(spec.layers):
            dense |= {spec.tensor_name(index, role): (size,) for role, size in layer.vectors.items()}
        if missing := [name for name in dense if not reader.has(name)] + self._missing():
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{reader.path}: tensor {missing[0]} is missing{more}")
        for name, shape in dense.items():
            if (found := reader.info(name).shape) != shape:
                raise CheckpointError(f"{reader.path}: {name} is {list(found)}, config.json says {list(shape)}")

    def _missing(self) -> list[str]:
        """Tensors of the layers' linears and of the head that the checkpoint lacks."""
        names = [] if self.spec.tie_embeddings else missing_parts(self.reader, roles.LM_HEAD)
        for index, layer in enumerate(self.spec.layers):
            for role in layer.linears | layer.routers | layer.matrices:
                module = layer.module_name(index, role)
                names += missing_parts(self.reader, module)
                if layer.has_bias(role) and not self.reader.has(module + ".bias"):
                    names.append(module + ".bias")
        return names

    def layer_weights(
        self, index: int, dtype: torch.dtype | None = None, linears: Collection[str] | None = None
    ) -> Weights:
        """All weights of a layer by role; dense ones as `dtype` (None = as stored). `linears` names those to read of
        linears and routers; None = all."""
        spec, path = self.spec.layers[index], self.reader.path
        weights: Weights = dict(self._vectors(index, dtype))
        shapes = spec.linears | spec.routers
        for role, expected in ((role, shapes[role]) for role in (shapes if linears is None else linears)):
            module = spec.module_name(index, role)
            weight = self.format.read_linear(self.reader, module)
            shape = tuple((weight.codes if isinstance(weight, QTensor) else weight).shape)
            if shape != expected:
                raise CheckpointError(f"{path}: {module} is {list(shape)}, config.json says {list(expected)}")
            is_rounded = role in spec.linears and role not in spec.unrounded
            scheme = scheme_for(self.rounding, expected[1]) if is_rounded else None
            if scheme is not None and not isinstance(weight, QTensor):
                weight = quantize_rows(weight, scheme)
            weights[role] = weight if isinstance(weight, QTensor) else _to(weight, dtype)
            if spec.has_bias(role):
                weights[role + ".bias"] = self._plain(module + ".bias", dtype)
            else:
                self._check_no_bias(module)
        return weights

    def _check_no_bias(self, module: str) -> None:
        """Raise CheckpointError if a linear without a bias has one in the file that is not all zeros. Older quantizers
        write zeros for every linear."""
        name = module + ".bias"
        if self.reader.has(name) and bool(self._plain(name, None).any()):
            raise CheckpointError(f"{self.reader.path}: {name} is there, but config.json says there is none")

    def layer(self, index: int, dtype: torch.dtype | None = None, device: str = "cpu") -> DecoderLayer:
        """A layer with plain weights, for calibration."""
        at, weights = tensor_device(device), self.layer_weights(index, dtype)
        weights = {role: placed(weight, device, at, dtype) for role, weight in weights.items()}
        return DecoderLayer(self.spec.layers[index], index, weights, device, activation_dtype(device, dtype))

    def norms(self, index: int, dtype: torch.dtype | None = None) -> Weights:
        """A layer's vectors by role (all its weights except linears), as in `layer_weights`, but in float32."""
        return {role: vector.float().clone() for role, vector in self._vectors(index, dtype)}

    def stored(self, index: int, role: str, weight: Tensor) -> Tensor:
        """A tensor of a layer as the checkpoint stores it: in its dtype, a norm's weight without the offset."""
        if role in self.spec.layers[index].vectors:
            weight = weight - self.spec.norm_offset
        return weight.to(self.stored_dtype(index, role))

    def read_back(self, index: int, role: str, weight: Tensor) -> Tensor:
        """The tensor float32 that is read back after it was stored (see `stored`)."""
        offset = self.spec.norm_offset if role in self.spec.layers[index].vectors else 0.0
        return self.stored(index, role, weight).float() + offset

    def stored_dtype(self, index: int, role: str) -> torch.dtype:
        """The dtype of a dense tensor of a layer, `attn.q` or `attn.q.bias`."""
        return DTYPES[self.reader.info(self.spec.tensor_name(index, role)).dtype]

    @property
    def embed_dtype(self) -> torch.dtype:
        """The dtype of `embed_tokens()`."""
        return torch.float32 if self.spec.projected else DTYPES[self.reader.info(roles.EMBED + ".weight").dtype]

    def embed_tokens(self, dtype: torch.dtype | None = None) -> Tensor:
        """[vocab, hidden]: what the stream gets."""
        return self._projected(roles.PROJECT_IN, dtype)

    def _projected(self, module: str, dtype: torch.dtype | None) -> Tensor:
        """Embeddings, multiplied with a matrix if they have another width than the stream."""
        if not self.spec.projected:
            return self._plain(roles.EMBED + ".weight", dtype)
        matrix = self._plain(module + ".weight", torch.float32)
        matrix = matrix.T if module == roles.PROJECT_IN else matrix
        return _to(self._plain(roles.EMBED + ".weight", torch.float32) @ matrix, dtype)

    def final_norm(self) -> Tensor | None:
        """The final norm's factor, times the model's factor on logits; None if there is no final norm."""
        if not self.spec.final_norm:
            return None
        return self._vector(roles.FINAL_NORM + ".weight", torch.float32) * self.spec.logit_scale

    def final_bias(self) -> Tensor | None:
        """The final LayerNorm's bias; None if it is an RMSNorm."""
        has_bias = self.spec.final_norm and self.spec.layers[-1].norm_bias
        return self._plain(roles.FINAL_NORM + ".bias", torch.float32) if has_bias else None

    def positions(self) -> Tensor | None:
        """What is added to the embedding of the token at each position, float32 [max_position, hidden]; None = RoPE.
        With types of tokens there are so many rows for each type."""
        first = self.spec.first_position
        if first is None:
            return None
        table = self._plain(roles.POSITIONS + ".weight", torch.float32)[first:]
        if not self.spec.token_types:
            return table
        return (table + self._plain(roles.TOKEN_TYPES + ".weight", torch.float32)[:, None]).flatten(0, 1)

    def embed_norm(self, device: str) -> Norm | None:
        """The LayerNorm of embeddings, if there is one."""
        if not self.spec.embed_norm:
            return None
        weight, bias = (
            self._plain(f"{roles.EMBED_NORM}.{part}", torch.float32).clone().to(device) for part in ("weight", "bias")
        )
        return Norm(weight, self.spec.norm_eps, None, torch.float32, bias)

    def per_layer(self, dtype: torch.dtype | None, device: str = "cpu") -> PerLayerWeights | None:
        """The vectors of tokens for each layer (layers.per_layer), if the model has any; None = as stored."""
        spec, width = self.spec, self.spec.layers[0].per_layer
        if not spec.per_layer:
            return None
        table = self._plain(roles.PER_LAYER_TABLE + ".weight", dtype)
        projection = self._matrix(roles.PER_LAYER_PROJECTION, (spec.per_layer, spec.hidden_size)).to(table.dtype)
        norm = self.norm(roles.PER_LAYER_NORM + ".weight", width)
        return PerLayerWeights(table.to(device), projection.to(device), norm.to(device), spec.per_layer_scale)

    def lm_head(self, dtype: torch.dtype | None = None, device: str = "cpu", storage: str = "auto") -> MergedLinear:
        """The head as a plain linear. Tied embeddings also serve as the head.

        `storage` int8 quantizes it to HEAD_SCHEME, unless the checkpoint stores it quantized.
        """
        weight = self._head(dtype)
        shape = tuple((weight.codes if isinstance(weight, QTensor) else weight).shape)
        if shape != (self.spec.num_logits, self.spec.hidden_size):
            raise CheckpointError(f"{self.reader.path}: the head is {list(shape)}, not [vocab, hidden]")
        head = placed(weight, device, tensor_device(device), dtype)
        if storage == "int8" and not isinstance(head, QTensor):
            head = rounded_head(head)
        return MergedLinear((roles.LM_HEAD,), {roles.LM_HEAD: head}, device)

    def _head(self, dtype: torch.dtype | None) -> Tensor | QTensor:
        if self.tied_scheme is not None:
            return self.format.read_linear(self.reader, roles.EMBED)
        if self.spec.tie_embeddings:
            return self._projected(roles.PROJECT_OUT, dtype)[: self.spec.num_logits]
        self._check_no_bias(roles.LM_HEAD)
        weight = self.format.read_linear(self.reader, roles.LM_HEAD)
        return weight if isinstance(weight, QTensor) else _to(weight, dtype)

    @property
    def asked_head(self) -> str:
        """The storage of the head that the checkpoint asks for: int8 or stored."""
        asked = self.config.get(ASKED_HEAD, "stored")
        if asked not in ("int8", "stored"):
            raise CheckpointError(f"{self.reader.path}: config.json: {ASKED_HEAD} is {asked!r}, not int8 or stored")
        return str(asked)

    @property
    def tied_scheme(self) -> QuantScheme | None:
        """The scheme of a head that shares the codes of the embeddings; None for other heads."""
        spec = self.spec
        shares = spec.tie_embeddings and not spec.projected and spec.num_logits == spec.vocab_size
        return coded_scheme(self.reader, roles.EMBED + ".weight") if shares else None

    def head_bytes(self, dense: int, storage: str = "auto") -> int:
        """Bytes of a head that the checkpoint has as numbers of `dense` bytes, or as tied embeddings in codes."""
        shape = self.spec.num_logits, self.spec.hidden_size
        scheme = self.tied_scheme or (HEAD_SCHEME if storage == "int8" else None)
        return math.prod(shape) * dense if scheme is None else scheme.num_bytes(shape)

    def head(self, dtype: torch.dtype | None = None, device: str = "cpu") -> Decoder:
        """A decoder without layers. Only `embed`, `embed_rows`, `per_layer` and `head` work, with plain weights."""
        at = tensor_device(device)
        embed = self.embed_tokens(dtype).to(at)
        norm, bias, positions = (
            None if tensor is None else tensor.to(at)
            for tensor in (self.final_norm(), self.final_bias(), self.positions())
        )
        lm_head, vectors = self.lm_head(dtype, device), self.per_layer(dtype, at)
        return Decoder(self.spec, embed, [], norm, lm_head, positions=positions, final_bias=bias, per_layer=vectors)

    def _vectors(self, index: int, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """(role, vector or matrix). Biases that choose experts stay as stored: rounded ones would choose others."""
        spec = self.spec.layers[index]
        for role in spec.vectors:
            yield role, self._vector(self.spec.tensor_name(index, role), None if role == SCORE_BIAS else dtype)
        for role, shape in spec.matrices.items():
            yield role, self._matrix(spec.module_name(index, role), shape)

    def _matrix(self, module: str, expected: tuple[int, ...]) -> Tensor:
        """A tensor that stays dense, float32. The checkpoint may have a matrix quantized."""
        if len(expected) == 2:
            weight = self.format.read_linear(self.reader, module)
        else:
            weight = self._plain(module + ".weight", None)
        matrix = dequantize(weight) if isinstance(weight, QTensor) else weight.float()
        if tuple(matrix.shape) != expected:
            path = self.reader.path
            raise CheckpointError(f"{path}: {module} is {list(matrix.shape)}, config.json says {list(expected)}")
        return matrix

    def norm(self, name: str, size: int) -> Tensor:
        """The factor float32 [size] of a norm that no layer has."""
        factor = self._vector(name, None).float().clone()
        if tuple(factor.shape) != (size,):
            raise CheckpointError(f"{self.reader.path}: {name} is {list(factor.shape)}, expected {[size]}")
        return factor

    def _vector(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """A norm's factor: the stored weight plus the model's norm_offset. A short type could not hold the sum."""
        weight, offset = self._plain(name, dtype), self.spec.norm_offset
        return weight.float() + offset if offset else weight

    def _plain(self, name: str, dtype: torch.dtype | None) -> Tensor:
        if not self.reader.has(name):
            raise CheckpointError(f"{self.reader.path}: tensor {name} is missing")
        if (stored := self.reader.info(name).dtype) not in FLOATS:
            raise CheckpointError(f"{self.reader.path}: {name} is {stored}, expected {', '.join(FLOATS)}")
        return _to(self.reader.tensor(name), dtype)

    def weight_bytes(
        self, dtype: str | None, lm_head: str = "auto", device: str = "cpu", activations: str = "int8"
    ) -> int:
        """Bytes of the loaded model with dense weights as `dtype` (None = as stored). A tied head is a second, packed
        copy. Where weights of float4 are kept in 4 bits, and where not, depends on the device and on what inputs are
        rounded to."""
        dense: int = (self.embed_dtype if dtype is None else getattr(torch, dtype)).itemsize
        total = 0
        for name in self.reader.names():
            if name.startswith(self.spec.unread):
                continue
            info = self.reader.info(name)
            floating = info.dtype in FLOATS and not name.endswith(SCALES)
            if floating:
                total += math.prod(info.shape) * (DTYPES[info.dtype].itemsize if dtype is None else dense)
            elif (scheme := coded_scheme(self.reader, name)) is not None:
                total += held_bytes(scheme, (info.shape[0], info.shape[1]), device, dense)
            else:
                total += info.nbytes * self._growth(name, dense, device, activations)
        if self.spec.tie_embeddings:
            total += self.head_bytes(dense, lm_head)
        elif lm_head == "int8":
            total += self.head_bytes(dense, lm_head) - self.head_bytes(dense)
        if self.spec.projected:
            total += self.spec.vocab_size * (self.spec.hidden_size - self.spec.projected) * dense
        return total - saved_bytes(self.spec, self.rounding, dense)

    def _growth(self, name: str, dense: int, device: str, activations: str) -> int:
        """The bytes that a coded tensor takes in memory for each of its bytes in the file, at most."""
        module, _, suffix = name.rpartition(".")
        facts, is_byte = named(device), self.reader.info(name).dtype == "U8"
        has_float4 = facts.float4
        # Codes of float4 stay in 4 bits, else they take 8. A scale becomes float32, with a zero of 8, 32 or no bits.
        codes, scales = (1, 5) if has_float4 and activations == "int8" else (2, 8 if has_float4 else 5)
        if facts.exact_float4:
            codes, scales = 1, 4
        if suffix in ("qweight", "qzeros") and isinstance(self.format, GptqFormat):
            return 2 if stored_bits(self.reader, module) in (2, 3) else 1
        if suffix in NVFP4_CODES and is_byte:  # of 4 bits; of other formats they become dense
            return codes if has_float4 and self._is_nvfp4(module) else 2 * dense
        if suffix == "weight_scale" and self._is_nvfp4(module):
            return scales if has_float4 else 0
        return {BLOCKS: codes, MX_SCALES: scales}.get(suffix, 1)

    def _is_nvfp4(self, module: str) -> bool:
        names = (f"{module}.{part}" for part in NVFP4_CODES)
        has_codes = any(self.reader.has(name) and self.reader.info(name).dtype == "U8" for name in names)
        return has_codes and self.reader.has(module + ".weight_scale")

    def close(self) -> None:
        self.reader.close()


def activation_dtype(device: str, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that linears and attention pass on: float32 on a CPU, that of the dense weights on a GPU."""
    return dtype if named(device).half_activations and dtype is not None else torch.float32


def _to(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)
