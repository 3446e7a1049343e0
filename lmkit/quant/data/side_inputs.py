"""What layers read of the calibration tokens beside their hidden states: the tokens' vectors for each layer
(layers.per_layer), and the keys and values of earlier layers (LayerSpec.kv_from).

Both are kept for all tokens, as the hidden states are. With a folder they are mapped files, each with its checksum:

    vectors.f32       float32 [tokens, layers * width], which both streams read
    hidden-kv-13.f32  float32 [tokens, 2 * kv_size], keys and values of layer 13, once it is finished
    exact-kv-13.f32   ...

Only layers that later ones read have such a file. A layer that is done again writes the same bytes to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lmkit.kernels.cuda.module import tensor_device
from lmkit.models.spec import ModelSpec
from lmkit.quant.data.buffer import Buffer
from lmkit.quant.layer.layer import Geometry


@dataclass(frozen=True)
class SideInputs:
    """`vectors`: None if the model has none. `keys_values` by (stream, layer)."""

    spec: ModelSpec
    vectors: Buffer | None
    keys_values: dict[tuple[str, int], Buffer]
    device: str  # where layers compute

    @classmethod
    def of(
        cls, spec: ModelSpec, num_tokens: int, streams: tuple[str, ...], folder: Path | None, device: str = "cpu"
    ) -> SideInputs:
        vectors = Buffer(num_tokens, spec.token_width, folder and folder / "vectors.f32") if spec.token_width else None
        keys_values = {
            (name, index): Buffer(
                num_tokens, 2 * spec.layers[index].kv_size, folder and folder / f"{name}-kv-{index}.f32"
            )
            for name in streams
            for index in spec.kv_sources
        }
        return cls(spec, vectors, keys_values, device)

    def check(self, layer: int) -> None:
        """Raise CheckpointError if a file that layers from `layer` on read is not as it was sealed."""
        if self.vectors is not None:
            self.vectors.check()
        for (_, index), buffer in self.keys_values.items():
            if index < layer:
                buffer.check()

    def put_vectors(self, tokens: slice, vectors: Tensor) -> None:
        assert self.vectors is not None
        self.vectors.states[tokens] = vectors
        self.vectors.release()

    def seal_vectors(self) -> None:
        if self.vectors is not None:
            self.vectors.seal()

    def put(self, layer: int, tokens: slice, stream: str, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values float32 [tokens, num_kv_heads, head_dim] of a layer."""
        buffer = self.keys_values[stream, layer]
        buffer.states[tokens] = torch.cat((keys.flatten(1), values.flatten(1)), -1).cpu()
        buffer.release()

    def seal(self, layer: int) -> None:
        """Wait until the disk has the layer's keys and values, if they are kept."""
        for (_, index), buffer in self.keys_values.items():
            if index == layer:
                buffer.seal()

    def release(self) -> None:
        """Leave all pages to the page cache."""
        for buffer in (*self.keys_values.values(), *(() if self.vectors is None else (self.vectors,))):
            buffer.release()

    def given(self, geometry: Geometry, layer: int, tokens: slice, stream: str) -> Geometry:
        """The geometry of a layer with what it reads of `tokens`."""
        self.release()
        self.fill(geometry, layer, tokens, stream)
        return self.with_vectors(geometry, tokens)

    def with_vectors(self, geometry: Geometry, tokens: slice) -> Geometry:
        """The geometry with the vectors of `tokens` alone."""
        if self.vectors is None:
            return geometry
        vectors = self.vectors.states[tokens].to(tensor_device(self.device))
        return replace(geometry, batch=replace(geometry.batch, per_layer=vectors))

    def fill(self, geometry: Geometry, layer: int, tokens: slice | Tensor, stream: str) -> None:
        """Copy the keys and values that a layer reads of `tokens` into its cache."""
        spec = self.spec.layers[layer]
        if spec.kv_from is not None:
            kept = self.keys_values[stream, spec.kv_from].states[tokens].to(tensor_device(self.device))
            keys, values = kept.view(len(kept), 2, spec.num_kv_heads, spec.head_dim).unbind(1)
            geometry.store(keys, values)
