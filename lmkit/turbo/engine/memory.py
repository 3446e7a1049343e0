"""The memory plan of an engine, made and logged before anything is loaded. No torch: `lmkit inspect` uses it too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.kv_dtype import KVDtype
from lmkit.models.kv_layout import KVLayout, layout_of
from lmkit.models.spec import ModelSpec
from lmkit.models.stage import Stage
from lmkit.turbo.host_memory import available_memory, gib
from lmkit.turbo.kv.manager import KVLimits
from lmkit.turbo.kv.tiers.host import check_host_bytes
from lmkit.turbo.plan import CAPTURED_TOKENS, DRAFTED_TOKENS
from lmkit.turbo.runners.captured_sizes import decode_sizes, draft_sizes, mixed_sizes
from lmkit.turbo.scheduling.limits import SchedulerLimits

if TYPE_CHECKING:
    from lmkit.models.resolved import ResolvedModel

ADDED_ROWS = 64  # whose additions of adapters stand beside a product; kernels/cpu/low_rank.py takes no more at a time
GPU_SCRATCH_BYTES = 64 << 20  # of a product; kernels/cuda/gemm_plan.py takes no plan with more
LAUNCHES = 11  # of a layer in a captured step, on average of all sizes: a test counts 9.7, and 15 in the largest
# Of a graph's launch on the device. This is a guess, about what others' engines report. The log of a capture and
# `benchmarks.gpu` say what graphs have taken.
LAUNCH_BYTES = 16 << 10
EXCHANGE_BYTES = 9 << 20  # of a rank, for the others to read; kernels/cuda/ranks.py takes no more
LINK_STREAMS = 4  # residual streams of a stage: kernels/cuda/stages.py has two on their way, and one at each end
RECORD_BYTES = 64  # of a block of a model without keys and values: what the host counts of it
LISTENERS = 8  # sequences of a step that hear
SNAPSHOTS = 16  # of recurrent state, for each sequence of the batch, unless they exceed their share
SNAPSHOT_SHARE = 0.25  # of the memory left after the weights
COPIES_SHARE = 0.5  # of the memory left after the weights, which copies of weights take at most


def loaded_bytes(model: ResolvedModel, config: EngineConfig) -> int:
    """Bytes of the weights that are in memory at a time, with their tables and adapters."""
    tables = model.table_bytes(config.max_model_len or model.spec.max_position)
    files = [Path(folder) / "adapter_model.safetensors" for folder in config.adapter_folders.values()]
    weights = min(model.weight_bytes(), config.weights_memory or model.weight_bytes())
    if model.spec.vision is not None:
        from lmkit.models.tower import tower_bytes

        images = tower_bytes(model)
        weights += images + (config.image_memory if images else 0)
    elif model.spec.audio is not None:
        from lmkit.models.audio import audio_bytes

        weights += audio_bytes(model) + config.image_memory
    elif model.source.sees:
        weights += config.image_memory  # transformers' module has the tower
    sizes = sorted((file.stat().st_size for file in files if file.is_file()), reverse=True)
    return weights + tables + sum(sizes[: config.max_adapters] if config.target.own_memory else sizes)


def for_listeners(spec: ModelSpec, config: EngineConfig) -> EngineConfig:
    """With a smaller batch than usual, unless a size is given, if each sequence has the keys and values of an audio."""
    if spec.memory is None or config.max_batch_size is not None:
        return config
    return replace(config, max_batch_size=LISTENERS)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and the KV blocks and tokens that they hold."""

    weights: int
    workspace: int  # activations and logits of the largest step
    host: int  # KV that left the device
    kv: int
    available: int
    block_bytes: int  # of the layers of a KV group
    num_blocks: int
    num_tokens: int  # tokens that the blocks hold in sequences of max_model_len
    max_model_len: int
    wanted_len: int  # the model's context, or the one that was asked for
    wanted_kv: int  # bytes of KV for one sequence of that length
    layout: KVLayout
    runtime: int  # see Device.runtime_bytes
    states: int = 0  # recurrent states, one for each sequence of the batch, and what its draft tokens keep for it
    snapshots: int = 0  # of these states, for the prefix cache
    num_snapshots: int = 0
    audio: int = 0  # keys and values of an encoder's states, for each sequence of the batch
    copies: int = 0  # of weights, in 16 bits; 0 if they found no room
    whole_texts: bool = False  # the KV is that of the texts of a step, and nothing is kept
    has_kv: bool = True  # without it, blocks are only counted: they say how many tokens the states have seen

    @property
    def total(self) -> int:
        """Bytes of all but the runtime."""
        of_sequences = self.states + self.snapshots + self.audio
        return self.weights + self.copies + self.workspace + of_sequences + self.host + self.kv

    def to_come(self, config: EngineConfig) -> int:
        """Bytes of host memory that an engine takes after it has loaded the weights."""
        return self.host if config.target.own_memory else self.total - self.weights - self.copies + self.runtime

    def lines(self, kv_dtype: str) -> list[str]:
        """The plan in lines of at most 55 characters. `kv_dtype` names the storage."""
        used = self.total - self.host + self.runtime
        host = [f"KV that leaves the cache: {gib(self.host)} of host memory"] if self.host else []
        cache = f"{'texts' if self.whole_texts else 'KV cache'}: {kv_dtype}, {gib(self.kv)} for"
        return [
            f"{cache if self.has_kv else 'no KV cache: states of'} {self.num_tokens:,} tokens",
            f"{'longest text' if self.whole_texts else 'context'}: {self.max_model_len:,} tokens",
            f"memory: {gib(used)} of {gib(self.available)}, weights {gib(self.weights)}",
            *([f"copies of weights in 16 bits: {gib(self.copies)}"] if self.copies else []),
            *([f"audio of all sequences: {gib(self.audio)}"] if self.audio else []),
            *(
                [f"states: {gib(self.states)}, {self.num_snapshots} snapshots: {gib(self.snapshots)}"]
                if self.states
                else []
            ),
            *host,
        ]

    def shortage(self) -> str:
        """A warning if the memory is too small for the model's context, or an empty text."""
        if self.max_model_len == self.wanted_len:
            return ""
        room = self.available - (self.total - self.kv) - self.runtime
        larger = f"set kv_memory {-(-self.wanted_kv >> 20)}M, " if self.wanted_kv <= room else "free memory, "
        if not self.has_kv:
            return (
                f"the context is cut to {self.max_model_len:,} of the model's {self.wanted_len:,} tokens: records of "
                f"blocks have {gib(self.kv)}; {larger}or set max_model_len {self.max_model_len}"
            )
        if self.whole_texts:
            return (
                f"texts of more than {self.max_model_len:,} of the model's {self.wanted_len:,} tokens find no room: "
                f"{gib(self.kv)} is planned for texts, and the longest needs {gib(self.wanted_kv)}; {larger}or set "
                f"max_model_len {self.max_model_len}"
            )
        return (
            f"the context is cut to {self.max_model_len:,} of the model's {self.wanted_len:,} tokens: the KV cache has "
            f"{gib(self.kv)}, and a full context needs {gib(self.wanted_kv)}; {larger}use a smaller kv_dtype (int8, "
            f"int4), or set max_model_len {self.max_model_len}"
        )

    def as_dict(self) -> dict[str, int]:
        purposes = {"weights": self.weights, "workspace": self.workspace, "runtime": self.runtime}
        states = {"states": self.states, "snapshots": self.snapshots} if self.states else {}
        copies = {"copies": self.copies} if self.copies else {}
        audio = {"audio": self.audio} if self.audio else {}
        return purposes | copies | states | audio | {"host": self.host, "kv": self.kv}


def kv_limits(
    spec: ModelSpec, config: EngineConfig, layout: KVLayout, num_blocks: int, num_snapshots: int = 0
) -> KVLimits:
    """The KV limits of an engine with a pool of `num_blocks` blocks."""
    return KVLimits(
        num_blocks=num_blocks,
        block_size=config.tokens_per_block,
        classes=layout.classes,
        max_step_tokens=config.tokens_per_step,
        prefix_cache=config.prefix_cache
        and spec.reusable
        and not spec.sees_all
        and (num_snapshots > 0 or not spec.is_recurrent),
        first_snapshot=config.sequences_per_step,
        num_snapshots=num_snapshots,
        cache_quota=config.cache_quota,
        session_lease=config.session_lease,
        dynamic_length=spec.dynamic_length,
        long_prompts_agree=spec.long_prompts_agree,
    )


def scheduler_limits(config: EngineConfig, memory: MemoryPlan, spec: ModelSpec) -> SchedulerLimits:
    """What an engine with this plan shares out."""
    return SchedulerLimits(
        kv=kv_limits(spec, config, memory.layout, memory.num_blocks, memory.num_snapshots),
        max_batch_size=config.sequences_per_step,
        max_step_tokens=config.tokens_per_step,
        max_model_len=memory.max_model_len,
        max_queue=config.max_queue,
        vocab_size=spec.vocab_size,
        priority_seconds=config.priority_seconds,
        max_overtakes=config.max_overtakes,
        decode_slowdown=config.decode_slowdown,
        request_timeout=config.request_timeout,
        max_draft_tokens=config.num_draft_tokens,
        draft_history=config.draft_history,
        audit=config.audit if config.is_invariant and not spec.foreign else 0,
        overlaps=config.overlap,
        num_stages=config.pp,
        whole_texts=spec.sees_all,
        whole_images=spec.images_whole,
    )


def plan_memory(
    spec: ModelSpec,
    config: EngineConfig,
    kv_dtypes: list[tuple[KVDtype, KVDtype]],
    weight_bytes: int,
    available: int | None = None,
    copies: int = 0,
) -> MemoryPlan:
    """Size the block pool. Raises a ConfigError that says what to change if the model or one sequence cannot fit.

    With `kv_memory` the pool has that size. Without it, the pool holds max_batch_size full sequences, or as many as
    its shares of the memory hold (see Device). Without `max_model_len` the context shrinks to what the pool
    can hold; with it, one sequence of that length may take more than `guest_share`.

    `copies`: bytes of the copies of weights, which are left out if they would take more than their share, or KV that
    was asked for.

    `available` is the memory of the device. If that is its own, the host tier takes host memory.
    """
    device = config.target
    free = available_memory() if available is None else available
    asked = asked_kv(config, free)
    layout = layout_of(spec, config.attention_sinks, kv_dtypes)
    num_groups = len(layout.groups)
    stages = Stage(0, config.pp).cut(spec)
    block_bytes = config.tokens_per_block * max(_token_bytes(spec, kv_dtypes, layout, layers) for layers in stages)
    block_bytes = block_bytes or RECORD_BYTES
    workspace = _gpu_workspace_bytes(spec, config, num_groups) if device.own_memory else _workspace_bytes(spec, config)
    states = config.sequences_per_step * max(_state_bytes(spec, config.num_draft_tokens, layers) for layers in stages)
    audio = 0
    if spec.memory is not None:
        of_layers = (spec.memory.num_bytes(config.tokens_per_block, *dtypes) for dtypes in kv_dtypes)
        audio = config.sequences_per_step * sum(of_layers)
    host = config.kv_host_memory or 0
    check_host_bytes(host, block_bytes)
    if device.own_memory and host > (on_host := available_memory()):
        raise ConfigError(f"kv_host_memory {gib(host)} is more than the {gib(on_host)} of host memory that is free")
    runtime = device.runtime_bytes
    left = free - weight_bytes - workspace - states - audio - runtime - (0 if device.own_memory else host)
    num_snapshots = 0
    if spec.is_recurrent and config.prefix_cache and spec.reusable:
        room = min(int(left * SNAPSHOT_SHARE), left - (asked or 0))
        num_snapshots = max(0, min(SNAPSHOTS * config.sequences_per_step, room // spec.state_bytes))
        left -= num_snapshots * spec.state_bytes
    if left < num_groups * block_bytes:
        raise ConfigError(
            f"this model needs {gib(weight_bytes)} for weights and "
            f"{gib(workspace + states + audio + runtime + host)} to run, but only {gib(free)} of memory is free; "
            "quantize it, or lower max_step_tokens, max_batch_size, kv_host_memory"
        )
    all_left = left * config.num_processes
    if asked is not None and asked > all_left:
        raise ConfigError(f"kv_memory {gib(asked)} is more than the {gib(all_left)} left after the weights; lower it")
    longest = min(spec.max_position, config.tokens_per_step) if spec.sees_all else spec.max_position
    wanted_len = max_model_len = config.max_model_len or longest
    if wanted_len > spec.max_position:
        raise ConfigError(f"max_model_len {wanted_len} exceeds the model's context of {spec.max_position}")
    if wanted_len > longest:
        raise ConfigError(f"max_model_len {wanted_len}: this model reads a text in one step; raise max_step_tokens")
    blocks_per_sequence = kv_limits(spec, config, layout, 0).blocks_for(wanted_len)
    one_sequence = blocks_per_sequence * block_bytes
    share = device.kv_share
    room = int((left - copies) * share) if asked is None else left - copies
    copies = copies if copies <= left * COPIES_SHARE and (asked or one_sequence) <= room else 0
    left -= copies
    guest = max(int(free * device.guest_share), one_sequence if config.max_model_len else 0)
    by_default = min(int(left * share), guest, one_sequence * config.sequences_per_step)
    budget = by_default if asked is None else asked // config.num_processes
    num_blocks = budget // block_bytes
    limits = kv_limits(spec, config, layout, num_blocks, num_snapshots)
    if num_blocks < num_groups:
        needed = num_groups * block_bytes
        raise ConfigError(f"a KV budget of {gib(budget)} holds no block of {gib(needed)}; raise kv_memory")
    if num_blocks < blocks_per_sequence:
        fits = limits.longest
        if config.max_model_len is not None:
            decoders = "of KV cache and", ", or use kv_dtype int8/int4"
            of_what, smaller = ("of memory and", "") if spec.sees_all else decoders
            raise ConfigError(
                f"one sequence of {wanted_len} tokens needs {gib(one_sequence)} {of_what} {gib(budget)} "
                f"is planned; lower max_model_len to {fits}, raise kv_memory{smaller}"
            )
        max_model_len = fits
    return MemoryPlan(
        weights=weight_bytes,
        workspace=workspace,
        host=host,
        kv=num_blocks * block_bytes,
        available=free,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        num_tokens=limits.capacity(max_model_len),
        max_model_len=max_model_len,
        wanted_len=wanted_len,
        wanted_kv=one_sequence,
        layout=layout,
        runtime=runtime,
        states=states,
        audio=audio,
        snapshots=num_snapshots * spec.state_bytes,
        num_snapshots=num_snapshots,
        copies=copies,
        whole_texts=spec.sees_all,
        has_kv=spec.has_kv,
    )


def asked_kv(config: EngineConfig, free: int) -> int | None:
    """The bytes that `kv_memory` asks for, of all processes, where each has `free` bytes. None: it asks for none."""
    if isinstance(config.kv_memory, str):
        return int(free * config.num_processes * float(config.kv_memory.removesuffix("%")) / 100)
    return config.kv_memory


def _token_bytes(spec: ModelSpec, kv_dtypes: list[tuple[KVDtype, KVDtype]], layout: KVLayout, layers: range) -> int:
    """Bytes of a token of one KV group in these layers. Layers of different groups share places."""
    places = layout.places()
    by_place = {
        places[layer][1]: spec.layers[layer].kv_token_bytes(*kv_dtypes[layer])
        for layer in layers
        if (kv := spec.layers[layer].kv) is not None and kv.source is None
    }
    return sum(by_place.values())


def _state_bytes(spec: ModelSpec, num_draft_tokens: int, layers: range) -> int:
    """Bytes of the recurrent state of a sequence in these layers, with what its draft tokens keep for it."""
    states = (spec.layers[layer].recurrent for layer in layers)
    return sum(state.num_bytes + num_draft_tokens * state.draft_bytes for state in states if state is not None)


def _workspace_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """float32 activations of the widest point of a layer, what adapters add there, activations of experts, what the
    choice of keys takes, and two copies of the step's logits."""
    tokens = config.tokens_per_step
    widest = max(layer.activation_bytes() for layer in spec.kinds)
    of_experts = max(layer.places_bytes(tokens) for layer in spec.kinds)
    rows = min(config.sequences_per_step, tokens)
    added = 0
    if config.adapters or config.adapter_root is not None:
        added = 4 * min(tokens, ADDED_ROWS) * max(layer.widest_product for layer in spec.kinds)
    of_layer = max(tokens * widest + added, of_experts)
    chosen = max(layer.choice_bytes(config.max_model_len or spec.max_position) for layer in spec.kinds)
    return of_layer + chosen + 4 * 2 * rows * spec.vocab_size + 4 * 3 * tokens * spec.token_width


def _gpu_workspace_bytes(spec: ModelSpec, config: EngineConfig, num_groups: int) -> int:
    """The sum of these parts:

    - activations of 16 bits and the float32 stream at the widest point of a layer, or of experts,
    - what a product takes beside its operands and results: sums of ranges, and inputs in another order,
    - the largest linear's weights, dequantized,
    - all of it again for the largest captured step with prompt tokens, whose memory is its own,
    - logits three times: the captured steps' own buffer, a step's logits, and the sampler's copy,
    - the pinned block tables, twice,
    - plain keys and values of latent attention's prompts,
    - of several ranks, the memory that they read of each other, and a rank's part of the logits; of several stages,
      streams that come and go,
    - draft tokens that a step of a model with recurrent states takes first,
    - the graphs of captured steps.
    """
    widest = max(layer.activation_bytes(half=True) for layer in spec.kinds)
    outputs = max(layer.widest_product for layer in spec.kinds)
    drafted = min(config.sequences_per_step * (1 + config.num_draft_tokens), DRAFTED_TOKENS)
    rows = min(max(config.sequences_per_step, drafted), config.tokens_per_step)
    columns = -(-(config.max_model_len or spec.max_position) // config.tokens_per_block)
    tables = 4 * num_groups * config.sequences_per_step * columns
    steps = (config.tokens_per_step, min(config.tokens_per_step, CAPTURED_TOKENS))
    activations = sum(
        max(tokens * widest, *(layer.places_bytes(tokens, half=True) for layer in spec.kinds)) + GPU_SCRATCH_BYTES
        for tokens in steps
    )
    prompts = max(layer.prompt_bytes(columns * config.tokens_per_block) for layer in spec.kinds)
    exchanges = EXCHANGE_BYTES + 4 * rows * -(-spec.vocab_size // ranks) if (ranks := config.num_ranks) > 1 else 0
    if config.pp > 1:
        exchanges = LINK_STREAMS * 4 * config.tokens_per_step * spec.rows_sent * spec.hidden_size
    weights, logits = 2 * 2 * outputs * spec.hidden_size, 3 * 4 * rows * spec.vocab_size
    kept = (layer.recurrent.draft_bytes for layer in spec.kinds if layer.recurrent)
    drafts = config.sequences_per_step * config.num_draft_tokens * max(kept, default=0)
    parts = activations, prompts, weights, logits, 2 * tables, exchanges, drafts, _graph_bytes(spec, config)
    return sum(parts)


def _graph_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Bytes of the graphs of captured steps of all sizes."""
    seqs, tokens = config.sequences_per_step, config.tokens_per_step
    drafted = draft_sizes(seqs, tokens, config.num_draft_tokens)
    graphs = len(decode_sizes(seqs)) + len(mixed_sizes(seqs, tokens)) + len(drafted)
    kinds = 2 if config.adapters or config.adapter_root is not None else 1  # with adapters, and without
    return kinds * graphs * spec.num_layers * LAUNCHES * LAUNCH_BYTES
