"""From a checkpoint to the model of an engine. All refusals come before any weight is loaded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from lmkit import conflicts
from lmkit.config import NAMED_PEERS, EngineConfig
from lmkit.conflicts import DECODER, FIXED_STATES, FOREIGN, HEARS, OWN_CACHES, STATES, WHOLE_TEXTS
from lmkit.errors import UnsupportedError
from lmkit.formats.generation_config import SamplingDefaults, read_defaults
from lmkit.formats.sentences import Sentences, read_dimensions
from lmkit.kernels.cuda.module import tensor_device
from lmkit.kv_dtype import dense_kv_dtype
from lmkit.log import get_logger
from lmkit.models.adapters import DecoderAdapters, Part
from lmkit.models.audio import load_audio
from lmkit.models.decoder import Decoder
from lmkit.models.engines import foreign_tower
from lmkit.models.kv_storage import KVStorage, is_uncalibrated, storage_text
from lmkit.models.loader import load as load_decoder
from lmkit.models.opened import widened
from lmkit.models.packed_cache import PackedFile
from lmkit.models.resolved import ResolvedModel, resolved
from lmkit.models.shard import Shard
from lmkit.models.spec import ModelSpec
from lmkit.models.stage import Stage
from lmkit.models.streamed import forecast
from lmkit.models.tower import has_tower, load_tower
from lmkit.models.vision import Encodes
from lmkit.models.weight_bits import bits_of_linears
from lmkit.text.images import TEXT_ONLY
from lmkit.text.tokenizer_file import TokenizerFile
from lmkit.turbo.engine import copies, self_test
from lmkit.turbo.engine.classes import read_classes, sentences_of
from lmkit.turbo.engine.draft_head_loading import LoadedHead
from lmkit.turbo.engine.draft_model_loading import LoadedDraft, follow, resolved_draft
from lmkit.turbo.engine.memory import MemoryPlan, for_listeners, loaded_bytes, plan_memory
from lmkit.turbo.engine.sentences import read_layers
from lmkit.turbo.engine.streaming import streaming_of, with_batch
from lmkit.turbo.engine.which import engine_facts, engine_line
from lmkit.turbo.kv.blocks import KVBlocks, kv_identity
from lmkit.turbo.kv.tiers import wire
from lmkit.turbo.kv.tiers.block_server import BlockServer
from lmkit.turbo.kv.tiers.disk import DiskTier
from lmkit.turbo.kv.tiers.peer import PeerTier
from lmkit.turbo.kv.tiers.store import TierStore
from lmkit.turbo.no_memory import finds_memory
from lmkit.turbo.request import Classes, SelfTest, VectorLayer
from lmkit.turbo.runners.device import EngineDevice
from lmkit.turbo.runners.processes import Processes, SharedModel

log = get_logger(__name__)

UNCALIBRATED = (
    "%s KV is not calibrated: keys with large means lose much (int4: KL 0.12 on SmolLM2-135M, 0.86 on Qwen2.5-0.5B; "
    "0.011 calibrated); `lmkit quantize %s --kv-bits %d --calibration TEXT` writes a calibrated model"
)

MAX_ADAPTERS = 8  # places, if there is an adapter_root


@dataclass(frozen=True)
class LoadedModel:
    """A decoder and the decisions for it."""

    path: str
    config: EngineConfig  # of the device, with what the plan has chosen
    decoder: Decoder
    storages: list[KVStorage]
    memory: MemoryPlan
    tokenizer: TokenizerFile | None
    has_tiers: bool
    kv_identity: bytes  # of the blocks in the tiers
    disk: DiskTier | None
    sampling: SamplingDefaults
    sentences: Sentences
    layers: tuple[VectorLayer, ...]  # of embeddings
    vector_size: int  # of an embedding
    dimensions: tuple[int, ...]  # that embeddings may be cut to, see EngineInfo
    has_head: bool  # otherwise it can give embeddings alone
    mapped: list[PackedFile]  # files of packed weights whose data is still to be checked
    draft: LoadedDraft | LoadedHead | None = None
    step_bytes: int = 0  # of weights that each step reads from the disk
    tower: Encodes | str = TEXT_ONLY  # what encodes images, or why images are refused
    classes: Classes | None = None
    part: Part | None = None  # the rank's part of the model that the decoder is
    selftest: SelfTest | None = None


def load(model_path: str, config: EngineConfig, device: EngineDevice, rank: int = 0) -> LoadedModel:
    """Load a checkpoint, or a rank's part of it. `config` is the device's configuration.

    Raises CheckpointError, ConfigError or UnsupportedError.
    """
    conflicts.check(config, *device.traits)
    options = load_options(config, rank)
    streaming = streaming_of(config)
    with resolved(model_path, **options) as model, resolved_draft(config, device, model, rank) as draft:
        spec, path = model.spec, model.reader.path
        config = for_listeners(spec, config)
        conflicts.check(config, *traits_of(spec, config), architecture=spec.architecture)
        selftest = self_test.result(model, config, device)
        sampling, classes = read_defaults(path, config.generation_config), read_classes(model.source)
        sentences = sentences_of(path, config.pooling, spec, classes)
        layers, vector_size = read_layers(path, sentences, spec.hidden_size)
        dimensions = read_dimensions(path)
        weight_bytes = loaded_bytes(model, config) + (draft.memory.total if draft is not None else 0)
        dtypes = [storage.dtypes for storage in model.storages]
        # The other processes take what process 0 has planned.
        free = device.free_memory() // (1 if rank else config.num_sharing)
        copied = copies.planned_bytes(model, config)

        def plan(config: EngineConfig) -> MemoryPlan:
            return plan_memory(spec, config, dtypes, weight_bytes, free, copied)

        streamed = forecast(model, streaming) if streaming is not None else None
        if streamed is not None:
            config = with_batch(config, streamed, plan)
        memory = plan(config)
        check_peers(config)
        has_tiers = any(each is not None for each in (config.kv_host_memory, config.kv_disk_path, config.kv_peer))
        identity = kv_identity(model, config) if has_tiers else b""
        disk = _open_disk(config, identity, memory.block_bytes)
        if spec.foreign:
            log.info(engine_line(engine_facts(model, config)))
        name = spec.architecture.removesuffix("ForCausalLM")
        bits = f" of {bits_of_linears(model.source.spec, model.source.reader):.2f} bits"
        bits = bits if config.quantize == "none" else f" rounded to {config.quantize}"
        log.info("model: %s, %s weights%s, %s", name, model.source.format.name, bits, model.packing.dtype)
        if line := widened(model.reader, model.packing.dtype, model.packing.device):
            log.info(line)
        _announce(memory, model.storages, config)
        if spec.sees_all and classes is None:
            log.info("embeddings: %s", sentences.text(vector_size))
        if config.asked_kv is not None and not rank and is_uncalibrated(spec, model.storages):
            command = f"{path} -o OUT --weights none" if model.source.format.name == "dense" else "ORIGINAL -o OUT"
            log.warning(UNCALIBRATED, config.asked_kv, command, config.asked_kv.bits)
        if spec.sees_all and config.max_model_len is None and memory.max_model_len < spec.max_position:
            log.warning("max_step_tokens bounds texts: this model reads %d tokens in one step", spec.max_position)
        for line in streamed.lines(config.sequences_per_step) if streamed is not None else ():
            log.info(line)
        start, mapped = time.perf_counter(), list[PackedFile]()
        with finds_memory("the weights"):
            how: dict[str, Any] = {"packed_cache": config.packed_cache, "check": mapped.append}
            decoder = load_decoder(model, **how, streaming=streaming)
            if memory.copies:
                copies.keep(decoder)
            if rank:
                follow(decoder, config, model)
            loaded_draft = draft.load(mapped.append) if draft is not None else None
        log.info("weights loaded in %.1f s", time.perf_counter() - start)
        log.debug("weights of %s", path)
        tower = _tower(model, decoder, config) if rank == 0 else TEXT_ONLY
        has_head = model.source.has_head
    tokenizer = None if rank else TokenizerFile(path, config.chat_template)
    return LoadedModel(
        str(path), config, decoder, model.storages, memory, tokenizer, has_tiers, identity, disk, sampling, sentences,
        layers, vector_size,
        dimensions,
        has_head,
        mapped,
        loaded_draft,
        streamed.plan.step_bytes if streamed is not None else 0,
        tower,
        classes,
        Part(model.source.spec, model.shard),
        selftest,
    )  # fmt: skip


def _tower(model: ResolvedModel, decoder: Decoder, config: EngineConfig) -> Encodes | str:
    """What encodes images, or why images are refused. Raises CheckpointError for a broken tower."""
    if model.spec.audio is not None:
        return load_audio(model)
    if model.spec.vision is None and not model.source.sees:
        return TEXT_ONLY
    if model.source.sees:
        try:
            return foreign_tower(model.source, decoder, config.image_pixels)
        except UnsupportedError as error:
            log.warning("images are refused: %s", error)
            return str(error)
    if not has_tower(model):
        return "this checkpoint was saved without its vision tower"
    try:
        return load_tower(model, config.image_pixels, tensor_device(model.packing.device))
    except UnsupportedError as error:
        log.warning("images are refused: %s", error)
        return "the server does not read images as this checkpoint wants them"


def load_adapters(model: LoadedModel, config: EngineConfig) -> DecoderAdapters | None:
    """The adapters of `config`, each by its index there; the first ones have places. None if there are to be no places.

    Raises ConfigError, CheckpointError or UnsupportedError.
    """
    given = config.adapter_folders
    if not given and config.adapter_root is None:
        return None
    count = config.max_adapters or max(len(given), 0 if config.adapter_root is None else MAX_ADAPTERS)
    adapters = DecoderAdapters(model.decoder, count, model.part)
    for key, folder in enumerate(given.values()):
        adapters.read(key, folder)
        if key < count:
            adapters.place(key, key)
    if given:
        log.info("adapters: %s", ", ".join(given))
    return adapters


def _announce(memory: MemoryPlan, storages: list[KVStorage], config: EngineConfig) -> None:
    for line in memory.lines(storage_text(storages)):
        log.info(line)
    if config.audit and not config.is_invariant:
        log.info("cache hits are not audited: without --deterministic bits depend on what is computed together")
    if shortage := memory.shortage():
        log.warning(shortage)
    if memory.states and config.prefix_cache and not memory.num_snapshots:
        log.warning("the prefix cache is off: no memory is left for snapshots of recurrent states")
    log.debug("memory plan in bytes: %s", json.dumps(memory.as_dict() | {"available": memory.available}))


def load_options(config: EngineConfig, rank: int = 0) -> dict[str, Any]:
    """The arguments of `resolved` that a device's configuration gives."""
    names = ("device", "dtype", "activations", "lm_head", "quantize", "attention_sinks", "model_impl")
    return {name: getattr(config, name) for name in names} | {
        "kv_dtype": config.asked_kv,
        "shard": Shard(rank if config.num_ranks > 1 else 0, config.tp, config.ep),
        "stage": Stage(rank if config.pp > 1 else 0, config.pp),
    }


def traits_of(spec: ModelSpec, config: EngineConfig) -> tuple[str, ...]:
    """The traits of a model that rows of lmkit.conflicts name."""
    if spec.sees_all:
        return (WHOLE_TEXTS,)
    if spec.audio is not None:
        return (HEARS,)
    if spec.foreign:
        states = (STATES, FIXED_STATES) if spec.is_recurrent else ()
        return (FOREIGN, *states, *(() if spec.reusable else (OWN_CACHES,)))
    if spec.is_recurrent:
        return (STATES,) if config.target.moves_states and spec.has_kv else (STATES, FIXED_STATES)
    return ()


def given(
    decoder: Decoder, config: EngineConfig, device: EngineDevice, storages: list[KVStorage] | None
) -> LoadedModel:
    """Wrap a decoder that is on the device already. `storages` or `config` gives the KV storage. There are no tiers."""
    spec = decoder.spec
    conflicts.check(config, DECODER, *device.traits, *traits_of(spec, config), architecture=spec.architecture)
    check_peers(config)
    if storages is None:
        dtype = config.asked_kv or dense_kv_dtype(decoder.dtype)
        storages = [KVStorage(dtype, dtype)] * spec.num_layers
    wanted = copies.bytes_of(decoder, config)
    memory = plan_memory(spec, config, [s.dtypes for s in storages], 0, device.free_memory(), wanted)
    _announce(memory, storages, config)
    if memory.copies:
        with finds_memory("copies of the weights"):
            copies.keep(decoder)
    sentences = Sentences(pooling="last" if config.pooling == "auto" else config.pooling)
    return LoadedModel(
        spec.architecture, config, decoder, storages, memory, None, has_tiers=False, kv_identity=b"", disk=None,
        sampling=SamplingDefaults(), sentences=sentences, layers=(), vector_size=spec.hidden_size, dimensions=(),
        has_head=not spec.sees_all, mapped=[],
    )  # fmt: skip


def check_peers(config: EngineConfig) -> None:
    """Raise ConfigError for an address or a key file of KV transfer that cannot be used."""
    for name in ("kv_listen", "kv_peer"):
        if (address := getattr(config, name)) is not None:
            if (name, address) != ("kv_peer", NAMED_PEERS):
                wire.address_of(address, name)
            wire.read_secret(config.kv_key_file)


def _open_disk(config: EngineConfig, identity: bytes, block_bytes: int) -> DiskTier | None:
    """Open the disk tier, if one is configured. Raises ConfigError for a folder or a size that cannot be used."""
    if config.kv_disk_path is None:
        return None
    return DiskTier(config.kv_disk_path, identity, block_bytes=block_bytes, max_bytes=config.kv_disk_memory)


def open_tiers(
    config: EngineConfig, model: LoadedModel, blocks: KVBlocks
) -> tuple[TierStore | None, BlockServer | None]:
    """The tiers of a loaded model, and the server of their blocks, if they are configured. Raises ConfigError."""
    if not model.has_tiers:
        return None, None
    peer = server = kind = None
    if config.kv_listen is not None or config.kv_peer is not None:
        kind = wire.Kind(wire.read_secret(config.kv_key_file), model.kv_identity, blocks.nbytes)
    if config.kv_peer not in (None, NAMED_PEERS) and kind is not None:
        peer = PeerTier(wire.address_of(config.kv_peer, "kv_peer"), kind)
    fetches = kind if config.kv_peer is not None else None
    gives = blocks if config.kv_listen is not None else None
    host = config.kv_host_memory or 0
    tiers = TierStore(blocks, host_bytes=host, disk=model.disk, peer=peer, kind=fetches, layers=gives)
    if config.kv_listen is not None and kind is not None and tiers.filling is not None:
        address = wire.address_of(config.kv_listen, "kv_listen")
        frames = tiers.filling.frames
        server = BlockServer(address, kind, tiers.lookup_here, tiers.last_here, tiers.read_here, frames)
    return tiers, server


def start_others(
    model: LoadedModel, config: EngineConfig, device: EngineDevice, cpus: list[list[int]], lose: Callable[[str], None]
) -> Processes | None:
    """Start the other processes of the model, if several share it. They plan the same memory."""
    if config.num_processes == 1:
        return None
    sizes = {"kv_memory": model.memory.kv * config.num_processes, "max_model_len": model.memory.max_model_len}
    num_states = config.sequences_per_step + model.memory.num_snapshots
    shared = SharedModel(model.path, msgspec.structs.replace(config, **sizes), model.decoder.spec, cpus, num_states)
    return device.others(shared, lose)
