"""Images in engines whose model several processes share: tokens are those of transformers, also when the memory for
encoded images has room for one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.pictures import frames, picture, prompt, tower_of
from tests.models.test_images import check, request, text, tokens
from tests.turbo.engine.test_cuda_families import saved
from tests.turbo.engine.test_engine import run
from tests.turbo.engine.test_ranks import engine


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-vl", {"pp": 2}),  # parts of an image are added after layers of both stages
        pytest.param("qwen3-vl", {"tp": 2}, marks=pytest.mark.exhaustive),
        ("gemma3-vision", {"tp": 2}),  # tokens of an image see each other
    ],
)
def test_every_process_has_the_images(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    model = saved(tmp_path, name, hidden_size=64, num_attention_heads=4, head_dim=16)
    tower = tower_of(tmp_path)
    exact = {"dtype": "float32", "activations": "exact", "kv_dtype": "float32", "generation_config": "none"}
    shared = engine(tmp_path, **{"tp": 1} | options, **exact, image_memory=1, max_model_len=96)
    images = [picture(tower, 4, 4, 1), picture(tower, 3, 5, 2), *frames(tower, 2, 3, 1)]
    given = []
    for number, image in enumerate((*images, images[0])):  # the last one is encoded again
        ids, placed = prompt(tower, [*text(9, number), -1, *text(3)], [image])
        given.append(request(str(number), ids, placed, 4))
    try:
        for some in (given[:2], given[2:], given[:1]):
            found = run(shared, some)
            for one in some:
                check(model, tower, one, tokens(found[one.request_id]))
        assert shared.stats().images["encoded"] > len(images)
    finally:
        shared.close()
