"""kv_config.json: there and back, and refused when it is not meant for the model or for this lmkit."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkit.errors import CheckpointError
from lmkit.formats.kv_config import KVConfig, KVLayerConfig, Numbers, load_kv_config, save_kv_config
from lmkit.kv_dtype import BFLOAT16, FP8, INT4, INT8

EXAMPLE: dict[str, Any] = {
    "format": "lmkit-kv-config",
    "version": 2,
    "granularity": "per_token_per_head",
    "symmetric": False,
    "params_dtype": "float16",
    "num_kv_heads": 2,
    "head_dim": 64,
    "layers": [
        {
            "k": "int4", "v": "fp8", "smoothing": 0.7, "key_mean": [[], [[29, 310.5, -12.25], [31, 88.0, 40.0]]],
            "hadamard": True, "k_absmax": [9.5, 340.25], "v_absmax": [1.5, 3], "k_mean_ratio": [0.5, 22.0],
        },
        {"k": "dense", "v": "int8"},
    ],
}  # fmt: skip


def load(tmp_path: Path, data: Any) -> KVConfig | None:
    (tmp_path / "kv_config.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return load_kv_config(tmp_path)


def test_absent(tmp_path: Path) -> None:
    assert load_kv_config(tmp_path) is None
    (tmp_path / "kv_config.json").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_kv_config(tmp_path)


def test_example(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE)
    assert config is not None
    assert config.layers[0] == KVLayerConfig(
        k="int4", v="fp8", smoothing=0.7, key_mean=((), ((29, 310.5, -12.25), (31, 88.0, 40.0))), hadamard=True,
        k_absmax=(9.5, 340.25), v_absmax=(1.5, 3.0), k_mean_ratio=(0.5, 22.0),
    )  # fmt: skip
    assert [config.dtypes(layer, BFLOAT16) for layer in (0, 1)] == [(INT4, FP8), (BFLOAT16, INT8)]
    config.check(2, 2, 64)


def test_the_documented_example(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text().partition("## kv_config.json")[2]
    assert load(tmp_path, text.partition("```json")[2].partition("```")[0]) == load(tmp_path, EXAMPLE)
    assert load(tmp_path, EXAMPLE) is not None


storage = st.sampled_from(["dense", "int8", "fp8", "int4"])
numbers = st.floats(-1e30, 1e30)
means = st.lists(st.tuples(st.integers(0, 31), numbers, numbers), max_size=4, unique_by=lambda pair: pair[0])
statistics = st.just(()) | st.tuples(*[st.floats(0, 1e38)] * 3)
layers = st.builds(
    KVLayerConfig, k=storage, v=storage, k_absmax=statistics, v_absmax=statistics, k_mean_ratio=statistics,
    smoothing=st.none() | st.floats(0, 1), hadamard=st.booleans(),
    key_mean=st.just(()) | st.tuples(*[means.map(tuple)] * 3),
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(layers, max_size=4))
def test_there_and_back(tmp_path: Path, given_layers: list[KVLayerConfig]) -> None:
    config = KVConfig(num_kv_heads=3, head_dim=64, layers=tuple(given_layers))
    save_kv_config(config, tmp_path)
    assert load_kv_config(tmp_path) == config
    assert json.loads((tmp_path / "kv_config.json").read_text()).keys() == EXAMPLE.keys()


def numbers_of(*shape: int, value: float = 1.0) -> dict[str, Any]:
    """As the file has an array of one value."""
    data = np.full(shape, value, "<f2").tobytes()
    return {"shape": list(shape), "data": base64.b64encode(data).decode()}


def test_arrays_are_little_endian_float16_in_base64(tmp_path: Path) -> None:
    matrices = np.random.default_rng(0).normal(size=(2, 64, 64)).astype("<f2")
    layer = KVLayerConfig(k="int4", v="int4", balance=Numbers.of(matrices), first_key=Numbers.of(matrices[:, 0]))
    save_kv_config(KVConfig(num_kv_heads=2, head_dim=64, layers=(layer,)), tmp_path)
    stored = json.loads((tmp_path / "kv_config.json").read_text())
    assert stored["version"] == 3
    found = stored["layers"][0]["balance"]
    raw = np.frombuffer(base64.b64decode(found["data"]), "<f2").reshape(found["shape"])
    assert np.array_equal(raw, matrices)
    config = load_kv_config(tmp_path)
    assert config is not None
    assert config.layers == (layer,)
    assert np.array_equal(Numbers.of(np.array([1e9, -1e9])).array(), np.array([65504.0, -65504.0], np.float32))


def changed_layer(**changes: Any) -> dict[str, Any]:
    return EXAMPLE | {"layers": [EXAMPLE["layers"][0] | changes]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "`format` is None, expected 'lmkit-kv-config'"),
        (EXAMPLE | {"format": "other"}, "`format` is 'other'"),
        (EXAMPLE | {"version": 4}, "version 4, and this lmkit reads versions 2 and 3"),
        (EXAMPLE | {"version": 1}, "version 1, and this lmkit reads versions 2 and 3"),
        (EXAMPLE | {"version": True}, "version True"),
        (EXAMPLE | {"version": "1"}, "version '1'"),
        (EXAMPLE | {"rotation": "hadamard"}, "unknown field `rotation`"),
        (EXAMPLE | {"granularity": "per_channel"}, "per_channel"),
        (EXAMPLE | {"symmetric": True}, "symmetric"),
        (EXAMPLE | {"params_dtype": "float32"}, "float32"),
        (EXAMPLE | {"num_kv_heads": 0}, "num_kv_heads"),
        (EXAMPLE | {"head_dim": 64.0}, "head_dim"),
        (EXAMPLE | {"head_dim": 63}, "layer 0: int4 needs an even head_dim, not 63"),
        (EXAMPLE | {"head_dim": 96}, "layer 0: hadamard needs a head_dim that is a power of two, not 96"),
        ({name: value for name, value in EXAMPLE.items() if name != "granularity"}, "granularity missing"),
        (changed_layer(k="int5"), r"layers\[0\].k|layers\[...\].k"),
        (changed_layer(v=8), "Expected `str`, got `int`"),
        (changed_layer(smoothing=1.5), "smoothing"),
        (changed_layer(hadamard=1), "hadamard"),
        (changed_layer(key_mean=[[]]), "layer 0: key_mean has 1 items for 2 KV heads"),
        (changed_layer(key_mean=[[], [[1, 2.0, 3.0], [1, 2.0, 3.0]]]), "not 32 different ones at most"),
        (changed_layer(key_mean=[[], [[32, 2.0, 3.0]]]), r"pairs \[32\] are not"),
        (changed_layer(key_mean=[[], [[1, 2.0]]]), "key_mean"),
        (changed_layer(key_mean=[[], [[-1, 2.0, 1.0]]]), "key_mean"),
        (changed_layer(balance={"shape": [2, 64, 64], "data": ""}), "0 bytes for shape"),
        (changed_layer(first_key=numbers_of(2, 32)), r"layer 0: first_key is \[2, 32\], expected \[2, 64\]"),
        (changed_layer(first_value=numbers_of(2, 64, value=float("nan"))), "a number is not finite"),
        (changed_layer(balance=numbers_of(2, 64, 64)), "layer 0: hadamard and balance exclude each other"),
        (changed_layer(hadamard=False, balance=numbers_of(2, 64, 64)), "layer 0: balance: a matrix has no inverse"),
        (changed_layer(residual=64), "unknown field `residual`"),
        (changed_layer(k_absmax=[1.0]), "layer 0: k_absmax has 1 items for 2 KV heads"),
        (changed_layer(v_absmax=[1.0, -1.0]), "v_absmax"),
        (changed_layer(k_mean_ratio=[1.0, 1e300]), "k_mean_ratio"),
        (json.dumps(changed_layer(k_absmax=[1.0, 5.0])).replace("5.0", "1e999"), "k_absmax"),
        (json.dumps(changed_layer(k_absmax=[1.0, 5.0])).replace("5.0", "NaN"), "NaN is not a JSON number"),
        (changed_layer(k_absmax=None), "k_absmax"),
        (EXAMPLE | {"layers": [{"k": "int8"}]}, "`v`"),
        (EXAMPLE | {"layers": [{"k_bits": 8, "v_bits": 8}]}, "k_bits"),
    ],
)
def test_refused(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, data)
    assert str(tmp_path / "kv_config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((3, 2, 64), "made for 2 layers, the model has 3"),
        ((2, 4, 64), "made for 2 num_kv_heads, the model has 4"),
        ((2, 2, 128), "made for 64 head_dim, the model has 128"),
    ],
)
def test_another_model(tmp_path: Path, numbers: tuple[int, int, int], message: str) -> None:
    config = load(tmp_path, EXAMPLE)
    assert config is not None
    with pytest.raises(CheckpointError, match=message):
        config.check(*numbers)
