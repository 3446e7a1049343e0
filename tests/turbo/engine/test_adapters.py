"""Many adapters in one batch give the tokens of the merged models, and change nothing for anyone else."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_llama import make_awq
from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError, ConfigError, LMKitError, RequestError, UnsupportedError
from lmkit.models import load_spec
from lmkit.models.loader import load_model
from lmkit.models.merge import merge
from lmkit.turbo.engine.adapters import EngineAdapters
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.models import peft_folder, tiny
from tests.models.peft_folder import SlowFiles
from tests.turbo.engine.test_engine import run, tokens

OPTIONS: dict[str, Any] = {"kv_dtype": "float32", "max_model_len": 64, "block_size": 4, "max_batch_size": 40}
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, seed=1, logprobs=1)


def engine_of(path: Path, *adapters: str) -> Engine:
    return Engine.of(load_model(path), EngineConfig(**OPTIONS, adapters=adapters))


def prompt(seed: int, count: int = 9) -> list[int]:
    return torch.randint(0, 199, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(name: str, ids: list[int], adapter: str = "", **fields: Any) -> Request:
    return Request(request_id=name, prompt_ids=ids, params=PARAMS, adapter=adapter, **fields)


def set_adapter(engine: Engine, name: str, folder: str | None) -> str | None:
    """Without any step."""
    answer = engine.set_adapter(name, folder)
    while not answer.done():
        engine.adapters.advance(1.0)
    return answer.result()


def greedy(model: torch.nn.Module, ids: list[int], count: int = 8) -> list[int]:
    whole = list(ids)
    with torch.no_grad():
        for _ in range(count):
            whole.append(int(model(torch.tensor([whole])).logits[0, -1].argmax()))
    return whole[len(ids) :]


def merged(model: Any, added: dict[str, torch.Tensor]) -> Any:
    changed = copy.deepcopy(model)
    for name, delta in added.items():
        changed.get_submodule(name).weight.data += delta
    return changed


@pytest.mark.parametrize("family", ["llama", "llama-tied-bias", "qwen3", "gemma2", "mistral-window"])
def test_thirty_two_adapters_in_one_batch_are_the_merged_models(tmp_path: Path, family: str) -> None:
    model = tiny.make(tmp_path / "base", family).float()
    shapes, want, requests, folders = peft_folder.linears(model), {}, [], []
    for i in range(32):
        some = dict(list(shapes.items())[i % 3 :: 1 + i % 2])  # not all linears
        dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        config = {"use_rslora": i % 5 == 0, "lora_alpha": 3 + i}
        added = peft_folder.write(tmp_path / f"a{i}", some, i, rank=1 + i % 7, dtype=dtype, size=0.1, **config)
        folders.append(f"a{i}={tmp_path / f'a{i}'}")
        requests.append(request(f"r{i}", prompt(i % 4), f"a{i}"))
        want[f"r{i}"] = greedy(merged(model, added), prompt(i % 4))
    for i in range(4):
        requests.append(request(f"base{i}", prompt(i)))
        want[f"base{i}"] = greedy(model, prompt(i))
    engine = engine_of(tmp_path / "base", *folders)
    together = run(engine, requests)
    assert {name: tokens(outputs) for name, outputs in together.items()} == want
    assert len({tuple(ids) for ids in want.values()}) > 20  # adapters change the answers
    again = run(engine, requests[::3])  # other batches, and prefixes that are found
    plain = run(engine_of(tmp_path / "base"), requests[32:])
    for name, outputs in (again | plain).items():
        assert [o.logprobs for o in outputs] == [o.logprobs for o in together[name]], name


FUSED = ("qkv_proj", "gate_up_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a",
         "out_proj")  # fmt: skip


@pytest.mark.parametrize("family", ["phi3", "glm4", "qwen3-next-dense", "qwen3.5"])
def test_adapters_of_linears_in_one_tensor_and_of_linear_attention(tmp_path: Path, family: str) -> None:
    """Served, and merged. States do not mix: a conversation goes on from a snapshot of its own adapter."""
    model = tiny.make(tmp_path / "base", family).float()
    shapes = peft_folder.linears(model, (*peft_folder.MODULES, *FUSED))
    want, requests, folders = {}, [], []
    for i in range(4):
        some = dict(list(shapes.items())[i % 2 :: 1 + i % 2])
        added = peft_folder.write(tmp_path / f"a{i}", some, i, size=0.1)
        folders.append(f"a{i}={tmp_path / f'a{i}'}")
        requests.append(request(f"r{i}", prompt(2, 20), f"a{i}"))
        want[f"r{i}"] = greedy(merged(model, added), prompt(2, 20))
    requests.append(request("base", prompt(2, 20)))
    want["base"] = greedy(model, prompt(2, 20))
    engine = engine_of(tmp_path / "base", *folders)
    for cached in (0, 16):
        together = run(engine, requests)
        assert {name: tokens(outputs) for name, outputs in together.items()} == want
        assert all(outputs[0].cached_tokens >= cached for outputs in together.values())
    assert len({tuple(ids) for ids in want.values()}) > 2
    merge(tmp_path / "base", tmp_path / "a0", tmp_path / "merged")
    alone = run(engine_of(tmp_path / "merged"), [request("r0", prompt(2, 20))])
    assert tokens(alone["r0"]) == want["r0"]


def test_the_prefix_cache_keeps_adapters_apart(demo_model: Path, tmp_path: Path) -> None:
    shapes = {f"model.layers.{i}.self_attn.v_proj": (64, 256) for i in range(8)}
    config = json.loads((demo_model / "config.json").read_text())
    width = config["num_key_value_heads"] * config.get(
        "head_dim", config["hidden_size"] // config["num_attention_heads"]
    )
    shapes = {f"model.layers.{i}.self_attn.v_proj": (width, config["hidden_size"]) for i in range(4)}
    for i in range(2):
        peft_folder.write(tmp_path / f"a{i}", shapes, i, size=1.0)
    engine = Engine(
        str(demo_model),
        EngineConfig(max_model_len=128, block_size=8, adapters=tuple(f"a{i}={tmp_path / f'a{i}'}" for i in range(2))),
    )
    ids = prompt(1, 40)
    found = []
    for name in ("", "a0", "a1", "a0", ""):
        outputs = run(engine, [request("r", ids, name)])["r"]
        found.append((outputs[0].cached_tokens, tuple(tokens(outputs))))
    assert [cached for cached, _ in found] == [0, 0, 0, 39, 39]
    assert len({ids for _, ids in found}) == 3
    with pytest.raises(RequestError, match="no adapter 'b'") as error:
        engine.add(request("x", ids, "b"))
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize("kind", ["w4", "int8 activations"])
def test_adapters_on_quantized_weights(demo_model: Path, tmp_path: Path, kind: str) -> None:
    """Base rows keep their bits beside adapters; an adapter that adds nothing changes no token."""
    make_awq(demo_model, tmp_path / "q", group=64)
    layer = load_spec(json.loads((demo_model / "config.json").read_text())).layers[0]
    shapes = {f"model.layers.{i}.mlp.{x}_proj": layer.linears[f"mlp.{x}"] for i in range(4) for x in ("gate", "up")}
    peft_folder.write(tmp_path / "zero", shapes, 1, size=0.0)
    peft_folder.write(tmp_path / "one", shapes, 2, size=1.0)
    options = {"max_model_len": 128, "activations": "int8" if kind == "int8 activations" else "exact"}
    names = tuple(f"{name}={tmp_path / name}" for name in ("zero", "one"))
    engine, plain = (Engine(str(tmp_path / "q"), EngineConfig(**options, adapters=a)) for a in (names, ()))
    ids = prompt(3, 20)
    want = run(plain, [request("base", ids)])["base"]
    got = run(engine, [request("base", ids), request("zero", ids, "zero"), request("one", ids, "one")])
    for name in ("base", "zero"):
        assert [o.logprobs for o in got[name]] == [o.logprobs for o in want]
    assert [o.logprobs for o in got["one"]] != [o.logprobs for o in want]


MODULE = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"peft_type": "IA3"}, UnsupportedError, "peft_type 'IA3'"),
        ({"use_dora": True}, UnsupportedError, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, UnsupportedError, "init_lora_weights 'pissa'"),
        ({"bias": "all"}, UnsupportedError, "bias 'all'"),
        ({"something_new": 3}, UnsupportedError, "something_new"),
        ({"lora_alpha": 1e9}, CheckpointError, "lora_alpha"),
        ({"alpha_pattern": {"(a+)+": 3}}, UnsupportedError, "alpha_pattern"),
        ({"alpha_pattern": ["q_proj"]}, CheckpointError, "alpha_pattern: expected an object"),
        ({"r": 3}, CheckpointError, "rank 4, and adapter_config.json has r 3"),
        ({"shapes": {MODULE: (48, 47)}}, CheckpointError, r"\[48, 47\], the model has \[48, 48\]"),
        ({"shapes": {"model.layers.7.self_attn.q_proj": (48, 48)}}, CheckpointError, "takes an adapter; the nearest"),
        ({"shapes": {"lm_head": (199, 48)}}, CheckpointError, "lm_head is no linear"),
        ({"rank": 600}, CheckpointError, "lora_A and lora_B"),
        ({"dtype": torch.float64}, CheckpointError, "float64"),
    ],
)
def test_a_broken_or_foreign_adapter_is_one_clear_error(
    tmp_path: Path, change: dict[str, Any], error: type[LMKitError], says: str
) -> None:
    tiny.make(tmp_path / "base", "llama")
    change = {"shapes": {MODULE: (48, 48)}} | change
    peft_folder.write(tmp_path / "a", change.pop("shapes"), 1, **change)
    with pytest.raises(error, match=says):
        engine_of(tmp_path / "base", f"a={tmp_path / 'a'}")


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    tiny.make(tmp_path / "base", "llama")
    folder = tmp_path / "a"
    peft_folder.write(folder, {MODULE: (48, 48)}, 1)

    def opened(*adapters: str) -> None:
        engine_of(tmp_path / "base", *adapters)

    with pytest.raises(ConfigError, match="NAME=FOLDER"):
        opened(str(folder))
    with pytest.raises(ConfigError, match="twice"):
        opened(f"a={folder}", f"a={folder}")
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        opened(f"a={tmp_path}")
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({next(iter(tensors)): next(iter(tensors.values()))}, weights)
    with pytest.raises(CheckpointError, match="lora_A alone"):
        opened(f"a={folder}")
    save_file({"base_model.model.lm_head.lora_embedding_A": torch.zeros(2, 2)}, weights)
    with pytest.raises(UnsupportedError, match="no LoRA weight"):
        opened(f"a={folder}")
    weights.write_bytes(weights.read_bytes()[:20])
    with pytest.raises(CheckpointError):
        opened(f"a={folder}")
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        opened(f"a={folder}")
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="bin may run code; save it as safetensors"):
        opened(f"a={folder}")


@pytest.mark.parametrize("folder", ["a\0b", "a" * 300, "a/" * 3000, "\udcff", "é" * 200, "..", "a\n", "/", "circle"])
def test_a_folder_that_no_file_system_has_is_that_calls_error(tmp_path: Path, folder: str) -> None:
    (tmp_path / "circle").symlink_to("circle")
    adapters = EngineAdapters(None, EngineConfig(adapter_root=str(tmp_path)), tell=lambda change: None)
    with pytest.raises(RequestError, match="is no folder inside") as refusal:
        adapters.set("x", folder).result(0)
    assert refusal.value.code == "not_found"


def test_a_limit_without_a_root_is_refused(tmp_path: Path) -> None:
    tiny.make(tmp_path / "base", "llama")
    with pytest.raises(ConfigError, match="max_adapters is for adapters or an adapter_root"):
        Engine.of(load_model(tmp_path / "base"), EngineConfig(**OPTIONS, max_adapters=3))


def test_an_adapter_in_use_stays(tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "base", "llama").float()
    adapters = {name: peft_folder.write(tmp_path / name, peft_folder.linears(model), i) for i, name in enumerate("ab")}
    engine = Engine.of(
        load_model(tmp_path / "base"), EngineConfig(**OPTIONS, adapter_root=str(tmp_path), max_adapters=1)
    )
    for name in ("a", "b", "a"):  # in the same place, one after the other
        set_adapter(engine, name, "ab".replace(name, ""))
        set_adapter(engine, name, name)  # instead of the other
        engine.add(request("r", prompt(1), name))
        for folder in (None, name):
            with pytest.raises(RequestError, match="requests use"):
                set_adapter(engine, name, folder)
        set_adapter(engine, "c", "a")  # it waits for the place
        with pytest.raises(RequestError, match="use all places"):
            engine.add(request("c", prompt(1), "c"))
        set_adapter(engine, "c", None)
        found = [token for output in _all(engine) for token in output.token_ids]
        assert found == greedy(merged(model, adapters[name]), prompt(1))
        set_adapter(engine, name, None)
    with pytest.raises(RequestError, match="no adapter 'a'"):
        set_adapter(engine, "a", None)


def test_more_adapters_than_places(tmp_path: Path) -> None:
    """The one that was named longest ago gives its place."""
    model = tiny.make(tmp_path / "base", "llama").float()
    want = {"": greedy(model, prompt(1))}
    for i, name in enumerate("abcde"):
        shapes = dict(list(peft_folder.linears(model).items())[i % 2 :: 2])  # of other linears than the one before
        added = peft_folder.write(tmp_path / name, shapes, i)
        want[name] = greedy(merged(model, added), prompt(1))
    folders = tuple(f"{name}={tmp_path / name}" for name in "abcde")
    engine = Engine.of(load_model(tmp_path / "base"), EngineConfig(**OPTIONS, adapters=folders, max_adapters=2))
    for names in (["a", "b"], ["c", ""], ["b", "d"], ["e", "d"], ["a", "e"]):
        found = run(engine, [request(name, prompt(1), name) for name in names])
        assert {name: tokens(outputs) for name, outputs in found.items()} == {name: want[name] for name in names}
    assert [*engine.adapters.placed] == ["a", "e"]
    assert len({tuple(ids) for ids in want.values()}) == 6


def _all(engine: Engine) -> list[Any]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowFiles]:
    slow = SlowFiles(monkeypatch)
    yield slow
    slow.opened.set()  # a failed test leaves no thread that waits


def test_steps_go_on_while_an_adapter_is_read(tmp_path: Path, files: SlowFiles) -> None:
    """Nobody knows it before it is read. Calls are carried out one after the other."""
    model = tiny.make(tmp_path / "base", "llama").float()
    added = peft_folder.write(tmp_path / "a", peft_folder.linears(model), 1)
    engine = Engine.of(load_model(tmp_path / "base"), EngineConfig(**OPTIONS, adapter_root=str(tmp_path)))
    loaded = engine.set_adapter("a", "a")
    later = [engine.set_adapter("a", None), engine.set_adapter("a", None), engine.set_adapter("b", "a")]
    files.begun.wait()
    engine.add(request("plain", prompt(1)))
    while engine.scheduler.has_work():
        engine.step()
        with pytest.raises(RequestError, match="no adapter 'a' is loaded"):
            engine.add(request("early", prompt(1), "a"))
    assert engine.has_work()
    assert not any(answer.done() for answer in (loaded, *later))
    files.opened.set()
    _all(engine)
    assert later[0].result() is None
    assert loaded.result() == later[2].result() == str(tmp_path / "a")
    assert str(later[1].exception()) == "no adapter 'a' is loaded"
    assert tokens(run(engine, [request("r", prompt(1), "b")])["r"]) == greedy(merged(model, added), prompt(1))


def test_an_adapter_that_is_used_by_now_is_not_replaced(tmp_path: Path, files: SlowFiles) -> None:
    model = tiny.make(tmp_path / "base", "llama").float()
    for name in "ab":
        added = peft_folder.write(tmp_path / name, peft_folder.linears(model), ord(name))
    engine = Engine.of(load_model(tmp_path / "base"), EngineConfig(**OPTIONS, adapter_root=str(tmp_path)))
    files.opened.set()
    set_adapter(engine, "x", "a")
    files.opened.clear()
    answers = []
    for name in ("used", "unused"):
        loaded = engine.set_adapter("x", "b")
        if name == "used":
            engine.add(request(name, prompt(1), "x"))
        files.opened.set()
        while not loaded.done():
            engine.adapters.advance(1.0)
        answers.append(loaded)
        _all(engine)
    assert "requests use the adapter 'x'" in str(answers[0].exception())
    assert answers[1].result() == str(tmp_path / "b")
    assert tokens(run(engine, [request("r", prompt(1), "x")])["r"]) == greedy(merged(model, added), prompt(1))


def test_an_engine_that_is_closed_reads_no_more(tmp_path: Path, files: SlowFiles) -> None:
    model = tiny.make(tmp_path / "base", "llama").float()
    peft_folder.write(tmp_path / "a", peft_folder.linears(model), 1)
    before = set(threading.enumerate())
    engine = Engine.of(load_model(tmp_path / "base"), EngineConfig(**OPTIONS, adapter_root=str(tmp_path)))
    answers = [engine.set_adapter("a", "a"), engine.set_adapter("b", "a")]
    files.begun.wait()
    closing = threading.Thread(target=engine.close)
    closing.start()
    files.opened.set()
    closing.join()
    assert [str(answer.exception()) for answer in answers] == ["the engine has ended"] * 2
    assert not [one.name for one in set(threading.enumerate()) - before if one.name.startswith("adapters")]
