"""Draft heads: they draft what EAGLE-3 says, and the tokens are those of the model alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError, LMKitError, UnsupportedError
from lmkit.formats.hub import DEMO_HEAD
from lmkit.models import draft_head
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners import streams
from tests.turbo.engine.drafts import watch
from tests.turbo.engine.heads import STREAMS, Reference, with_tokens
from tests.turbo.engine.test_drafting import compare, drafts_always_pay
from tests.turbo.engine.test_engine import engine_for, requests_for, run

__all__ = ["drafts_always_pay"]


@pytest.fixture(scope="module")
def head() -> Path:
    return DEMO_HEAD


@pytest.fixture(scope="module")
def streams_of(demo_model: Path) -> Any:
    """Tokens -> the streams [tokens, 3 * hidden] that transformers computes."""
    model = LlamaForCausalLM.from_pretrained(demo_model, dtype=torch.float32)

    @torch.inference_mode()
    def compute(token_ids: list[int]) -> torch.Tensor:
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in STREAMS], -1)

    return compute


def test_drafts_are_those_of_the_reference(
    demo_model: Path, head: Path, streams_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after rejected draft tokens, and those of a text that is longer than what is kept of its streams."""
    monkeypatch.setattr(draft_head, "rounded", lambda weight: weight.float())
    embeddings = load_file(demo_model / "model.safetensors")["model.embed_tokens.weight"]
    engine = engine_for(demo_model, speculate=f"eagle={head}", max_draft_tokens=3)
    seen = watch(engine, monkeypatch)
    (first, *_) = requests_for(demo_model, max_tokens=30)
    long = [(7 * j) % 200 + 2 for j in range(streams.WINDOW + 40)]
    run(engine, [first, Request(request_id="long", prompt_ids=long, params=first.params)])
    assert min(start for _, start, _ in seen) == 1
    assert max(start for _, start, _ in seen) >= 40
    right = 0
    for token_ids, start, drafts in seen:
        reference, of_model = Reference(head, embeddings), streams_of(token_ids)
        for place in range(start, len(token_ids)):
            state, logits = reference.step(reference.state(of_model[place - 1]), token_ids[place])
        wanted = []
        for _ in drafts:
            wanted.append(int(logits.argmax()))
            state, logits = reference.step(state, wanted[-1])
        right += wanted == drafts
    assert len(seen) > 10
    assert right >= 0.95 * len(seen)  # streams are kept in bfloat16


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 2}, {"repetition_penalty": 1.2}], ids=str
)
def test_tokens_are_those_without_a_head(demo_model: Path, params: dict[str, Any]) -> None:
    compare(demo_model, Path("demo"), requests_for(demo_model, **params), how="eagle")


@pytest.mark.parametrize("options", [{"kv_dtype": "int4"}, {"overlap": False}, {"max_step_tokens": 16}], ids=str)
def test_options_of_the_engine_go_with_a_head(demo_model: Path, head: Path, options: dict[str, Any]) -> None:
    compare(demo_model, head, requests_for(demo_model), how="eagle", **options)


def test_preempted_sequences_go_on(demo_model: Path, head: Path) -> None:
    requests = requests_for(demo_model, max_tokens=100)
    block = engine_for(demo_model).info.memory["kv"] // (4 * 256 // 8)
    assert compare(demo_model, head, requests, how="eagle", kv_memory=34 * block).stats().preemptions


def test_a_head_with_fewer_tokens(demo_model: Path, tmp_path: Path) -> None:
    """It drafts none but its own."""
    own = [*range(0, 4096, 2)]
    head = with_tokens(tmp_path / "head", demo_model, own)
    engine = engine_for(demo_model, speculate=f"eagle={head}")
    drafter = engine._drafter
    assert drafter is not None
    drafted: set[int] = set()
    draft = drafter.draft

    def watched(lengths: dict[Any, int]) -> Any:
        found = draft(lengths)
        drafted.update(token for drafts in found[0].values() for token in drafts)
        return found

    drafter.draft = watched  # type: ignore[method-assign]
    run(engine, requests_for(demo_model))
    assert len(drafted) > 5
    assert drafted <= set(own)
    compare(demo_model, head, requests_for(demo_model), how="eagle")


def test_a_text_beyond_the_head_begins_again(demo_model: Path, head: Path, tmp_path: Path) -> None:
    """The head's context is shorter than the answer."""
    short = tmp_path / "short"
    shutil.copytree(head, short)
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 48}
    (short / "config.json").write_text(json.dumps(config))
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    requests = [Request(request_id="r", prompt_ids=[5, 6, 7], params=params)]
    compare(demo_model, short, requests, how="eagle", max_draft_tokens=4)


def changed(head: Path, folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A copy with other entries; None removes a tensor."""
    shutil.copytree(head, folder)
    entries = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(entries))
    weights = load_file(folder / "model.safetensors") | tensors
    save_file({name: x for name, x in weights.items() if x is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, UnsupportedError, "no EAGLE-3 head"),
        ({"norm_before_residual": True}, {}, UnsupportedError, "norm_before_residual"),
        ({"hidden_size": 128}, {}, UnsupportedError, "hidden_size"),
        ({"draft_vocab_size": 5000}, {}, CheckpointError, "draft_vocab_size"),
        ({"draft_vocab_size": 100}, {}, CheckpointError, "lm_head.weight"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, {}, CheckpointError, "three of the model"),
        ({}, {"fc.weight": None}, CheckpointError, "fc.weight is missing"),
        ({}, {"fc.weight": torch.zeros(256, 256)}, CheckpointError, r"expected \[256, 768\]"),
        (
            {"draft_vocab_size": 2},
            {"lm_head.weight": torch.zeros(2, 256), "d2t": torch.tensor([0, 5000])},
            CheckpointError,
            "d2t names tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_heads_that_cannot_be_used(
    demo_model: Path,
    head: Path,
    tmp_path: Path,
    config: dict[str, Any],
    tensors: dict[str, Any],
    error: type[LMKitError],
    message: str,
) -> None:
    folder = changed(head, tmp_path / "head", config, tensors)
    with pytest.raises(error, match=message):
        Engine(str(demo_model), EngineConfig(speculate=f"eagle={folder}"))
