"""Whisper's encoder: samples of an audio to the states that the decoder attends to (arXiv 2212.04356).

Plain torch on the host, one audio at a time, in small parts between which the caller may do something else. The
spectrogram is made by transformers' own extractor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.extras import EXTRAS, install
from lmkit.formats.speech_config import read_speech
from lmkit.models.audio_spec import PREFIX, AudioSpec
from lmkit.models.resolved import ResolvedModel
from lmkit.models.tower import read_weights, tower_dtype
from lmkit.models.vision import Encoded, Encoding, Steps, in_parts
from lmkit.text.audio import NO_AUDIO, RATE, AudioSettings


@dataclass(frozen=True)
class AudioTower:
    """See lmkit.models.vision.Encodes. `weights` by their names after PREFIX, of one dtype."""

    spec: AudioSpec
    weights: dict[str, Tensor]
    extractor: Any  # transformers' WhisperFeatureExtractor
    settings: AudioSettings

    @property
    def videos(self) -> str:
        """It takes none."""
        return NO_AUDIO

    def encode(self, rows: int, columns: int, pixels: bytes) -> Encoding:
        """The states float32 [length, hidden] of samples float32."""
        yield
        samples = torch.frombuffer(bytearray(pixels), dtype=torch.float32).numpy()
        found = self.extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        return Encoded((yield from self.states(found[0])))

    def states(self, features: Tensor) -> Steps:
        """The spectrogram float32 [mel bins, 2 length] -> states float32 [length, hidden]."""
        weight = self.weights
        x = features.to(weight["conv1.weight"].dtype)[None]
        x = F.gelu(F.conv1d(x, weight["conv1.weight"], weight["conv1.bias"], padding=1))
        yield
        x = F.gelu(F.conv1d(x, weight["conv2.weight"], weight["conv2.bias"], stride=2, padding=1))[0].T
        x = x + weight["embed_positions.weight"]
        for layer in range(self.spec.num_layers):
            x = yield from self._layer(x, f"layers.{layer}.")
        return self._norm(x, "layer_norm").float()

    def _layer(self, x: Tensor, at: str) -> Steps:
        heads = self.spec.num_heads

        def inputs(part: Tensor) -> Tensor:
            normed = self._norm(part, at + "self_attn_layer_norm")
            return torch.cat([self._linear(normed, f"{at}self_attn.{name}_proj") for name in "qkv"], -1)

        qkv = yield from in_parts(inputs, x)
        q, k, v = qkv.view(len(x), 3, heads, -1).permute(1, 2, 0, 3)[:, None]

        def rest(rows: Tensor) -> Tensor:
            seen = F.scaled_dot_product_attention(q[:, :, rows], k, v)[0].transpose(0, 1).flatten(1)
            part = x[rows] + self._linear(seen, at + "self_attn.out_proj")
            inner = F.gelu(self._linear(self._norm(part, at + "final_layer_norm"), at + "fc1"))
            return part + self._linear(inner, at + "fc2")

        return (yield from in_parts(rest, torch.arange(len(x))))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[name + ".weight"], self.weights[name + ".bias"])


def audio_bytes(model: ResolvedModel) -> int:
    """Bytes of the encoder in memory. 0: the model has none."""
    audio = model.spec.audio
    return 0 if audio is None else sum(map(math.prod, audio.shapes().values())) * tower_dtype(model).itemsize


def load_audio(model: ResolvedModel) -> AudioTower:
    """The encoder, dense. Raises CheckpointError, and UnsupportedError without what makes spectrograms."""
    if EXTRAS["audio"].missing():
        raise UnsupportedError(f"audio needs transformers, which makes spectrograms: {install('audio')}")
    from transformers import WhisperFeatureExtractor

    audio, path = model.spec.audio, model.reader.path
    assert audio is not None
    try:
        extractor = WhisperFeatureExtractor.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: preprocessor_config.json cannot be used: {error}") from None
    frames = extractor.nb_max_frames
    if (extractor.feature_size, frames, extractor.sampling_rate) != (audio.mel_bins, 2 * audio.length, RATE):
        raise CheckpointError(f"{path}: preprocessor_config.json and config.json do not fit together")
    settings = read_speech(path, model.spec.vocab_size, extractor.chunk_length)
    return AudioTower(audio, dict(read_weights(model, PREFIX, audio.shapes())), extractor, settings)
