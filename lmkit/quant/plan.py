"""The plan of a quantization: how each linear of a checkpoint is stored. Recipes that do not fit are refused here,
before any work is done."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lmkit.errors import ConfigError, UnsupportedError
from lmkit.kernels.cuda.module import tensor_device
from lmkit.layers.blocks.cross import HEARS
from lmkit.log import get_logger
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QuantScheme, dequantize, int_scheme, quantize
from lmkit.quant.device import gpu, multiplies_bfloat16, wait
from lmkit.quant.groups import candidates, check_dense, fit_groups
from lmkit.quant.kv.config import check_layers
from lmkit.quant.layer.moments import HELD_OUT
from lmkit.quant.layer.products import times
from lmkit.quant.mixed_precision import MEASURED_LEN, MEASURED_ROWS, check_reachable
from lmkit.quant.recipe import Recipe
from lmkit.quant.report.evaluate import EVAL_TOKENS
from lmkit.quant.split import is_split, parts_of
from lmkit.quant.steps.base import Speed

log = get_logger(__name__)

EFFICIENCY = 0.85  # of a whole layer's work, beside one product that stays in the cache
STORING = 28  # packing, writing and reading back a weight take as long as rounding it so many times
SCORING = 6  # comparing a logit with another takes as long as rounding a weight so many times
ROUNDS = 12  # in which the speed is measured
CALLS, FEW = 500, 256  # calls that are timed together, and the numbers of each
NUM_ROWS = (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16)  # that a limit of time chooses from


@dataclass(frozen=True)
class Plan:
    """`linears` maps the module of every linear to its scheme (None = it stays dense). `dense` maps the modules that
    stay dense to the reason. `groups` tells the sizes of groups, and why (quant.groups). `seconds` estimates each phase
    of a run, by the name that its progress has.

    With a budget of bits, quant.report.sensitivity chooses the schemes.
    """

    spec: ModelSpec
    linears: dict[str, QuantScheme | None]
    dense: dict[str, str]
    groups: str
    seconds: dict[str, float]

    def schemes(self, layer: int, spec: LayerSpec) -> dict[str, QuantScheme]:
        """The schemes of the quantized linears of a layer, or of a part `spec` of it, by role."""
        every = {role: self.linears[spec.module_name(layer, role)] for role in spec.linears}
        return {role: scheme for role, scheme in every.items() if scheme is not None}


def make_plan(source: ModelSource, recipe: Recipe, device: str = "cpu") -> Plan:
    """The plan for a recipe and a checkpoint on a device. Raises ConfigError or UnsupportedError if they do not fit."""
    spec, path = source.spec, source.reader.path
    if source.format.name != "dense":
        raise UnsupportedError(f"{path}: is quantized already ({source.format.name}); quantize the original checkpoint")
    if spec.sees_all:
        raise UnsupportedError(
            f"{path}: reads each text as a whole, and recipes calibrate models that write text; lmkit serve --quantize "
            "int8 rounds it while it loads"
        )
    if spec.memory is not None and (recipe.calibration.has_text or recipe.average_bits is not None):
        raise UnsupportedError(f"{path}: {HEARS}; use a recipe that needs none, as rtn_w8a16 or rtn_w4a16_g128")
    if spec.foreign and recipe.average_bits is not None:
        raise UnsupportedError(f"{path}: average_bits does not go with layers that transformers computes")
    if spec.reads_beside and (recipe.average_bits is not None or recipe.kv.is_fitted):
        section = "kv" if recipe.kv.is_fitted else "average_bits"
        raise UnsupportedError(
            f"{path}: {section} does not go with layers that read the keys of others, or vectors of each token"
        )
    if any(is_split(layer) for layer in spec.kinds) and (recipe.average_bits is not None or recipe.model_step):
        what = "average_bits" if recipe.model_step is None else recipe.model_step.name()
        raise UnsupportedError(f"{path}: {what} does not go with experts that are held one at a time")
    if recipe.calibration.has_text and recipe.calibration.seq_len > spec.max_position:
        raise ConfigError(
            f"recipe: calibration.seq_len {recipe.calibration.seq_len} exceeds the model's context, {spec.max_position}"
        )
    if recipe.calibration.has_text and recipe.calibration.seq_len > (spec.chosen_keys or spec.max_position):
        raise ConfigError(
            f"recipe: calibration.seq_len {recipe.calibration.seq_len} is more than the {spec.chosen_keys} keys that a "
            "query of this model sees; lower it"
        )
    for step in recipe.steps:
        if reason := step.refuses_model(spec):
            raise UnsupportedError(f"{path}: {reason}")
    check_layers(recipe.kv, spec, recipe.format)
    grids = fit_groups(spec, recipe)
    check_dense(path, spec, recipe, grids)
    if not any(grids.linears.values()) and not (recipe.keeps_weights and recipe.kv.is_fitted):
        raise ConfigError(f"recipe: nothing to quantize, every linear stays dense: {next(iter(grids.dense.values()))}")
    _warn_split_groups(spec, grids.dense)
    check_reachable(spec, recipe, grids.linears)
    linears = dict(grids.linears)
    for index, layer in enumerate(spec.layers):
        matrices = [role for role, shape in layer.matrices.items() if len(shape) == 2]
        linears |= {spec.module_name(index, role): None for role in (*layer.routers, *matrices)}
    seconds = estimate(spec, recipe, measure_speed(recipe.product_dtype(device), device))
    return Plan(spec, linears, grids.dense, grids.groups, seconds)


def _warn_split_groups(spec: ModelSpec, dense: dict[str, str]) -> None:
    for layer in range(spec.num_layers):
        for group in spec.layers[layer].fused:
            rounded = [role for role in group if role not in spec.layers[layer].unrounded]
            modules = [spec.module_name(layer, role) for role in rounded]
            if 0 < sum(module in dense for module in modules) < len(modules):
                log.warning("only some of %s are quantized; engines that fuse them may refuse it", ", ".join(modules))


def rows_within(source: ModelSource, recipe: Recipe, seconds: float, device: str) -> list[int]:
    """The number of rows of text that an estimate of `seconds` allows, and smaller ones. Raises ConfigError.

    The numbers lie far apart, so that most repetitions of a command come to the same one.
    """
    speed = measure_speed(recipe.product_dtype(device), device)
    estimates = {rows: sum(estimate(source.spec, recipe.with_rows(rows), speed).values()) for rows in NUM_ROWS}
    found = [rows for rows, needed in estimates.items() if needed <= seconds]
    if not found:
        raise ConfigError(
            f"--time-budget: {NUM_ROWS[-1]} rows of {recipe.calibration.seq_len} tokens take about "
            f"{estimates[NUM_ROWS[-1]]:.0f} s by the estimate; give more time, or a recipe of rtn_"
        )
    return found


def estimate(spec: ModelSpec, recipe: Recipe, speed: Speed) -> dict[str, float]:
    """Estimated seconds of each phase, in the order of the phases."""
    before = layers = mixed = finish = evaluation = 0.0
    num_tokens = recipe.calibration.num_samples * recipe.calibration.seq_len
    for part, share, count in (part for layer in spec.layers for part in parts_of(layer)):
        cost = recipe.cost(part, share=share)
        passes = (1 + 1 / recipe.observed_share(part) + 3 / HELD_OUT) * recipe.calibration.has_text
        layers += count * cost.forward_seconds(passes * cost.num_tokens, speed.short, speed)
        layers += count * STORING * part.num_weights / speed.rounding
        layers += count * sum(step.seconds(cost, speed) for step in recipe.layer_steps)
        before += count * sum(step.seconds_before(cost, speed) for step in recipe.layer_steps)
        finish += 0.0 if recipe.model_step is None else recipe.model_step.seconds(cost, speed)
        variants = 4 * len(candidates(recipe)) * spec.num_layers / 2  # mean number of variants that pass a layer
        mixed += cost.forward_seconds(variants * MEASURED_ROWS * MEASURED_LEN, speed.full, speed)
        evaluation += count * cost.forward_seconds(2 * share * EVAL_TOKENS, speed.engine, speed)  # of two models
    before += sum(step.seconds_of_head(spec, num_tokens, speed) for step in recipe.layer_steps)
    if recipe.model_step is not None:
        finish += recipe.model_step.seconds_of_head(spec, num_tokens, speed)
    everything = spec.num_weights + spec.vocab_size * spec.hidden_size
    logits = 2 * EVAL_TOKENS * spec.vocab_size
    evaluation += logits * (2.0 * spec.hidden_size / speed.engine + SCORING / speed.rounding)
    return {
        "mixed precision": 0.0 if recipe.average_bits is None else mixed,
        "weights": 16.0 * everything / speed.full,  # each is read and compared
        **({"curvature": before} if recipe.needs_curvature else {}),
        "layers": layers,
        **({} if recipe.model_step is None else {recipe.model_step.name(): finish}),
        "evaluation": evaluation,
    }


@functools.lru_cache
def measure_speed(dtype: torch.dtype, device: str = "cpu") -> Speed:
    """What a device does in a second, measured in less than half of one. `dtype`: of short products."""
    at = tensor_device(device)
    size = 1024 if gpu(device) is None else 4096
    x, few, scheme = torch.randn(size, size).to(at), torch.randn(FEW).to(at), int_scheme(4, 128)
    engine = torch.bfloat16 if multiplies_bfloat16(device) else torch.float32
    works: dict[Callable[[], object], float] = {
        lambda: times(x.to(dtype), x.to(dtype), dtype): 2 * size**3,
        lambda: x @ x: 2 * size**3,
        lambda: times(x.to(engine), x.to(engine), engine): 2 * size**3,
        lambda: dequantize(quantize(x, scheme)): size**2,
        lambda: [few.add_(1) for _ in range(CALLS)]: CALLS,
    }
    seconds = dict.fromkeys(works, math.inf)
    # The shortest of several times is that of the machine without its other work. Rounds make the times of one work lie
    # apart.
    for _ in range(ROUNDS):
        for work in works:
            start = time.perf_counter()
            work()
            wait(device)
            seconds[work] = min(seconds[work], time.perf_counter() - start)
    short, full, multiplied, rounding, calls = (amount / seconds[work] for work, amount in works.items())
    return Speed(EFFICIENCY * short, EFFICIENCY * full, EFFICIENCY * multiplied, EFFICIENCY * rounding, calls)
