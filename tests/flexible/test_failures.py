"""What the flexible engine cannot do is said in one line, and an error of foreign code ends no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OlmoForCausalLM

from benchmarks.families.tiny import save_tiny
from lmkit.config import EngineConfig
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.models.loader import load_model
from lmkit.turbo.engine import loading
from lmkit.turbo.engine.describe import describe_model
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.devices import resolve_device
from tests.flexible import tiny


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pp": 2}, "is not shared by processes; leave out pp"),
        ({"lm_head": "int8"}, "keeps the head as it is; leave out lm_head"),
        ({"attention_sinks": 4}, "leave out attention_sinks"),
    ],
)
def test_options_are_refused_with_the_architecture(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    tiny.make(tmp_path, "olmo")
    config = EngineConfig(device="cpu", **options)
    with pytest.raises(ConfigError, match=rf"^OlmoForCausalLM runs on the flexible engine, which .*{reason}$"):
        loading.load(str(tmp_path), config, resolve_device(config))


def test_keys_in_caches_of_transformers_are_not_rounded(tmp_path: Path) -> None:
    tiny.make(tmp_path, "minimax")
    config = EngineConfig(device="cpu", kv_dtype="int8")
    with pytest.raises(ConfigError, match=r"keys and values in transformers' caches.*leave out kv_dtype$"):
        loading.load(str(tmp_path), config, resolve_device(config))


def test_code_of_a_repository_is_refused(tmp_path: Path) -> None:
    tiny.make(tmp_path, "olmo")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {
        "model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling.UnheardOf"},
    }  # fmt: skip
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"UnheardOfForCausalLM.*lmkit runs no code of a repository"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "is_known"), [("NoSuchModel", False), ("MyOlmoForCausalLM", False), ("OLMOForCausalLM", True)]
)
def test_a_class_that_transformers_lacks_is_refused_whatever_the_model_type(
    tmp_path: Path, name: str, is_known: bool
) -> None:
    """A file of MPT names MPTForCausalLM, which transformers calls MptForCausalLM."""
    tiny.make(tmp_path, "olmo")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    if is_known:
        load_model(tmp_path)
    else:
        with pytest.raises(UnsupportedError, match=f"LlamaForCausalLM.*{name}: transformers .* only OlmoForCausalLM"):
            load_model(tmp_path)


def test_fast_asks_for_a_family(tmp_path: Path) -> None:
    tiny.make(tmp_path, "olmo")
    with pytest.raises(UnsupportedError, match="'OlmoForCausalLM' is not supported"):
        load_model(tmp_path, model_impl="fast")


def test_what_a_family_refuses_goes_to_transformers(tmp_path: Path) -> None:
    save_tiny("llama4_text", tmp_path)  # with two experts a token
    facts = describe_model(str(tmp_path), EngineConfig(device="cpu"))["engine"]
    assert facts["name"] == "flexible"
    assert facts["why"].startswith("lmkit's family of Llama4ForCausalLM refuses it (config.json: num_experts_per_tok")
    assert "--model-impl" not in facts["fastest"]
    with pytest.raises(UnsupportedError, match=r"^config.json: num_experts_per_tok = 2"):
        load_model(tmp_path, model_impl="fast")


def test_a_model_whose_cache_forgets_what_its_mask_shows_is_refused(tmp_path: Path) -> None:
    """Its answers in transformers depend on where a prompt is cut."""
    save_tiny("moshi", tmp_path)
    reason = r"^MoshiForCausalLM: transformers keeps keys of the last 16 tokens and lets a token of .* see all$"
    with pytest.raises(UnsupportedError, match=reason):
        load_model(tmp_path)


def test_a_module_that_fails_at_the_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make(tmp_path, "olmo")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr(OlmoForCausalLM, "forward", fail)
    with pytest.raises(UnsupportedError, match=r"^OlmoForCausalLM: transformers cannot compute.*no such luck"):
        load_model(tmp_path)


def test_a_module_that_computes_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make(tmp_path, "olmo")
    name = "lmkit.models.flexible.decoder._rows"
    monkeypatch.setattr(name, lambda x, dim: torch.randn(x.shape[2], x.shape[1], dim))
    with pytest.raises(UnsupportedError, match=r"^OlmoForCausalLM: with lmkit's attention its states are not those"):
        load_model(tmp_path)


def test_an_error_of_a_step_ends_its_requests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make(tmp_path, "olmo")
    decoder: Any = load_model(tmp_path)
    engine = Engine.of(decoder, EngineConfig(max_batch_size=2, max_model_len=32, overlap=False))

    def ask(name: str) -> list[Any]:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        engine.add(Request(request_id=name, prompt_ids=[3, 4, 5], params=params))
        return [output for _ in range(4) if engine.has_work() for output in engine.step()]

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "_body", lambda *args, **options: 1 / 0)
        assert [output.error for output in ask("fails")] == ["the engine failed while computing this request"]
    assert sum(len(output.token_ids) for output in ask("works")) == 2
    engine.close()


def test_inspect_says_which_engine_serves_a_model(tmp_path: Path) -> None:
    tiny.make(tmp_path, "jamba")
    engine = describe_model(str(tmp_path), EngineConfig(device="cpu"))["engine"]
    assert engine["name"] == "flexible"
    assert engine["why"] == "lmkit has no family of JambaForCausalLM, and transformers has"
    assert engine["attention"] == "lmkit's KV blocks, states in transformers' caches, one sequence at a time"
    assert {"captured steps", "tp", "weights_memory"} <= set(engine["without"])
    assert engine["fastest"].startswith(f"lmkit serve {tmp_path}")
