"""The trained mixture of experts predicts text, and all of its experts take part."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lmkit.models.source import ModelSource
from lmkit.quant.data.calibration import load_calibration
from lmkit.quant.data.hidden_states import Stream
from lmkit.quant.report.evaluate import encode_text, evaluate
from lmkit.quant.sections import CalibrationRecipe
from lmkit.text import Tokenizer

TRAINED_MOE = Path(__file__).parents[1] / "data" / "qwen3_moe"


def test_it_predicts_held_out_text() -> None:
    found = evaluate(TRAINED_MOE, encode_text(TRAINED_MOE), seq_len=256, limit=2048)
    assert found.perplexity < 25  # of 4,096 tokens


def test_every_expert_is_used() -> None:
    source = ModelSource(TRAINED_MOE)
    rows = load_calibration(CalibrationRecipe(num_samples=4, seq_len=256), Tokenizer.from_pretrained(TRAINED_MOE)).rows
    with torch.inference_mode():
        stream = Stream.embedded(source, rows)
        for index in range(source.spec.num_layers):
            layer, seen = source.layer(index, torch.float32), dict[str, int]()

            def count(role: str, x: Tensor, seen: dict[str, int] = seen) -> None:
                seen[role] = seen.get(role, 0) + len(x)

            for number, output in stream.outputs(layer, observer=count):  # type: ignore[arg-type]
                stream.put(number, output)
            stream.advance()
            experts = [count for role, count in seen.items() if role.endswith(".gate")]
            assert len(experts) == 8
            assert min(experts) > 64  # of 1,024 tokens, with 2 experts each
