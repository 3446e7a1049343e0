"""Parts of a transformers module that lmkit's kernels compute. What a part is shows in its numbers, never in its name.

A norm is called with random rows of several sizes, and an MLP with linears that give random numbers. Where the numbers
are those of a kernel, the kernel takes its place. Other parts stay as they are.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.log import get_logger
from lmkit.models.flexible.linears import PackedLinear, Product, find_linears, may_be_norm

log = get_logger(__name__)

SCALES = 1e-3, 0.1, 1.0, 30.0  # of rows: an epsilon shows in small ones
WIDEST = 12.0  # of a gate's inputs: bounds of activations show
FAILURES = RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError, KeyError


class Gated(NamedTuple):
    """An MLP that gives down(activation(gate(x)) * up(x)). All but the last are names of modules."""

    module: str
    gate: str
    up: str
    down: str
    activation: str  # of ops.ACTIVATIONS


def find_gated(model: nn.Module, shared: Mapping[str, tuple[str, ...]]) -> Iterator[Gated]:
    """The MLPs of a model, which may be on `meta`. `shared` has the linears that read one tensor, by each of them."""
    linears, by_parent = find_linears(model), defaultdict[str, list[str]](list)
    for each in linears:
        by_parent[each.rpartition(".")[0]].append(each)
    for name, inner in by_parent.items():
        pair = next((shared[each] for each in inner if each in shared), ())
        if len(inner) != 3 or len(pair) != 2 or not set(pair) < set(inner):
            continue
        down = next(each for each in inner if each not in pair)
        if not linears[pair[0]].shape == linears[pair[1]].shape == linears[down].shape[::-1]:
            continue
        for gate, up in (pair, pair[::-1]):
            parts = [model.get_submodule(each) for each in (gate, up, down)]
            if (found := _activation(model.get_submodule(name), parts, linears[down].shape)) is not None:
                yield Gated(name, gate, up, down, found)
                break


@torch.no_grad()
def _activation(module: nn.Module, parts: list[nn.Module], shape: tuple[int, int]) -> str | None:
    """The activation of a module whose linears are gate, up and down, the last one [size, width]; None if it is none of
    lmkit's or the module does more."""
    linears: list[Any] = parts
    (gate, up, down), (size, width) = linears, shape
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 3, size, generator=generator) for _ in range(2))
    a, b = ((torch.rand(1, 3, width, generator=generator) * 2 - 1) * WIDEST for _ in range(2))
    read: list[Tensor] = []

    def gives(value: Tensor) -> Callable[[Tensor], Tensor]:
        def forward(given: Tensor) -> Tensor:
            read.append(given)
            return value.clone()

        return forward

    own = [part.forward for part in (gate, up, down)]
    gate.forward, up.forward, down.forward = gives(a), gives(b), gives(y)
    try:
        output = module(x) if len(inspect.signature(module.forward).parameters) == 1 else None
    except FAILURES:
        return None
    finally:
        gate.forward, up.forward, down.forward = own
    if not _same(output, y) or len(read) != 3 or read[0] is not x or read[1] is not x:
        return None
    both = torch.cat([a, b], -1)[0]
    reference = ops.gated_activation.named("reference")
    return next((name for name in ops.ACTIVATIONS if _same(read[2], reference(both, name)[None])), None)


def norm_of(module: nn.Module) -> Norm | None:
    """The RMSNorm that a module computes; None if it computes another thing."""
    if not may_be_norm(module):
        return None
    (weight,) = (parameter.detach().float() for parameter in module.parameters())
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(len(SCALES), 3, len(weight), generator=generator) + 0.3) * torch.tensor(SCALES)[:, None, None]
    try:
        with torch.no_grad():
            found = module(x.clone())
    except FAILURES:
        return None
    numbers = {value for value in vars(module).values() if isinstance(value, float)}
    candidates = (Norm(w, eps) for w in (weight, 1 + weight) for eps in (*numbers, torch.finfo(torch.float32).eps))
    reference = ops.rms_norm.named("reference")
    return next((norm for norm in candidates if _same(found, reference(x, norm))), None)


def _same(found: Any, right: Tensor) -> bool:
    """Whether something is a tensor with the same numbers but for last bits."""
    return isinstance(found, Tensor) and found.shape == right.shape and torch.allclose(found, right, 1e-5, 1e-6)


class FusedNorm:
    """A norm that a kernel computes: within the `products` that alone read it, or by itself if there are none."""

    def __init__(self, part: nn.Module, norm: Norm, products: Collection[Product]) -> None:
        self._part: Any = part
        self._own, self._norm, self._products = part.forward, norm, products
        self._kernel = ops.rms_norm.select("cpu")
        self.use(fused=True)

    def use(self, *, fused: bool) -> None:
        """Compute by the kernel, or else as the module does."""
        within = fused and bool(self._products)
        for product in self._products:
            product.norm = self._norm if within else None
        self._part.forward = self._own if not fused else _as_given if within else self._compute

    def _compute(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """With more arguments, or in another dtype, the module does it."""
        if args or options or x.dtype != torch.float32:
            return self._own(x, *args, **options)
        return self._kernel(x, self._norm)


def _as_given(x: Tensor) -> Tensor:
    return x


def fuse_norms(module: nn.Module, readers: Mapping[str, Collection[str]]) -> list[FusedNorm]:
    """Have kernels compute the norms of a module with its weights. `readers` has the linears that alone read one, by
    its name."""
    found, counts = list[FusedNorm](), dict.fromkeys(("as they are", "by a kernel", "within products"), 0)
    for name, part in module.named_modules():
        if (norm := norm_of(part)) is not None:
            linears = [module.get_submodule(each) for each in readers.get(name, ())]
            packed = [linear.product for linear in linears if isinstance(linear, PackedLinear)]
            within = bool(linears) and len(packed) == len(linears)
            found.append(FusedNorm(part, norm, {*packed} if within else ()))
            counts["within products" if within else "by a kernel"] += 1
        elif may_be_norm(part):
            counts["as they are"] += 1
    log.debug("norms: %s", counts)
    return found


def fuse_gates(module: nn.Module, gated: Iterable[Gated]) -> None:
    """Run MLPs whose gate gives the product of both, as linears are then made."""
    for mlp in gated:
        gate, down = module.get_submodule(mlp.gate), module.get_submodule(mlp.down)
        module.get_submodule(mlp.module).forward = nn.Sequential(gate, down).forward  # type: ignore[method-assign]


def pack_tied(module: nn.Module, names: set[str], dtype: torch.dtype, activations: str) -> None:
    """Pack the linears whose weights are those of embeddings, which keep them in float32."""
    sites = find_linears(module)
    for name in names:
        linear = module.get_submodule(name)
        if isinstance(linear, nn.Linear):
            site = sites[name]
            product = Product({name: (linear.weight.detach().to(dtype), linear.bias)}, activations)
            module.set_submodule(name, PackedLinear(product, name, {name: site.shape[0]}, site))
