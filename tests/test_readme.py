"""The README: its counts of families and formats are those of lmkit, each pair of them runs, and its links lead on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkit.config import EngineConfig
from lmkit.formats.base import FORMATS
from lmkit.formats.gguf_config import ARCHITECTURES
from lmkit.models import registry
from lmkit.models.source import ModelSource
from lmkit.quant.run import prepare
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.models import tiny
from tests.quant.helpers import recipe, tiny_checkpoint

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
CT_SCHEME = {"format": "compressed-tensors", "scheme": {"group_size": 32, "symmetric": True}}
FP8 = {
    "format": "fp8",
    "scheme": {"bits": 8, "type": "float", "group_size": "block"},
    "activations": "float8",
}
# A name in the README -> the formats of lmkit that it means, and a recipe's sections that make the first of them.
COLUMNS = {
    "dense": (("dense",), None),
    "AWQ": (("awq", "awq_gemv", "awq_gemv_fast"), {"format": "awq"}),
    "GPTQ": (("gptq", "gptq_v2"), {"format": "gptq", "scheme": {"group_size": 32, "symmetric": True}}),
    "compressed-tensors": (("compressed-tensors",), CT_SCHEME),
    "FP8 blocks": (("fp8",), FP8),
}
# A row of docs/families.md -> its architecture, and a tiny model of it.
ROWS = {
    "Llama 2, 3": ("LlamaForCausalLM", "llama"),
    "Mistral": ("MistralForCausalLM", "mistral"),
    "Ministral": ("MinistralForCausalLM", "ministral"),
    "Ministral 3": ("Ministral3ForCausalLM", "ministral3"),
    "Mistral 3, with its tower": ("Mistral3ForConditionalGeneration", "mistral3-vision"),
    "Llama 4": ("Llama4ForCausalLM", "llama4"),
    "Llama 4 (text, beside a tower)": ("Llama4ForConditionalGeneration", "llama4-vision"),
    "Qwen2, Qwen2.5": ("Qwen2ForCausalLM", "qwen2"),
    "Qwen2-VL": ("Qwen2VLForConditionalGeneration", "qwen2-vl"),
    "Qwen2.5-VL": ("Qwen2_5_VLForConditionalGeneration", "qwen2.5-vl"),
    "Qwen3-VL": ("Qwen3VLForConditionalGeneration", "qwen3-vl"),
    "Qwen3-VL-MoE": ("Qwen3VLMoeForConditionalGeneration", "qwen3-vl-moe"),
    "InternVL": ("InternVLForConditionalGeneration", "internvl"),
    "Qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "Gemma": ("GemmaForCausalLM", "gemma"),
    "Gemma 2": ("Gemma2ForCausalLM", "gemma2"),
    "Gemma 3 (text)": ("Gemma3ForCausalLM", "gemma3"),
    "Gemma 3, with its tower": ("Gemma3ForConditionalGeneration", "gemma3-vision"),
    "Gemma 4": ("Gemma4ForCausalLM", "gemma4-values"),
    "Gemma 4 (text, beside towers)": ("Gemma4ForConditionalGeneration", "gemma4-vision"),
    "Gemma 4 Unified": ("Gemma4UnifiedForCausalLM", "gemma4-unified"),
    "Gemma 4 Unified (text, beside embedders)": (
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4-unified-vision",
    ),
    "Granite": ("GraniteForCausalLM", "granite"),
    "Granite 3 with experts": ("GraniteMoeForCausalLM", "granite-moe"),
    "Granite SWA": ("GraniteSWAForCausalLM", "granite-swa"),
    "Granite 4": ("GraniteMoeHybridForCausalLM", "granite-hybrid"),
    "OLMo 2": ("Olmo2ForCausalLM", "olmo2"),
    "OLMo 3": ("Olmo3ForCausalLM", "olmo3"),
    "OLMo Hybrid": ("OlmoHybridForCausalLM", "olmo-hybrid"),
    "Kimi Linear": ("KimiLinearForCausalLM", "kimi-linear"),
    "Ling 3.0": ("BailingHybridForCausalLM", "bailing-hybrid"),
    "EXAONE 4": ("Exaone4ForCausalLM", "exaone4"),
    "SmolLM 3": ("SmolLM3ForCausalLM", "smollm3"),
    "InternLM 3": ("InternLM3ForCausalLM", "internlm3"),
    "Seed-OSS": ("SeedOssForCausalLM", "seed-oss"),
    "Phi-3, Phi-4": ("Phi3ForCausalLM", "phi3"),
    "GLM-4": ("GlmForCausalLM", "glm"),
    "GLM-4-0414": ("Glm4ForCausalLM", "glm4"),
    "InternLM 2": ("InternLM2ForCausalLM", "internlm2"),
    "gpt-oss": ("GptOssForCausalLM", "gpt-oss"),
    "Mixtral": ("MixtralForCausalLM", "mixtral"),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", "qwen2-moe"),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "qwen3-moe"),
    "Qwen3-Next": ("Qwen3NextForCausalLM", "qwen3-next"),
    "Qwen3.5": ("Qwen3_5ForCausalLM", "qwen3.5"),
    "Qwen3.5-MoE": ("Qwen3_5MoeForCausalLM", "qwen3.5-moe"),
    "Qwen3.5, with its tower": ("Qwen3_5ForConditionalGeneration", "qwen3.5-vl"),
    "Qwen3.5-MoE, with its tower": ("Qwen3_5MoeForConditionalGeneration", "qwen3.5-moe-vision"),
    "LFM2": ("Lfm2ForCausalLM", "lfm2"),
    "LFM2-MoE": ("Lfm2MoeForCausalLM", "lfm2-moe"),
    "Mamba-2": ("Mamba2ForCausalLM", "mamba2"),
    "GLM-4.5": ("Glm4MoeForCausalLM", "glm4-moe"),
    "dots.llm1": ("Dots1ForCausalLM", "dots1"),
    "DeepSeek-V2, V2-Lite": ("DeepseekV2ForCausalLM", "deepseek-v2"),
    "DeepSeek-V3, R1": ("DeepseekV3ForCausalLM", "deepseek-v3"),
    "DeepSeek-V3.2": ("DeepseekV32ForCausalLM", "deepseek-v3.2"),
    "GLM-5": ("GlmMoeDsaForCausalLM", "glm-5"),
    "GLM-4.7-Flash": ("Glm4MoeLiteForCausalLM", "glm4-moe-lite"),
    "MiniMax-M2": ("MiniMaxM2ForCausalLM", "minimax-m2"),
    "MiMo-V2-Flash": ("MiMoV2FlashForCausalLM", "mimo-v2-flash"),
    "OLMoE": ("OlmoeForCausalLM", "olmoe"),
    "ERNIE 4.5": ("Ernie4_5ForCausalLM", "ernie4.5"),
    "ERNIE 4.5 with experts": ("Ernie4_5_MoeForCausalLM", "ernie4.5-moe"),
    "Bamba": ("BambaForCausalLM", "bamba"),
    "Falcon-H1": ("FalconH1ForCausalLM", "falcon-h1"),
    "Zamba2": ("Zamba2ForCausalLM", "zamba2-plain"),
    "Nemotron-H": ("NemotronHForCausalLM", "nemotron-h"),
    "Nemotron 3 Nano": ("NemotronHForCausalLM", "nemotron-3"),
    "Nemotron 3 Super": ("NemotronHForCausalLM", "nemotron-3-super"),
    "Command R7B, Command A": ("Cohere2ForCausalLM", "cohere2"),
    "Solar Open": ("SolarOpenForCausalLM", "solar-open"),
    "Hunyuan": ("HunYuanDenseV1ForCausalLM", "hunyuan"),
    "Hunyuan A13B": ("HunYuanMoEV1ForCausalLM", "hunyuan-moe"),
    "Hunyuan 3": ("HYV3ForCausalLM", "hy-v3"),
    "Arcee AFM": ("ArceeForCausalLM", "arcee"),
    "OPT": ("OPTForCausalLM", "opt"),
}

HEARING = {"WhisperForConditionalGeneration"}  # docs/audio.md has them


def test_every_family_and_format_has_a_place() -> None:
    said = re.sub(r"\s+", " ", README)
    assert f"The {len(ROWS)} families of [docs/families.md](docs/families.md)" in said
    assert "run in every weight format: dense, AWQ, GPTQ, compressed-tensors and FP8 blocks." in said
    assert f"GGUF files of {len(ARCHITECTURES)} architectures" in said
    with pytest.raises(Exception, match="architecture"):
        registry.load_spec({"architectures": ["NobodysForCausalLM"]})
    families = set(registry.FAMILIES) - HEARING
    writing = {name for name in families if not name.endswith(registry.BASE)}
    assert {architecture for architecture, _ in ROWS.values()} == writing
    assert families - writing == {f"{name}{registry.BASE}" for name in tiny.ENCODERS | tiny.EMBEDDING}
    read = {name for names, _ in COLUMNS.values() for name in names} | {
        "mxfp4",
        "modelopt",
        "bitsandbytes",
        "gguf",
    }  # read only
    assert read == {form.name for form in FORMATS}


def _cases() -> Iterator[Any]:
    """All pairs of a family and a format. The short run has one of each family, and of each format at least one."""
    for i, row in enumerate(ROWS):
        for j, column in enumerate(COLUMNS):
            yield pytest.param(row, column, marks=[] if i % len(COLUMNS) == j else pytest.mark.exhaustive)


@pytest.mark.parametrize(("row", "column"), _cases())
def test_a_family_runs_in_a_format(tmp_path: Path, row: str, column: str) -> None:
    names, sections = COLUMNS[column]
    path = source = tiny_checkpoint(tmp_path / "source", ROWS[row][1], num_hidden_layers=2)  # the last may be sparse
    if sections is not None:
        path = tmp_path / "quantized"
        asked = recipe(calibration={"num_samples": 1, "seq_len": 48}, **sections)
        prepare(source, asked).run(path)
    assert ModelSource(path).format.name == names[0]
    engine = Engine(str(path), EngineConfig(packed_cache=False, max_model_len=64, max_batch_size=1))
    engine.add(Request(request_id="a", prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=2, ignore_eos=True)))
    tokens = []
    while engine.has_work():
        tokens += [token for output in engine.step() for token in output.token_ids]
    engine.close()
    assert len(tokens) == 2


def test_links_lead_somewhere() -> None:
    root = Path(__file__).resolve().parents[1]
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README.replace("\n", " "))
    missing = [target for target in targets if not target.startswith("http") and not (root / target).exists()]
    assert targets
    assert not missing
