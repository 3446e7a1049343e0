"""GenerationConfig: what users of other tools write means here what they mean, and every mistake names its field."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest

from lmkit import EngineConfig, GenerationConfig, RequestError
from lmkit.errors import ConfigError
from lmkit.formats.generation_config import SamplingDefaults
from lmkit.turbo.repetition import NEVER, RepetitionStop


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"stop": "ab"}, {"stop": ("ab",)}),
        ({"stop": ["ab", "c"]}, {"stop": ("ab", "c")}),
        ({"stop": ("ab",)}, {"stop": ("ab",)}),
        ({"stop": ""}, {"stop": ()}),
        ({"stop_token_ids": [5]}, {"stop_token_ids": (5,)}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"max_new_tokens": -1}, {"max_new_tokens": None}),
        ({"logprobs": False}, {"logprobs": None}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"logit_bias": {3: 5}}, {"logit_bias": {3: 5.0}}),
        ({"n": 1, "best_of": None, "bad_words": [], "spaces_between_special_tokens": True}, {}),
        ({"random_seed": None, "response_format": None, "with_cache": False}, {}),
        (dict.fromkeys(set(GenerationConfig.__struct_fields__) - {"max_new_tokens"}), {}),
    ],
)
def test_what_users_write(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert GenerationConfig(**given) == msgspec.structs.replace(GenerationConfig(), **meant)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop": 3}, "stop=3: expected list, got int"),
        ({"stop": ["a", 3]}, r"stop=\['a', 3\]: expected str, got int"),
        ({"stop_token_ids": "5"}, "stop_token_ids='5': expected list, got str"),
        ({"stop_token_ids": ["5"]}, r"stop_token_ids=\['5'\]: expected int, got str"),
        ({"temperature": "hot"}, "temperature='hot': expected float or None, got str"),
        ({"top_k": 1.5}, "top_k=1.5: expected int"),
        ({"seed": True}, "seed=True: expected int or None, got bool"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias={'3': 1.0}: expected int, got str"),
        ({"logit_bias": [3]}, "logit_bias=.*expected dict"),
        ({"ignore_eos": "yes"}, "ignore_eos='yes': expected bool, got str"),
        ({"max_new_tokens": "12"}, "max_new_tokens='12': expected int or auto or None, got str"),
        ({"n": 2}, "no field n: give the prompt several times"),
        ({"stop_words": ["a"]}, "no field stop_words: use stop"),
        ({"random_seed": 3}, "no field random_seed: use seed"),
        ({"temprature": 1.0}, "no field temprature; did you mean temperature?"),
        ({"no_such": None}, "no field no_such$"),
    ],
)
def test_a_mistake_names_its_field(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"GenerationConfig.*{message}"):
        GenerationConfig(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline_parallel_size": 2}, "no field pipeline_parallel_size: use pp"),
        ({"session_len": 2}, "no field session_len: use max_model_len"),
        ({"gpu_memory_utilization": 0.9}, "use kv_memory"),
        ({"n_ctx": 512}, "use max_model_len"),
        ({"blok_size": 32}, "did you mean block_size?"),
        ({"block_size": "32"}, "block_size='32': expected int or None, got str"),
        ({"kv_dtype": "int5"}, "kv_dtype='int5': expected auto, .*int8"),
    ],
)
def test_an_engine_config_checks_what_it_is_given(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"EngineConfig.*{message}"):
        EngineConfig(**given)


def test_fields_are_given_by_name() -> None:
    with pytest.raises(ConfigError, match="expected fields by name, got 'cpu'"):
        EngineConfig("cpu")


RULE = RepetitionStop(ngram=20, count=4)
WARM = SamplingDefaults(temperature=0.6)


def test_do_sample() -> None:
    def temperature(defaults: SamplingDefaults, **fields: Any) -> float:
        config = GenerationConfig(**fields).filled(defaults)
        config.validate(100)
        return config.params().temperature

    assert temperature(WARM, do_sample=False) == temperature(WARM, do_sample=False, temperature=0.8) == 0.0
    assert temperature(WARM, do_sample=True) == temperature(WARM) == 0.6
    assert temperature(WARM, do_sample=True, temperature=0.8) == 0.8
    for wrong in ({}, {"temperature": 0.0}):
        with pytest.raises(RequestError, match="do_sample=True: needs a temperature above 0"):
            temperature(SamplingDefaults(), do_sample=True, **wrong)


def test_type_checkers_see_every_field() -> None:
    source = inspect.getsource(GenerationConfig)
    shown = source[source.index("def __init__(") : source.index(") -> None: ...")]
    assert {line.strip().split(":")[0] for line in shown.splitlines()[3:-1]} == set(GenerationConfig.__struct_fields__)


def test_lmdeploys_names_of_the_repetition_rule() -> None:
    assert GenerationConfig(repetition_ngram_size=20, repetition_ngram_threshold=4).repetition_stop == RULE
    assert GenerationConfig(repetition_stop={"ngram": 20, "count": 4}).repetition_stop == RULE
    for off in ({"repetition_ngram_size": 0}, {"repetition_ngram_threshold": 3}):
        assert GenerationConfig(**off).params().repetition_stop == NEVER
    with pytest.raises(ConfigError, match="expected int, got str"):
        GenerationConfig(repetition_ngram_size="5", repetition_ngram_threshold=3)
    with pytest.raises(ConfigError, match="one rule"):
        GenerationConfig(repetition_stop={"ngram": 20}, repetition_ngram_size=20)
