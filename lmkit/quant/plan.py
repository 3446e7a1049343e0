"""What a recipe will do to a checkpoint, decided and refused before any work is done."""

from __future__ import annotations

import time
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from lmkit.errors import ConfigError, UnsupportedError
from lmkit.formats.base import get_format
from lmkit.log import get_logger
from lmkit.models import roles
from lmkit.models.loader import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QuantScheme
from lmkit.quant.kv import check_layers
from lmkit.quant.recipe import AwqClip, AwqScale, Gptq, Recipe, SignRound

log = get_logger(__name__)

BATCH_TOKENS = 4096  # of the calibration set in one forward pass
INPUTS = ("attn.q", "attn.o", "mlp.gate", "mlp.down")  # the first role of each input of a dense layer
HESSIANS = 10  # float32 [in, in] that GPTQ holds at a time: two sums, a copy and two factors, each of float64


@dataclass(frozen=True)
class Plan:
    """`linears` has every linear's module with how it is quantized (None = it stays dense), `dense` the reason of those
    that stay dense; `memory_bytes` and `seconds` are estimates."""

    spec: ModelSpec
    linears: dict[str, QuantScheme | None]
    dense: dict[str, str]
    memory_bytes: int
    seconds: float

    def schemes(self, layer: int) -> dict[str, QuantScheme]:
        """Of a layer's linears that are quantized, by role."""
        every = {role: self.linears[roles.module_name(layer, role)] for role in roles.linears(self.spec, layer)}
        return {role: scheme for role, scheme in every.items() if scheme is not None}


def make_plan(source: ModelSource, recipe: Recipe) -> Plan:
    """Raises ConfigError or UnsupportedError if the recipe does not fit the checkpoint."""
    spec, path = source.spec, source.reader.path
    if source.format.name != "dense":
        raise UnsupportedError(f"{path}: is quantized already ({source.format.name}); quantize the original checkpoint")
    if recipe.calibration.seq_len > spec.max_position:
        raise ConfigError(
            f"recipe: calibration.seq_len {recipe.calibration.seq_len} exceeds the model's context, {spec.max_position}"
        )
    if recipe.step(SignRound) is not None and any(
        roles.linears(spec, layer) != roles.LINEARS for layer in range(spec.num_layers)
    ):
        raise UnsupportedError(f"{path}: signround tunes dense layers only, and this model has others")
    check_layers(recipe.kv, spec)
    dense = dense_modules(spec, recipe)
    modules = [roles.module_name(i, role) for i in range(spec.num_layers) for role in roles.linears(spec, i)]
    if len(dense) == len(modules):
        raise ConfigError(f"recipe: nothing to quantize, every linear stays dense: {next(iter(dense.values()))}")
    linears = {module: None if module in dense else recipe.scheme.scheme() for module in modules}
    return Plan(spec, linears, dense, _memory(spec, recipe), _operations(spec, recipe) / _operations_per_second())


def dense_modules(spec: ModelSpec, recipe: Recipe) -> dict[str, str]:
    """Linears that stay dense, with the reason: the recipe ignores them, or the format cannot store them."""
    weight_format, scheme = get_format(recipe.format), recipe.scheme.scheme()
    dense, matched = {}, set()
    for layer in range(spec.num_layers):
        for role in roles.linears(spec, layer):
            module = roles.module_name(layer, role)
            patterns = [p for p in recipe.ignore if p == role or fnmatchcase(module, p)]
            matched |= set(patterns)
            if patterns:
                dense[module] = f"ignored by the recipe ({patterns[0]})"
            elif (reason := weight_format.can_write(spec.linear_shape(role), scheme)) is not None:
                dense[module] = reason
    for pattern in recipe.ignore:
        if pattern not in matched:
            raise ConfigError(
                f"recipe: ignore: {pattern!r} matches no linear; use a role ({', '.join(roles.linears(spec, 0))}) or a "
                "pattern of module names such as *.layers.0.*"
            )
    _warn_split_groups(spec, dense)
    return dense


def _warn_split_groups(spec: ModelSpec, dense: dict[str, str]) -> None:
    for layer in range(spec.num_layers):
        for group in roles.fused(spec, layer):
            modules = [roles.module_name(layer, role) for role in group]
            if 0 < sum(module in dense for module in modules) < len(modules):
                log.warning("only some of %s are quantized; engines that fuse them may refuse it", ", ".join(modules))


def _parameters(spec: ModelSpec, *names: str) -> int:
    return sum(spec.linear_shape(role)[0] * spec.linear_shape(role)[1] for role in names)


def _operations(spec: ModelSpec, recipe: Recipe) -> float:
    """Floating-point operations of the whole run, evaluation aside."""
    calibration, all_linears = recipe.calibration, _parameters(spec, *roles.linears(spec, 0))
    num_tokens = calibration.num_samples * calibration.seq_len
    attention = 2 * spec.num_heads * spec.head_dim * calibration.seq_len
    operations = 2.0 * num_tokens * (2 * all_linears + attention)
    if (scale := recipe.step(AwqScale)) is not None:
        candidates = 1 + scale.grid * (2 if scale.duo == "both" else 1)
        blocks = all_linears + _parameters(spec, "attn.o", "mlp.down")
        # Rounding a weight once costs about as much as a few hundred multiplications with it.
        operations += candidates * blocks * (2.0 * min(scale.tokens, num_tokens) + 300)
    if (clip := recipe.step(AwqClip)) is not None:
        operations += 4 * clip.grid * all_linears * (2.0 * recipe.scheme.group_size + 300)
    if (gptq := recipe.step(Gptq)) is not None:
        streams = 2 if recipe.needs_exact else 1
        inputs = sum(spec.linear_shape(role)[1] ** 2 for role in INPUTS)
        passes = 2.5 if gptq.sequential else 1.0  # up to attn.o, mlp.gate and mlp.down, and once more for the result
        operations += 2.0 * num_tokens * streams * (inputs + passes * (all_linears + attention))
    if (tuner := recipe.step(SignRound)) is not None:
        operations += 8.0 * tuner.iters * tuner.batch * calibration.seq_len * (all_linears + attention)
    return operations * spec.num_layers


def _operations_per_second() -> float:
    """Of a float32 product on this machine, measured in a few milliseconds."""
    x = torch.ones(512, 512)
    x @ x
    start = time.perf_counter()
    for _ in range(4):
        x @ x
    return 4 * 2 * 512**3 / (time.perf_counter() - start)


def _memory(spec: ModelSpec, recipe: Recipe) -> int:
    """Bytes at the peak: hidden states of all rows, a layer's weights three times, statistics, the embedding."""
    calibration, scale = recipe.calibration, recipe.step(AwqScale)
    num_tokens = calibration.num_samples * calibration.seq_len
    inputs = [spec.linear_shape(role)[1] for role in INPUTS]
    sampled = min(num_tokens, scale.tokens if scale else AwqScale().tokens)
    widest = 3 * spec.intermediate_size + 4 * spec.hidden_size
    numbers = (
        num_tokens * spec.hidden_size
        + 3 * _parameters(spec, *roles.linears(spec, 0))
        + sum(inputs) * (2 * recipe.scheme.group_size + sampled)
        + (HESSIANS * max(inputs) ** 2 if recipe.step(Gptq) else 0)
        + (num_tokens * spec.hidden_size if recipe.needs_exact else 0)
        + max(BATCH_TOKENS, calibration.seq_len) * widest
    )
    return 4 * numbers + spec.vocab_size * spec.hidden_size * 4
