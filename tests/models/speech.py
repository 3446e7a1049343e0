"""Tiny random Whispers, made by transformers, with a tokenizer and a feature extractor made here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from lmkit.text.audio import RATE

SECONDS = 2  # of an audio, where real models hear 30
NUM_BYTES = 256
LANGUAGES = ("en", "de", "fr")
SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in LANGUAGES), "<|translate|>",
    "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
    *(f"<|{i / 50:.2f}|>" for i in range(SECONDS * 50 + 1)),
)  # fmt: skip
IDS = {name: NUM_BYTES + i for i, name in enumerate(SPECIAL)}
SIZES: dict[str, Any] = {
    "vocab_size": NUM_BYTES + len(SPECIAL), "d_model": 48, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 3, "encoder_ffn_dim": 80, "decoder_ffn_dim": 96,
    "num_mel_bins": 80, "max_source_positions": SECONDS * 50, "max_target_positions": 64, "init_std": 0.2,
}  # fmt: skip


def make(folder: Path, **changes: Any) -> transformers.WhisperForConditionalGeneration:
    """Write a checkpoint. Returns transformers' model of it."""
    start, end = IDS["<|startoftranscript|>"], IDS["<|endoftext|>"]
    ends = {"decoder_start_token_id": start, "eos_token_id": end, "bos_token_id": end, "pad_token_id": end}
    config = transformers.WhisperConfig(
        **SIZES | ends | {"suppress_tokens": None, "begin_suppress_tokens": None} | changes
    )
    torch.manual_seed(4)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():  # otherwise norms and biases would say nothing
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.3)
            elif "layer_norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("decoder.embed_positions.weight"):
                weight.normal_(0, 1.0)  # otherwise it would say one thing again and again
            elif name.endswith("embed_tokens.weight"):
                weight[NUM_BYTES:] *= 0.6
    model.generation_config = transformers.GenerationConfig(
        **ends, max_length=64, is_multilingual=True, return_timestamps=False,
        lang_to_id={f"<|{name}|>": IDS[f"<|{name}|>"] for name in LANGUAGES},
        task_to_id={name: IDS[f"<|{name}|>"] for name in ("transcribe", "translate")},
        no_timestamps_token_id=IDS["<|notimestamps|>"], prev_sot_token_id=IDS["<|startofprev|>"],
        suppress_tokens=[1, 2, 7, start], begin_suppress_tokens=[32, end], max_initial_timestamp_index=20,
    )  # fmt: skip
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(chunk_length=SECONDS).save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return model


def _tokenizer() -> Tokenizer:
    """Each byte is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(letters) == NUM_BYTES
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    plain = SPECIAL.index("<|0.00|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL[:plain]])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in SPECIAL[plain:]])
    return tokenizer


def sound(seed: int, seconds: float = SECONDS) -> np.ndarray:
    """Samples float32: some tones with noise."""
    rng, times = np.random.default_rng(seed), np.arange(int(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * math.pi * rng.uniform(80, 4000) * times + rng.uniform(0, 6)) for _ in range(5))
    return (0.1 * tones + 0.02 * rng.standard_normal(len(times))).astype(np.float32)
