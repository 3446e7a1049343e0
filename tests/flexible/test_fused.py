"""Kernels take the places of parts of transformers' modules whose numbers they give, and of no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lmkit.config import EngineConfig
from lmkit.models.flexible.decoder import FlexibleDecoder
from lmkit.models.flexible.fused import find_gated, norm_of
from lmkit.models.flexible.linears import PackedLinear
from lmkit.models.loader import load_model
from lmkit.turbo.engine.engine import Engine
from tests.flexible.test_tokens import PROMPT, SIZES, check
from tests.flexible.tiny import SIZES as TINY
from tests.models.test_engine_tokens import greedy

EPS = 1e-4


class Function(nn.Module):
    """A vector of weights and any function of it and the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.epsilon, self._function = nn.Parameter(torch.rand(24)), EPS, function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self.weight)


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize(
    ("function", "shift"),
    [
        (lambda x, w: unit(x) * w, 0),
        (lambda x, w: unit(x) * (1 + w), 1),
        (lambda x, w: unit(x - x.mean(-1, keepdim=True)) * w, None),
        (lambda x, w: x / (x.square().mean(-1, keepdim=True).sqrt() + EPS) * w, None),
        (lambda x, w: x / (x.square().mean() + EPS).sqrt() * w, None),
        (lambda x, w: unit(x) * w * 1.001, None),
        (lambda x, w: x.new_zeros(5), None),
    ],
)
def test_a_norm_is_what_its_numbers_say(function: Callable[[Tensor, Tensor], Tensor], shift: int | None) -> None:
    module = Function(function)
    found = norm_of(module)
    assert (found is not None) == (shift is not None)
    if found is not None:
        assert found.eps == EPS
        torch.testing.assert_close(found.weight, module.weight.detach() + (shift or 0))


class MLP(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], factor: float = 1.0) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self._function, self._factor = function, factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self._function(self.first(x), self.second(x))) * self._factor
        return y


@pytest.mark.parametrize(
    ("mlp", "wanted"),
    [
        (MLP(lambda a, b: nn.functional.silu(a) * b), ("first", "silu")),
        (MLP(lambda a, b: a * nn.functional.gelu(b, approximate="tanh")), ("second", "gelu_tanh")),
        (MLP(lambda a, b: nn.functional.gelu(a) * b), None),
        (MLP(lambda a, b: nn.functional.silu(a).clamp(max=10) * b), None),
        (MLP(lambda a, b: nn.functional.silu(a) * b, 2.0), None),
    ],
)
def test_a_gate_is_what_its_numbers_say(mlp: MLP, wanted: tuple[str, str] | None) -> None:
    pair = ("m.first", "m.second")
    found = list(find_gated(nn.ModuleDict({"m": mlp}), dict.fromkeys(pair, pair)))
    assert [(each.gate, each.activation) for each in found] == ([(f"m.{wanted[0]}", wanted[1])] if wanted else [])


def test_a_llama_has_all_of_them(tmp_path: Path) -> None:
    torch.manual_seed(3)
    options: dict[str, Any] = TINY | {"num_key_value_heads": 2, "tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **options), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, model_impl="flexible")
    assert isinstance(decoder, FlexibleDecoder)
    layer: Any = decoder.module.model.layers[1]
    assert isinstance(decoder.module.lm_head, PackedLinear)
    assert layer.self_attn.q_proj.product.norm is not None
    assert layer.mlp.gate_proj.product.norm is not None
    assert layer.mlp.gate_proj.linear.activation == "silu"
    called: list[object] = []
    layer.mlp.up_proj.register_forward_hook(lambda *_: called.append(None))
    engine = Engine.of(decoder, EngineConfig(**SIZES))
    prompts = [PROMPT, PROMPT[3:]]
    answers = greedy(engine, prompts, 10)
    engine.close()
    check(model, prompts, answers)
    assert not called
