"""Blocks as bytes: every storage type, bit for bit, and nothing beside; what a identity depends on."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmkit.config import EngineConfig
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.kv_config import Numbers
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FLOAT32, FP8, INT4, INT8, KV_DTYPES, KVDtype
from lmkit.layers.batch import KVLayer, allocate_kv
from lmkit.models.identity import Packing, resolve_activations
from lmkit.models.kv_storage import KVStorage
from lmkit.models.kv_transform import KVTransform
from lmkit.models.resolved import ResolvedModel
from lmkit.turbo.kv import blocks as kv_blocks
from lmkit.turbo.kv.blocks import KVBlocks, kv_identity
from lmkit.turbo.kv.tiers.disk import DiskTier
from lmkit.turbo.kv.tiers.store import TierStore
from lmkit.turbo.plan import Load, Save
from tests.turbo.kv.tier_helpers import KV_IDENTITY, chain, collect, settle

NUM_BLOCKS = 5
TYPES = [t for t in KV_DTYPES.values() if t != FLOAT16]


def tensors(layers: list[KVLayer]) -> list[Tensor]:
    found = [t for layer in layers for t in (layer.k.data, layer.k.params, layer.v.data, layer.v.params)]
    return [t.view(torch.uint8) for t in found if t.numel()]


def random_layers(*dtypes: tuple[KVDtype, KVDtype]) -> list[KVLayer]:
    """Any bits, those of NaN included."""
    layers = [allocate_kv(NUM_BLOCKS, 2, 4, 6, pair) for pair in dtypes]
    for number, tensor in enumerate(tensors(layers)):
        tensor.copy_(torch.from_numpy(np.random.default_rng(number).integers(0, 256, tensor.shape, np.uint8)))
    return layers


def states(layers: list[KVLayer]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors(layers)]


@pytest.mark.parametrize(("k", "v"), itertools.product(TYPES, TYPES))
def test_a_block_moves_bit_for_bit(k: str, v: str) -> None:
    layers = random_layers((k, v), (v, k), (k, k))
    blocks, before = KVBlocks(layers), states(layers)
    assert blocks.nbytes == sum(t.numel() for t in before) // NUM_BLOCKS
    data = bytearray(blocks.nbytes)
    blocks.read(1, memoryview(data))
    assert all(torch.equal(a, b) for a, b in zip(states(layers), before, strict=True))
    blocks.write(3, memoryview(bytes(data)))
    for now, then in zip(states(layers), before, strict=True):
        assert torch.equal(now[3], then[1])
        assert torch.equal(now[[0, 1, 2, 4]], then[[0, 1, 2, 4]])


def test_the_order_of_a_blocks_bytes() -> None:
    layers = random_layers((INT8, FLOAT32), (BFLOAT16, INT4))
    data = bytearray(KVBlocks(layers).nbytes)
    KVBlocks(layers).read(2, memoryview(data))
    assert bytes(data) == b"".join(tensor[2].numpy().tobytes() for tensor in tensors(layers))


def test_a_block_has_the_bytes_of_the_memory_plan() -> None:
    layers = [allocate_kv(NUM_BLOCKS, 2, 4, 6, (t, t)) for t in (FLOAT32, BFLOAT16, INT8, INT4)]
    assert KVBlocks(layers).nbytes == 2 * 4 * 2 * (6 * 4 + 6 * 2 + 10 + 7)


def test_copies_are_made_one_after_the_other() -> None:
    layers = random_layers((INT8, BFLOAT16), (FLOAT32, INT4))
    before = states(layers)
    KVBlocks(layers).copy([(0, 3), (3, 1), (4, 0)])
    for now, then in zip(states(layers), before, strict=True):
        assert torch.equal(now, then[[4, 0, 2, 0, 4]])
    KVBlocks(layers).copy([])


def test_through_the_tiers_and_back(tmp_path: Path) -> None:
    layers = random_layers((INT8, INT4), (BFLOAT16, FP8))
    blocks, before, keys = KVBlocks(layers), states(layers), chain(NUM_BLOCKS)
    for host in (0, 2 * blocks.nbytes):
        disk = DiskTier(tmp_path, KV_IDENTITY, block_bytes=blocks.nbytes, max_bytes=1 << 20)
        store = TierStore(blocks, host_bytes=host, disk=disk)
        store.save([Save(key, block) for block, key in enumerate(keys)])
        settle(store)
        for tensor in tensors(layers):
            tensor.zero_()
        store.load(Load(0, keys, list(range(NUM_BLOCKS))))
        assert collect(store, loads=1)[0].num_blocks == NUM_BLOCKS
        assert all(torch.equal(now, then) for now, then in zip(states(layers), before, strict=True))
        store.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    layers = random_layers((INT8, BFLOAT16), (FP8, INT4))
    there = [
        KVLayer(*(dataclasses.replace(t, data=t.data.cuda(), params=t.params.cuda()) for t in (layer.k, layer.v)))
        for layer in layers
    ]
    for here in (layers, there):
        blocks, data = KVBlocks(here), bytearray(KVBlocks(here).nbytes)
        blocks.copy([(0, 2), (2, 4)])
        wait = blocks.read(4, memoryview(data))
        if wait is not None:
            there[0].k.data[4] = 0  # the copy has the bytes of before
            wait()
        blocks.write(1, memoryview(data))
        blocks.write(4, memoryview(data))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(tensors(layers), tensors(there), strict=True))


def checkpoint(folder: Path, value: float = 1.0, **config: Any) -> CheckpointReader:
    for name in ("source", "model"):
        (folder / name).mkdir(parents=True)
    writer = CheckpointWriter(folder / "model")
    writer.add("weight", torch.full((8,), value))
    writer.finish({"hidden_size": 64} | config, folder / "source")
    return CheckpointReader(folder / "model")


def identity_of(
    reader: CheckpointReader, storages: list[KVStorage], config: EngineConfig, device: str, dtype: str
) -> bytes:
    packing = Packing(device, dtype, resolve_activations(config.activations, device), config.lm_head)
    model = ResolvedModel(SimpleNamespace(reader=reader), packing, storages)  # type: ignore[arg-type]
    return kv_identity(model, config)


def test_whatever_decides_a_blocks_content_changes_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = checkpoint(tmp_path / "a")
    plain, config = [KVStorage(INT8, INT8)] * 2, EngineConfig()

    def of(storages: list[KVStorage] = plain, dtype: str = "float32", **changes: Any) -> bytes:
        return identity_of(reader, storages, EngineConfig(**changes), "cpu", dtype)

    same = [
        of(), of(), of(activations="int8"),
        of(max_batch_size=3, num_threads=1, kv_memory=1 << 30, prefix_cache=False),
    ]  # fmt: skip
    assert len(set(same)) == 1
    assert len(same[0]) == 32
    others = [
        of([KVStorage(INT8, INT8), KVStorage(INT8, INT4)]),
        of(plain[:1]),
        of([dataclasses.replace(plain[0], transform=KVTransform(hadamard=True)), plain[1]]),
        of([plain[1], dataclasses.replace(plain[0], transform=KVTransform(hadamard=True))]),
        of([dataclasses.replace(plain[0], transform=KVTransform(key_mean=(((1, 9.0, -4.0),), ()))), plain[1]]),
        of(
            [dataclasses.replace(plain[0], transform=KVTransform(first_key=Numbers.of(np.full((2, 8), 0.5)))), plain[1]]
        ),
        of(
            [
                dataclasses.replace(plain[0], transform=KVTransform(first_key=Numbers.of(np.full((2, 8), 0.25)))),
                plain[1],
            ]
        ),
        of([dataclasses.replace(plain[0], k_scales=(0.5, 0.5)), plain[1]]),
        of([dataclasses.replace(plain[0], v_scales=(0.5, 0.5)), plain[1]]),
        of(dtype="bfloat16"),
        of(block_size=16),
        of(attention_sinks=4),
        of(activations="exact"),
        of(lm_head="int8"),
        identity_of(reader, plain, config, "cuda", "float32"),
        identity_of(checkpoint(tmp_path / "b", value=2.0), plain, config, "cpu", "float32"),
        identity_of(checkpoint(tmp_path / "c", sliding_window=9), plain, config, "cpu", "float32"),
    ]
    monkeypatch.setattr(kv_blocks, "sources_digest", lambda patterns: "other sources")
    others.append(of())
    monkeypatch.setattr("lmkit.models.identity.sources_digest", lambda patterns: "other sources")
    others.append(of())
    assert len({same[0], *others}) == 1 + len(others)
