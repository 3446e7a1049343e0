"""Estimates of the memory and disk that a quantization takes, and the choices that keep it within `--max-memory`.

At the peak, memory holds one decoder layer in float32, the working data of the steps, and statistics of the layer's
inputs. It also holds either a batch of calibration rows that passes through the layer, or the sample of tokens on
which candidates are compared. The size of a batch, of the sample and of the written shards follow from the budget.
Everything else is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmkit.errors import ConfigError
from lmkit.layers.blocks.cross import HEARS
from lmkit.log import get_logger
from lmkit.models.resolved import resolve_dtype
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.quant.data.hidden_states import BATCH_TOKENS, scratch_width
from lmkit.quant.device import free_memory
from lmkit.quant.layer.curvature import block_size, swept_rows
from lmkit.quant.recipe import Recipe
from lmkit.quant.report.evaluate import LOGIT_BYTES
from lmkit.quant.split import Part, parts_of

log = get_logger(__name__)

MIN_SAMPLE = 256  # tokens; fewer do not tell candidates apart
SHARD_BYTES = 2 << 30
# Libraries, compiled kernels, stacks of threads, and memory that the allocator keeps. The value is a constant, not a
# measurement: the same command must make the same choices when it resumes.
BASE_BYTES = 448 << 20


@dataclass(frozen=True)
class Budget:
    """`recipe` is the requested recipe, with a smaller sample if the budget requires it. Sizes are in bytes.

    `memory_bytes` and `disk_bytes` are estimates of the peak, without evaluation.
    """

    recipe: Recipe
    batch_tokens: int
    shard_bytes: int
    memory_bytes: int
    disk_bytes: int
    max_memory: int | None = None


def fit(source: ModelSource, recipe: Recipe, max_memory: int | None = None) -> Budget:
    """The largest batch and sample that the budget allows. Raises ConfigError if the smallest do not fit either."""
    disk = disk_bytes(source, recipe)
    for tokens, smaller in _choices(recipe):
        memory = BASE_BYTES + working_bytes(source.spec, smaller, tokens)
        if max_memory is None or memory <= max_memory:
            if smaller is not recipe:
                log.warning(
                    "--max-memory %s: candidates are compared on %d tokens instead of %d",
                    size(memory), smaller.sample_tokens, recipe.sample_tokens,
                )  # fmt: skip
            shard = SHARD_BYTES if max_memory is None else max(1 << 20, min(SHARD_BYTES, max_memory // 4))
            return Budget(smaller, tokens, shard, memory, disk, max_memory)
    assert max_memory is not None
    raise ConfigError(
        f"--max-memory {size(max_memory)}: quantizing {source.reader.path} by this recipe takes at least {size(memory)}"
    )


def peak_bytes() -> int:
    """The peak resident memory of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) << 10


def size(num_bytes: float) -> str:
    """`num_bytes` as text in the unit that `--max-memory` takes, rounded up."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if num_bytes >= unit:
            return f"{-(-num_bytes * 100 // unit) / 100:g}{name}"
    return f"{num_bytes} bytes"


def _choices(recipe: Recipe) -> list[tuple[int, Recipe]]:
    """(tokens of a batch, recipe) from the largest to the smallest. Batches shrink first: this costs no quality."""
    seq_len = recipe.calibration.seq_len
    tokens = [max(BATCH_TOKENS // seq_len, 1) * seq_len]
    while tokens[-1] > seq_len:
        tokens.append(max(tokens[-1] // seq_len // 2, 1) * seq_len)
    samples = [recipe.sample_tokens]
    while samples[-1] // 2 >= MIN_SAMPLE:
        samples.append(samples[-1] // 2)
    return [(count, recipe) for count in tokens] + [(seq_len, recipe.with_sample(count)) for count in samples[1:]]


def working_bytes(spec: ModelSpec, recipe: Recipe, batch_tokens: int) -> int:
    """Peak bytes of everything that grows with the model and the recipe. They do not grow with the number of rows."""
    whole = sum(step.whole_numbers(spec, recipe.grid.group_size) for step in recipe.steps)
    vectors = 4 * 3 * batch_tokens * spec.token_width * recipe.calibration.has_text  # before their norm and after it
    parts = (part for layer in spec.kinds for part in parts_of(layer))
    return 4 * whole + vectors + max(_part_working_bytes(part, recipe, batch_tokens) for part in parts)


def _part_working_bytes(part: Part, recipe: Recipe, batch_tokens: int) -> int:
    layer = part.spec
    cost = recipe.cost(layer, batch_tokens, part.share)
    weights = cost.layer.num_weights * cost.num_streams  # the original layer besides the rewritten one
    weights += weights // 2 if recipe.product_dtype().itemsize == 2 else 0  # as they are multiplied
    statistics = sum(cost.input_widths) * (2 * max(cost.group_size, 0) + cost.sample_tokens)  # sums are float64
    keys_and_values = 6 * layer.kv_size  # kept and copied
    forward = batch_tokens * (cost.token_width + keys_and_values) + 3 * cost.largest
    work = max(forward, cost.search_numbers, *(step.working_numbers(cost) for step in recipe.steps))
    if not recipe.calibration.has_text:  # a weight and its rounded values
        statistics, work = 0, 3 * cost.largest
    return 4 * (weights + statistics + work)


def check_machine(source: ModelSource, budget: Budget, *, memory: int, disk: int, evaluates: bool) -> None:
    """Raise ConfigError if the estimate exceeds `memory` bytes that are free, or `disk` bytes where the output goes."""
    path, anyway = source.reader.path, "--ignore-estimate starts anyway"
    if budget.memory_bytes > memory:
        tokens, smallest = _choices(budget.recipe)[-1]
        least = BASE_BYTES + working_bytes(source.spec, smallest, tokens)
        less = f"--max-memory {size(least)} is the least that works, in smaller steps"
        less = less if least <= memory else f"the least that works is {size(least)}"
        raise ConfigError(
            f"quantizing {path} takes about {size(budget.memory_bytes)} of memory, {size(memory)} are free; "
            f"{less}; {anyway}"
        )
    if evaluates and (needed := evaluation_bytes(source, budget.recipe)) > memory:
        raise ConfigError(
            f"the evaluation holds both models, {size(needed)}, and {size(memory)} of memory are free; "
            f"--no-eval leaves it out; {anyway}"
        )
    if budget.disk_bytes > disk:
        raise ConfigError(
            f"quantizing {path} takes about {size(budget.disk_bytes)} of disk, {size(disk)} are free where the output "
            f"goes; {anyway}"
        )


def check_device(source: ModelSource, budget: Budget, device: str) -> None:
    """Raise ConfigError if a GPU has too little memory for a layer, its statistics and a batch."""
    free, needed = free_memory(device), budget.memory_bytes - BASE_BYTES
    if free is not None and needed > free:
        raise ConfigError(
            f"quantizing {source.reader.path} takes about {size(needed)} of the GPU's memory, {size(free)} are free; "
            "--max-memory takes smaller steps; --device cpu takes none; --ignore-estimate starts anyway"
        )


def check_evaluation(source: ModelSource, budget: Budget) -> None:
    """Raise ConfigError if the two whole models that an evaluation holds do not fit into the limit, or for one that
    reads no text alone."""
    if source.spec.memory is not None:
        raise ConfigError(f"{source.reader.path}: {HEARS}, so nothing can be evaluated; use --no-eval")
    needed = evaluation_bytes(source, budget.recipe)
    if budget.max_memory is not None and needed > budget.max_memory:
        raise ConfigError(
            f"--max-memory {size(budget.max_memory)}: the evaluation holds both models, {size(needed)}; use --no-eval"
        )


def evaluation_bytes(source: ModelSource, recipe: Recipe) -> int:
    """Bytes of the two whole models that an evaluation holds."""
    dtype = resolve_dtype("auto", source.spec.dtype, "cpu")
    models = source.weight_bytes(dtype) + _other_bytes(source)
    return BASE_BYTES + models + _stored_bytes(source, recipe) + 4 * LOGIT_BYTES


def disk_bytes(source: ModelSource, recipe: Recipe) -> int:
    """Bytes in the output's folder until the run is over: hidden states around and inside a layer, finished layers,
    and the checkpoint."""
    spec, calibration = source.spec, recipe.calibration
    width = 2 * spec.hidden_size + (scratch_width(spec) if any(step.by_parts for step in recipe.steps) else 0)
    tokens = calibration.num_samples * calibration.seq_len * calibration.has_text
    width += 2 * sum(spec.layers[index].kv_size for index in spec.kv_sources)
    states = 4 * tokens * (width * (2 if recipe.needs_exact else 1) + spec.token_width)
    if recipe.needs_curvature:  # states before all layers, then the curvature of all outputs (layer.sweep)
        outputs = (rows for layer in spec.layers for rows, _ in recipe.cost(layer).readers)
        swept = calibration.seq_len * swept_rows(calibration.num_samples, calibration.seq_len)
        states += 4 * swept * spec.hidden_size * (spec.num_layers + 1) + sum(2 * n * block_size(n) for n in outputs)
    if recipe.model_step is not None:  # a step's states before all layers; the checkpoint is written twice
        rows = min(recipe.model_step.rows, calibration.num_samples)
        states += 4 * rows * calibration.seq_len * spec.hidden_size * (spec.num_layers + 1) + _stored_bytes(
            source, recipe
        )
    return states + 2 * _stored_bytes(source, recipe) + _other_bytes(source)


def _other_bytes(source: ModelSource) -> int:
    """Bytes of what no layer has, with a head that a rotation adds."""
    layers = tuple(f"{layer.prefix}.{index}." for index, layer in enumerate(source.spec.layers))
    return sum(source.reader.info(name).nbytes for name in source.reader.names() if not name.startswith(layers))


def _stored_bytes(source: ModelSource, recipe: Recipe) -> int:
    """Bytes of the quantized layers: the codes, and each group's scale and zero."""
    scheme = recipe.grid
    bits = scheme.bits if recipe.average_bits is None else recipe.average_bits
    bits += scheme.group_bits / (scheme.group_size if scheme.group_size > 0 else 64)
    return int(sum(layer.weight_bytes(bits) for layer in source.spec.layers))
