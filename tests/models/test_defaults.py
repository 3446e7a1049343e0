"""Keys that config.json leaves out have the defaults of transformers' configuration classes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from lmkit.errors import LMKitError
from lmkit.models import load_spec
from lmkit.models.spec import ModelSpec
from tests.models import tiny

NAMES = [name for name in tiny.FAMILIES if name not in tiny.VISION and name != "internlm2" and "-vision" not in name]
# What cannot be left out, because no model has such a default: its classes refuse the rest, or no layer fits it.
NEEDED = {"num_hidden_layers"}


def full_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json that transformers writes for a tiny model, with every key."""
    class_name, differences = tiny.FAMILIES[name]
    options = copy.deepcopy(tiny.COMMON | differences | changes)
    config = getattr(transformers, class_name)(**options).to_dict()
    stem = class_name.removesuffix("Config").removesuffix("Text")
    return config | {"architectures": [f"{stem}ForCausalLM"]}


def completed(name: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """The same with every key, by transformers; None if it refuses it."""
    kind = getattr(transformers, tiny.FAMILIES[name][0])
    try:
        return dict(kind.from_dict(copy.deepcopy(config)).to_dict()) | {"architectures": config["architectures"]}
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, StrictDataclassError):
        return None


def spec_or_reason(config: dict[str, Any]) -> ModelSpec | str:
    try:
        return load_spec(config)
    except LMKitError as error:
        return type(error).__name__


@pytest.mark.parametrize("name", NAMES)
def test_each_key_left_out(name: str) -> None:
    config = full_config(name)
    assert isinstance(spec_or_reason(config), ModelSpec)
    compared = 0
    for key in config.keys() - {"architectures"} - NEEDED:
        rest = {other: value for other, value in config.items() if other != key}
        if (whole := completed(name, rest)) is not None and isinstance(expected := spec_or_reason(whole), ModelSpec):
            assert spec_or_reason(rest) == expected, key
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("name", NAMES)
def test_only_the_keys_of_the_class_itself(name: str) -> None:
    """tiny.COMMON gives all classes the same keys. A published config.json has its own class's alone."""
    own = {*getattr(transformers, tiny.FAMILIES[name][0])().to_dict(), "architectures"}
    config = {key: value for key, value in full_config(name).items() if key in own}
    assert isinstance(spec_or_reason(config), ModelSpec)


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
@pytest.mark.parametrize("name", tiny.VISION)
def test_each_key_of_a_part_left_out(name: str, part: str) -> None:
    """The language model's part and the tower's."""
    class_name, differences = tiny.FAMILIES[name]
    options = tiny.with_vision(copy.deepcopy(tiny.COMMON | differences), tiny.VISION[name])
    stem = class_name.removesuffix("Config")
    kind = getattr(transformers, class_name)
    config = kind(**options).to_dict() | {"architectures": [f"{stem}ForConditionalGeneration"]}
    assert isinstance(spec_or_reason(config), ModelSpec)
    compared = 0
    for key in config[part].keys() - NEEDED:
        rest = copy.deepcopy(config)
        del rest[part][key]
        if (whole := completed(name, rest)) is not None and isinstance(expected := spec_or_reason(whole), ModelSpec):
            assert spec_or_reason(rest) == expected, key
            compared += 1
    assert compared > 10


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    {"type": "yarn", "factor": 4.0, "rope_theta": 500.0, "beta_fast": 16.0},
    {"rope_type": "linear", "factor": 4.0},
    {"type": "dynamic", "factor": 3.0},
    {"rope_type": "default"},
    tiny.LLAMA3,
    {key: value for key, value in tiny.LLAMA3.items() if key != "original_max_position_embeddings"},
]


@pytest.mark.parametrize("theta", [None, 777.0])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "-".join(map(str, scaling.values())))
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "olmo3", "exaone4", "glm4", "granite",
             "smollm3", "gpt-oss", "mixtral", "qwen3-next", "deepseek-v3"]
)  # fmt: skip
def test_rope_scaling_goes_before_rope_parameters(name: str, scaling: dict[str, Any], theta: float | None) -> None:
    """With both, and with `rope_scaling` alone, as transformers 4 wrote it."""
    config = full_config(name) | {"rope_scaling": scaling} | ({} if theta is None else {"rope_theta": theta})
    for given in (config, {key: value for key, value in config.items() if key != "rope_parameters"}):
        whole = completed(name, given)
        assert whole is not None
        assert load_spec(given) == load_spec(whole)
    plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
    assert load_spec(plain) == load_spec(completed(name, plain) or {})


@pytest.mark.parametrize("outer", [{}, {"original_max_position_embeddings": 48}])
def test_longrope_beside_rope_parameters(outer: dict[str, Any]) -> None:
    config = full_config("phi3") | {"rope_scaling": LONG} | outer
    assert load_spec(config) == load_spec(completed("phi3", config) or {})
    assert load_spec(config).layers[0].rope.kind == "longrope"


def test_null_is_no_default() -> None:
    """It says that the model has no window, no soft cap, or as many key-value heads as heads."""
    assert load_spec(full_config("mistral") | {"sliding_window": None}).windows == (0, 0, 0)
    assert load_spec(full_config("gemma2") | {"final_logit_softcapping": None}).final_softcap == 0
    assert load_spec(full_config("mistral") | {"num_key_value_heads": None}).layers[0].num_kv_heads == 6
