"""sentence-transformers, where it is installed, gives the vectors and the scores of lmkit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lmkit.api.in_process import pipeline
from lmkit.config import EngineConfig
from lmkit.serve.embeddings.vectors import scores
from lmkit.text import Tokenizer
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.transport.vectors import matrix
from tests.models import tiny
from tests.turbo.engine.test_engine import run
from tests.turbo.engine.test_whole_texts import tokenizer

theirs = pytest.importorskip("sentence_transformers")
models = pytest.importorskip("sentence_transformers.models")
TEXTS = ["t7 t20 t33 t180", "t9", " ".join(f"t{20 + 7 * i % 150}" for i in range(28))]
CONFIG = EngineConfig(device="cpu", packed_cache=False, max_batch_size=4)


def folder(path: Path, name: str, labels: int = 0) -> str:
    tiny.make_encoder(path, name, labels)
    tokenizer(path)
    inputs = ["input_ids", "attention_mask"] + ["token_type_ids"] * (name == "Bert")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "model_input_names": inputs}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(path)


def states(path: str, prompts: list[list[int]], starts: list[int | None]) -> tuple[Engine, np.ndarray]:
    engine = Engine(path, CONFIG)
    asked = [
        Request(request_id=str(i), prompt_ids=ids, params=SamplingParams(max_tokens=0), pooling=engine.info.pooling,
                second_start=start)
        for i, (ids, start) in enumerate(zip(prompts, starts, strict=True))
    ]  # fmt: skip
    rows = [outputs[-1].embedding for outputs in run(engine, asked).values()]
    engine.close()
    return engine, matrix(rows, normalize=False)


@pytest.mark.parametrize("mode", ["cls", "mean"])
@pytest.mark.parametrize("name", tiny.ENCODERS | tiny.EMBEDDING)
def test_embeddings(tmp_path: Path, name: str, mode: str) -> None:
    base, saved = folder(tmp_path / "base", name), str(tmp_path / "saved")
    parts = models.Transformer(base), models.Pooling(48, pooling_mode=mode), models.Normalize()
    peer = theirs.SentenceTransformer(modules=list(parts), device="cpu")
    peer.save(saved)
    prompts = [Tokenizer.from_pretrained(saved).encode(text) for text in TEXTS]
    engine, found = states(saved, prompts, [None] * len(TEXTS))
    assert engine.info.pooling == mode
    cosines = (peer.encode(TEXTS) * found).sum(1) / np.linalg.norm(found, axis=1)
    assert cosines.min() > 0.999999


@pytest.mark.parametrize("mode", ["max", "weightedmean", "mean_sqrt_len_tokens", ("cls", "mean", "lasttoken")])
def test_modules_lengths_and_prompts(tmp_path: Path, mode: str | tuple[str, ...]) -> None:
    base, saved = folder(tmp_path / "base", "Bert"), str(tmp_path / "saved")
    size = 48 * (3 if isinstance(mode, tuple) else 1)
    parts = [
        models.Transformer(base, max_seq_length=12), models.Pooling(48, pooling_mode=mode),
        models.Dense(size, 32, activation_function=torch.nn.GELU()), models.Normalize(), models.Dense(32, 16),
    ]  # fmt: skip
    prompts = {"query": "t11 t12 ", "document": "t13 "}
    peer = theirs.SentenceTransformer(modules=parts, device="cpu", prompts=prompts, default_prompt_name="document")
    peer.save(saved)
    with pipeline(saved, device="cpu", packed_cache=False, max_batch_size=4) as pipe:
        for name in (None, "query", "document"):
            want, found = peer.encode(TEXTS, prompt_name=name), pipe.embed(TEXTS, prompt_name=name)
            assert ((want * found).sum(1) / np.linalg.norm(want, axis=1)).min() > 0.999999


@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_scores_of_pairs(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path / "cross", name, 1)
    peer = theirs.CrossEncoder(path, device="cpu")
    pairs = [Tokenizer.from_pretrained(path).encode_pair(TEXTS[0], text) for text in TEXTS]
    engine, found = states(path, [pair.ids for pair in pairs], [pair.second_start for pair in pairs])
    assert engine.info.classes is not None
    got = scores(found, engine.info.classes, raw=False)[:, 0]
    np.testing.assert_allclose(got, peer.predict([(TEXTS[0], text) for text in TEXTS]), atol=1e-5)
