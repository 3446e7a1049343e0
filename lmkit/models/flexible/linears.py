"""The linears of a transformers model, found by what its modules are, and lmkit's packed linears in their places."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from lmkit.errors import CheckpointError
from lmkit.kernels.ops import Norm
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.models.flexible.experts import find_mixtures
from lmkit.models.flexible.names import BIAS
from lmkit.models.flexible.site import Site
from lmkit.models.head import quantize_rows
from lmkit.models.identity import Packing
from lmkit.models.rounding import scheme_for
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor

# What asks a tensor for its form, and not for its numbers.
FORMS: tuple[Any, ...] = Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim
LOOKS = {Tensor.size, Tensor.dim, *(each.__get__ for each in FORMS)}


def find_linears(model: nn.Module) -> dict[str, Site]:
    """Every linear of a model by its module's name, in the order of the modules. The model may be on `meta`."""
    found: dict[str, Site] = {}
    for name, module in model.named_modules():
        kind: Any = type(module)
        if isinstance(module, nn.Linear) and _is_plain(kind):
            out, inputs = module.weight.shape
            found[name] = Site((out, inputs), False, module.bias is not None)
        elif isinstance(module, Conv1D):
            inputs, out = module.weight.shape
            found[name] = Site((out, inputs), True, True)
    return found


def all_sites(model: nn.Module) -> dict[str, Site]:
    """The linears of a model with those of its experts."""
    experts = (mixture.sites(name) for name, mixture in find_mixtures(model).items())
    return find_linears(model) | {name: site for sites in experts for name, site in sites.items()}


@functools.cache
def _is_plain(kind: Any) -> bool:
    """Whether a class of linears computes what nn.Linear does, as a small one of it shows. Some add a gate or noise."""
    if kind.forward is nn.Linear.forward:
        return True
    small = kind.__new__(kind)
    nn.Linear.__init__(small, 3, 2)
    x = torch.linspace(-1, 1, 12).view(4, 3)
    try:
        y = small.eval()(x)
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError):  # it asks for more than a plain one
        return False
    return isinstance(y, Tensor) and torch.allclose(y, nn.functional.linear(x, small.weight, small.bias), atol=1e-6)


@dataclass
class Uses(TorchFunctionMode):
    """While a model runs inside, how it uses its linears is noted.

    `shared` has the names of linears that read the same tensor, unchanged between them, in the order of the modules,
    and `direct` those whose weight something else than the linear reads. Such a weight cannot be packed, but for those
    of `embedded`, which embeddings alone read besides. `ran` has those that were called. `normed` has the linears that
    read what a norm gives, by its name, if nothing else reads that and they read nothing else. `outside` has the
    linears that ran while the module around them did not.
    """

    model: nn.Module
    shared: list[tuple[str, ...]] = field(default_factory=list)
    direct: set[str] = field(default_factory=set)
    embedded: set[str] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)
    normed: dict[str, set[str]] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self._names = list(find_linears(self.model))
        self._norms = [name for name, module in self.model.named_modules() if may_be_norm(module)]
        self._inputs: dict[str, tuple[Tensor, int]] = {}  # and the number of changes in place
        self._made: dict[int, tuple[str, Tensor]] = {}  # what norms gave, by identity
        self._readers: dict[str, set[str]] = {name: set() for name in self._norms}  # linears, or others: ""
        self._sources: dict[str, set[str]] = {}  # of linears: the norms, or others: ""
        self._under_way: list[str] = []  # modules around linears
        self._weights: dict[int, str] = {}  # by identity, while a pass runs
        self._others: set[str] = set()  # those that more than embeddings reads
        self._running = ""
        self._hooks: list[Any] = []

    def __enter__(self) -> Uses:  # type: ignore[override]
        for name in self._names:
            linear = self.model.get_submodule(name)
            self._hooks.append(linear.register_forward_pre_hook(functools.partial(self._begin, name)))
            self._hooks.append(linear.register_forward_hook(self._end, always_call=True))
        for name in {each.rpartition(".")[0] for each in self._names}:
            around = self.model.get_submodule(name)
            self._hooks.append(around.register_forward_pre_hook(functools.partial(self._entered, name)))
            self._hooks.append(around.register_forward_hook(self._left, always_call=True))
        for name in self._norms:
            norm = self.model.get_submodule(name)
            self._hooks.append(norm.register_forward_hook(functools.partial(self._gave, name)))
        for whole in {self.model, getattr(self.model, "base_model", self.model)}:
            self._hooks.append(whole.register_forward_pre_hook(self._start))
            self._hooks.append(whole.register_forward_hook(self._stop, always_call=True))
        super().__enter__()
        return self

    def _start(self, *_: Any) -> None:
        self._weights = {id(self.model.get_submodule(name).weight): name for name in self._names}

    def _stop(self, *_: Any) -> None:
        self._weights = {}

    def _begin(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._running = name
        self.ran.add(name)
        if name.rpartition(".")[0] not in self._under_way[-1:]:
            self.outside.add(name)
        if args:
            self._inputs[name] = args[0], _changes(args[0])
            norm, _ = self._made.get(id(args[0]), ("", None))
            self._sources.setdefault(name, set()).add(norm)
            if norm:
                self._readers[norm].add(name)

    def _entered(self, name: str, *_: Any) -> None:
        self._under_way.append(name)

    def _left(self, *_: Any) -> None:
        self._under_way.pop()

    def _gave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._made[id(output)] = name, output

    def _end(self, *_: Any) -> None:
        self._running = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in (*args, *(kwargs or {}).values()):
            name = self._weights.get(id(each), self._running)
            if name != self._running and isinstance(found, Tensor):
                self.direct.add(name)
                (self._others if func is not nn.functional.embedding else self.embedded).add(name)
            if id(each) in self._made and not self._running and func not in LOOKS:
                self._readers[self._made[id(each)][0]].add("")
        return found

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        same: dict[tuple[int, int], list[str]] = {}
        for name, (seen, changes) in self._inputs.items():
            same.setdefault((id(seen), changes), []).append(name)
        groups = (sorted(names, key=self._names.index) for names in same.values() if len(names) > 1)
        self.shared = [tuple(names) for names in groups]
        self.embedded -= self._others
        self.normed = {
            norm: names for norm, names in self._readers.items()
            if names and "" not in names and all(self._sources[name] == {norm} for name in names)
        }  # fmt: skip
        self._inputs, self._made = {}, {}


def may_be_norm(module: nn.Module) -> bool:
    """Whether a module has what an RMSNorm has: a vector, and no part."""
    return [x.ndim for x in module.parameters()] == [1] and next(module.children(), None) is None


def _changes(x: Tensor) -> int:
    """How often a tensor was changed in place. torch does not count it in steps: there, what `Uses` saw holds."""
    return 0 if x.is_inference() else x._version


class Product:
    """Packed linears that read the same tensor, as one product in float32: the first that is asked computes all.

    With an `activation` there is a gate and what it is multiplied with, and the gate gives the result of both. `norm`,
    if there is one, is applied to the input.
    """

    def __init__(
        self,
        weights: Mapping[str, tuple[Tensor | QTensor, Tensor | None]],
        activations: str,
        activation: str | None = None,
    ) -> None:
        """`weights`: weight and bias by role."""
        plain: Weights = {role: weight for role, (weight, _) in weights.items()}
        plain |= {role + BIAS: bias.float() for role, (_, bias) in weights.items() if bias is not None}
        quantized = any(isinstance(weight, QTensor) for weight, _ in weights.values())
        self.rounds = quantized and activations != "exact"  # its inputs
        self.linear = MergedLinear(tuple(weights), plain, activation=activation)
        self.linear.pack(activations)
        self.norm: Norm | None = None
        self._input: tuple[Tensor, int] | None = None  # and the number of changes in place
        self._outputs: dict[str, Tensor] = {}  # of this input, that are not yet taken

    def take(self, role: str, x: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """x [..., in] -> [rows, out] of one linear. `sizes`: the outputs of each."""
        kept = self._input is not None and self._input[0] is x and self._input[1] == _changes(x)
        if not kept or role not in self._outputs:
            rows = x.reshape(-1, x.shape[-1])
            if len(rows):
                y = self.linear(rows.float().contiguous(), self.norm)
            else:
                y = rows.new_empty(0, sum(sizes.values()))
            self._input = x, _changes(x)
            self._outputs = self.split(y, sizes)
        found = self._outputs.pop(role)
        if not self._outputs:
            self._input = None
        return found.contiguous()

    @staticmethod
    def split(y: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """What the product gives, by role."""
        return dict(zip(sizes, y.split([*sizes.values()], -1), strict=True))


class PackedLinear(nn.Module):
    """A linear of a transformers model in the layout of lmkit's kernels, which compute in float32 on a CPU.

    `weight` has the shape of the one in whose place it is, and no data: models ask for shape and dtype.
    """

    def __init__(self, product: Product, role: str, sizes: Mapping[str, int], site: Site) -> None:
        super().__init__()
        self.product, self.role, self.sizes, self.rounds = product, role, sizes, product.rounds
        self.out_features, self.in_features = site.shape
        self.weight = torch.empty(*site.shape, device="meta")
        self.bias = torch.empty(self.out_features, device="meta") if site.has_bias else None

    @property
    def linear(self) -> MergedLinear:
        """The linear with those that read the same tensor."""
        return self.product.linear

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of x."""
        y = self.product.take(self.role, x, self.sizes)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


@torch.inference_mode()
def rows_of_linears(model: nn.Module, run: Callable[[], object]) -> dict[str, set[int]]:
    """How many rows each packed linear of a model computes at a time while `run` runs, by its name."""
    found: dict[str, set[int]] = {}

    def note(name: str, linear: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args:
            found.setdefault(name, set()).add(args[0].numel() // args[0].shape[-1])

    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    hooks = [module.register_forward_pre_hook(functools.partial(note, name)) for name, module in packed]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def linear_source(
    source: ModelSource,
    packing: Packing,
    sites: Mapping[str, Site],
    files: Mapping[str, str],
    places: Mapping[str, tuple[int, str]],
    shared: Iterable[tuple[str, ...]],
    gated: Mapping[tuple[str, str], str],
) -> Callable[[str], nn.Module | None]:
    """What gives the packed linear of a name in the model, if `files` has the module of the checkpoint with its weight.
    `places` has layer and role of those in layers, which are rounded if the source rounds. Of those `shared`, which
    read the same tensor, the ones of a layer become one product, with the activation that `gated` has for a gate and
    what it is multiplied with.

    Raises CheckpointError and UnsupportedError for weights that cannot be read or packed.
    """
    dtype = None if packing.as_stored else getattr(torch, packing.dtype)
    groups, made = dict[str, tuple[str, ...]](), dict[str, nn.Module]()
    for names in shared:
        known = [name for name in names if name in files and name in places]
        for _, group in itertools.groupby(known, lambda name: places[name][0]):
            members = tuple(group)
            groups |= dict.fromkeys(members, members)
    by_group: dict[tuple[str, ...], str] = {pair: gated[pair] for pair in gated}
    groups |= {name: pair for pair in by_group for name in pair}

    def linear_of(name: str) -> nn.Module | None:
        if name not in files:
            return None
        if name not in made:
            together = groups.get(name, (name,))
            roles = {each: places.get(each, (-1, each))[1] for each in together}
            with torch.device("cpu"):  # transformers asks while new tensors lie on meta
                read = {
                    role: read_site(source, files[each], sites[each], dtype, is_rounded=each in places)
                    for each, role in roles.items()
                }
                product = Product(read, packing.activations, by_group.get(together))
            giving = together[:1] if together in by_group else together
            sizes = {roles[each]: sites[each].shape[0] for each in giving}
            made.update({each: PackedLinear(product, role, sizes, sites[each]) for each, role in roles.items()})
        return made.pop(name)

    return linear_of


def read_site(
    source: ModelSource, file: str, site: Site, dtype: torch.dtype | None, *, is_rounded: bool = True
) -> tuple[Tensor | QTensor, Tensor | None]:
    """(weight [out, in], bias or None) of the module `file` of a checkpoint: dense ones in `dtype`, None = as stored.
    Those that are `is_rounded` are rounded if the source rounds. Raises CheckpointError."""
    reader = source.reader
    weight = source.format.read_linear(reader, file)
    if not isinstance(weight, QTensor):
        weight = weight.T if site.transposed else weight
        weight = weight.contiguous() if dtype is None else weight.to(dtype).contiguous()
        scheme = scheme_for(source.rounding if is_rounded else "none", site.shape[1])
        weight = weight if scheme is None else quantize_rows(weight, scheme)
    shape = tuple((weight.codes if isinstance(weight, QTensor) else weight).shape)
    if shape != site.shape:
        raise CheckpointError(f"{reader.path}: {file} is {list(shape)}, config.json says {list(site.shape)}")
    return weight, reader.tensor(file + BIAS) if site.has_bias else None
