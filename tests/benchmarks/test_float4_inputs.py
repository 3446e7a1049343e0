"""Inputs are rounded as engines with NVFP4 products round them, by the rounding of compressed-tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA

from benchmarks.float4_inputs import divergence, round_inputs
from lmkit.formats.nvfp4 import NVFP4
from lmkit.qtensor import quantize


def test_inputs_are_rounded_with_the_factor_of_the_file() -> None:
    torch.manual_seed(0)
    factor, x = torch.tensor([448 * 6 / 3.0]), torch.randn(2, 5, 32)  # inputs of up to 3: a larger one saturates
    x[0, 0, 3] = 7.0
    model = torch.nn.Sequential(torch.nn.Linear(32, 4, bias=False))
    round_inputs(model, {"0": replace(quantize(model[0].weight.detach(), NVFP4), input_factor=factor)})
    groups = x.view(2, 5, 2, 16)
    scales = (groups.abs().amax(-1, keepdim=True) / 6 * factor).clamp(max=448).to(torch.float8_e4m3fn).float() / factor
    rounded = FP4_E2M1_DATA.cast_to_fp4((groups / scales).clamp(-6, 6)) * scales
    assert rounded.max() == 3
    torch.testing.assert_close(model(x), rounded.view(x.shape) @ model[0].weight.T)


def test_a_model_does_not_diverge_from_itself() -> None:
    class Model(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.logits = super().forward(ids)
            return self  # type: ignore[return-value]

    torch.manual_seed(0)
    one, other, windows = Model(8, 8), Model(8, 8), [[1, 2, 3, 4]]
    assert divergence(one, one, windows)[0] < 1e-9
    assert divergence(one, other, windows)[0] > 0.1
