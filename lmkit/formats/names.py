"""The names of formats, and of what their files say of activations. No torch: recipes and options have them."""

from __future__ import annotations

from typing import Literal

# Formats that lmkit writes.
FormatName = Literal["awq", "gptq", "gptq_v2", "compressed-tensors", "fp8"]
# How an engine should run weights of 8 bits or float4: with activations rounded to the same kind, or exactly ("none").
Activations = Literal["none", "int8", "float8", "float4"]
