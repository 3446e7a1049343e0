"""An encoder of audio as data. No torch: a model's specification holds one, and `lmkit inspect` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

PREFIX = "model.encoder."  # begins the names of its tensors
ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")


@dataclass(frozen=True, kw_only=True)
class AudioSpec:
    """Sizes of Whisper's encoder (arXiv 2212.04356). Two frames of the spectrogram make one state."""

    num_layers: int
    hidden_size: int
    inner_size: int  # of the MLP
    num_heads: int
    mel_bins: int  # of the spectrogram
    length: int  # states of an audio, which always has `seconds`

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors by their names after PREFIX."""
        size, inner = self.hidden_size, self.inner_size
        found: dict[str, tuple[int, ...]] = {
            "conv1.weight": (size, self.mel_bins, 3),
            "conv2.weight": (size, size, 3),
            "conv1.bias": (size,),
            "conv2.bias": (size,),
            "embed_positions.weight": (self.length, size),
            "layer_norm.weight": (size,),
            "layer_norm.bias": (size,),
        }
        linears = {f"self_attn.{name}": (size, size) for name in ATTENTION} | {
            "fc1": (inner, size),
            "fc2": (size, inner),
        }
        for layer in range(self.num_layers):
            at = f"layers.{layer}."
            for name, part in product(("self_attn_layer_norm", "final_layer_norm"), ("weight", "bias")):
                found[f"{at}{name}.{part}"] = (size,)
            for name, shape in linears.items():
                found[f"{at}{name}.weight"] = shape
                if name != "self_attn.k_proj":
                    found[f"{at}{name}.bias"] = shape[:1]
        return found
