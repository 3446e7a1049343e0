"""all-MiniLM-L6-v2: embeddings are those of transformers, pooled as the checkpoint says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from lmkit import pipeline
from tests.real.conftest import Record
from tests.real.packages import MINILM

TEXTS = ["A cat sits on the mat.", "Ein Hund schläft.", "天气很好", "x", " ".join(["long"] * 400)]
MOST = 256  # tokens, of sentence_bert_config.json


def test_embeddings_are_those_of_transformers(minilm: Path, record: Record) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    with pipeline(str(minilm)) as pipe:
        found = np.asarray(pipe.embed(TEXTS))
    cosines = []
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            ids = tokenizer(text, truncation=True, max_length=MOST, return_tensors="pt")
            mean = model(**ids).last_hidden_state[0].mean(0).double().numpy()
        cosines.append(float(mean @ vector / np.linalg.norm(mean) / np.linalg.norm(vector)))
    record(MINILM, "cosine with transformers, at least", f"{min(cosines):.7f}")
    assert min(cosines) > 0.999999
