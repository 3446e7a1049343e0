"""Kernels beside torch: each call of an op is computed twice by its kernels and once by torch, from the same inputs.

checks = Checks(device, say)         # the kernels of this process tell which of them is launched
checks.replace_ops()                 # implementations that are chosen from now on are checked
... any model, any step ...          # raises Wrong, or Broken
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import LMKitError, UnsupportedError
from lmkit.kernels import latent_ops, low_rank_ops, ops
from lmkit.kernels.cuda import module
from lmkit.kernels.cuda.gpus import Capability
from lmkit.kernels.cuda.module import Backend, Launch
from lmkit.kernels.cuda.switches import switches, without
from lmkit.kernels.registry import ExpertLinears, Implementation, Op
from lmkit.turbo.runners.cuda_device import CudaDevice

# Largest errors of a row, as shares of its largest number. The kernels' tests allow about as much.
TOLERANCES = {torch.float16: 0.01, torch.bfloat16: 0.05, torch.float32: 0.01}
CODES = 0.02  # share of 8-bit codes that may be others: halves between two codes are rounded either way
# What is left out first if a call is wrong: what is fast by other ways to the same result.
ORDER = (
    "norm", "work_list", "prefetch", "float8", "gemm_wide.cu", "gemm.cu", "decode_attention.cu", "wide_attention.cu",
    "prefill_attention.cu", "turn.cu", "append.cu",
)  # fmt: skip
WAYS = ORDER[:4]  # switches among them
VARIANTS = {("gemm.cu", "FLOAT8_X"): "float8"}  # of a file, with the switch that turns only these off
TRIES = 3  # of pairs of results that have to be the same
# Places of arguments that have results. An op may leave others, such as keys, rotated or not.
WRITTEN = {"rope_paged_attention": (5, 6), "rope_append": (0, 5, 6)}


class Wrong(LMKitError):
    """Kernels computed something else than torch, or something else the second time. `names`: those to leave out.
    `lost`: the GPU refuses to go on in this process."""

    def __init__(self, names: list[str], reason: str, *, lost: bool = False) -> None:
        super().__init__(reason)
        self.names, self.lost = names, lost


class Broken(Wrong):
    """A kernel cannot be compiled or launched, or faults."""


class Watched:
    """A backend that says which file's kernel it launches, or a switch's, and waits for each."""

    def __init__(self, backend: Backend, device: CudaDevice, say: Callable[[str], None]) -> None:
        self._backend, self._device, self._say = backend, device, say
        self.launched: list[str] = []  # files

    def load(self, source: str, name: str, defines: dict[str, int]) -> Launch:
        part = next((VARIANTS[source, define] for define in defines if (source, define) in VARIANTS), source)
        self._say(part)
        inner = self._guarded(part, lambda: self._backend.load(source, name, defines))

        def launch(*given: Any) -> None:
            def launch_and_wait() -> None:
                inner(*given)
                self._device.synchronize()

            self._say(part)
            self._guarded(part, launch_and_wait)
            self.launched.append(source)

        return launch

    def _guarded(self, source: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (RuntimeError, UnsupportedError) as error:
            reason = str(error).partition("\n")[0]
            raise Broken([source], reason, lost=self._device.is_lost(error)) from error

    def device_name(self) -> str:
        return self._backend.device_name()

    def num_sms(self) -> int:
        return self._backend.num_sms()

    def capability(self) -> Capability:
        return self._backend.capability()

    def overlaps(self) -> bool:
        return self._backend.overlaps()


class Checks:
    """Checked implementations. `dtype`: that of activations, once it is known."""

    def __init__(self, device: CudaDevice, say: Callable[[str], None]) -> None:
        self._inner = module.backend(device.tensors)
        self._at, self._device_name = device.tensors, device.name
        self._watched = Watched(self._inner, device, say)
        self._twins: dict[int, Any] = {}  # by the address of a packed weight: what torch packed of the same weight
        self._originals: list[tuple[Op, list[Implementation]]] = []
        self.dtype = torch.float16
        self.count = 0
        self.wrong: Wrong | None = None  # what was raised first: an engine goes on after a step that raises

    def replace_ops(self) -> None:
        """Check all calls of implementations that are chosen from now on."""
        module.BACKENDS[self._at] = self._watched
        for op in _all_ops():
            plain = [impl for impl in op.implementations if not impl.is_kernel]
            if plain:
                self._originals.append((op, list(op.implementations)))
                op.implementations[:] = [
                    self._checked(op, impl, plain[0]) if impl.device == self._device_name else impl
                    for impl in op.implementations
                ]

    def restore(self) -> None:
        """End the checks, but for implementations that were chosen meanwhile: they are plain if nothing is watched."""
        module.BACKENDS[self._at] = self._inner
        for op, implementations in self._originals:
            op.implementations[:] = implementations
        self._originals.clear()

    def twin(self, packed: Any) -> Any:
        """What torch packed of the weight that a kernel packed."""
        return self._twins[_address(packed)]

    def _checked(self, op: Op, impl: Implementation, plain: Implementation) -> Implementation:
        def pack(*given: Any, **options: Any) -> Any:
            packed = impl.pack(*given, **options)
            self._twins[_address(packed)] = plain.pack(*given, **options)
            return packed

        def run(*args: Any, **options: Any) -> Any:
            return self._call(op, impl.run, plain.run, args, options)

        experts = impl.of_experts
        if experts is not None:
            experts = dataclasses.replace(experts, multiply=self._experts(experts, plain))
        return dataclasses.replace(impl, run=run, pack=pack, of_experts=experts)

    def _experts(self, kernel: ExpertLinears, plain: Implementation) -> Callable[..., Any]:
        def by_torch(x: Tensor, places: ops.Places, table: Any, by_token: bool) -> Tensor:
            found: Tensor | None = None
            for place in range(int(places.active[0])):
                expert, first, end = places.active[1 + 3 * place : 4 + 3 * place].tolist()
                weight, bias = table.parts[expert]
                rows = x[places.tokens[first:end]] if by_token else x[first:end]
                y = plain.run(rows, self.twin(weight), bias)
                found = x.new_zeros(len(places.tokens), y.shape[1], dtype=y.dtype) if found is None else found
                found[first:end] = y
            assert found is not None
            return found

        def multiply(x: Tensor, places: ops.Places, table: Any, by_token: bool) -> Any:
            return self._call(None, kernel.multiply, by_torch, (x, places, table, by_token), {})

        return multiply

    def _call(self, *given: Any) -> Any:
        try:
            return self._compared(*given)
        except Wrong as wrong:
            self.wrong = self.wrong or wrong
            raise

    def _compared(
        self, op: Op | None, run: Callable[..., Any], by_torch: Callable[..., Any], args: Any, options: Any
    ) -> Any:
        """The result of the kernels, checked. Raises Wrong."""
        if module.BACKENDS.get(self._at) is not self._watched:
            return run(*args, **options)
        name = "products of experts" if op is None else op.name
        keep = args[1] if op is not None and name.startswith("linear_") else args[2] if op is None else None
        before = _copied((args, options), keep)
        self._watched.launched.clear()
        y = run(*args, **options)
        files = list(dict.fromkeys(self._watched.launched))
        if not files or callable(y):  # torch computed it
            return y
        wanted = _copied(before, keep)
        torch_args = wanted[0] if op is None or keep is None else _with_second(wanted[0], self.twin(keep))
        want = by_torch(*torch_args, **wanted[1]), _written(name, wanted, keep)
        self.count += 1

        def again() -> tuple[Any, Any]:
            given = _copied(before, keep)
            return run(*given[0], **given[1]), _written(name, given, keep)

        if problem := self._problem(name, (y, _written(name, (args, options), keep)), want, args):
            raise Wrong(self._guilty(files, lambda: not self._problem(name, again(), want, args)), f"{name}: {problem}")
        if not _same((y, _written(name, (args, options), keep)), again()):
            guilty = self._guilty(files, lambda: all(_same(again(), again()) for _ in range(TRIES)))
            raise Wrong(guilty, f"{name}: another result the second time")
        if "gemm_wide.cu" in files:
            with without("gemm_wide.cu"):
                if problem := self._problem(name, again(), want, args):
                    raise Wrong(["gemm.cu"], f"{name}: {problem}")
        return y

    def _guilty(self, files: list[str], is_right: Callable[[], bool]) -> list[str]:
        """What has to be left out for a right result: one of these files, or a way that it takes, or else all files."""
        possible = [name for name in WAYS if getattr(switches(), name)]
        possible += sorted(files, key=lambda file: ORDER.index(file) if file in ORDER else len(ORDER))
        for name in possible:
            with without(name):
                if is_right():
                    return [name]
        return files

    def _problem(self, name: str, got: Any, want: Any, args: Any) -> str:
        """How a result differs from torch's, or an empty text."""
        pairs = list(_pairs(got, want))
        if name == "kv_rows":  # rows after `length` hold anything
            pairs = [(mine[: args[2]], other[: args[2]]) for mine, other in pairs[:1]]
        return next((text for mine, other in pairs if (text := _difference(mine, other, TOLERANCES[self.dtype]))), "")


def _all_ops() -> Iterator[Op]:
    for each in (ops, low_rank_ops, latent_ops):
        yield from (value for value in vars(each).values() if isinstance(value, Op))


def _address(packed: Any) -> int:
    """The address of a packed weight's largest tensor."""
    return max(_tensors(packed), key=lambda tensor: tensor.nbytes).data_ptr()


def _with_second(args: tuple[Any, ...], second: Any) -> tuple[Any, ...]:
    return args[0], second, *args[2:]


def _written(name: str, value: Any, keep: Any) -> Any:
    """Arguments that an op may write results to: all but a packed weight, if WRITTEN does not name them."""
    args, options = value
    places = WRITTEN.get(name, range(len(args)))
    return [args[place] for place in places if args[place] is not keep], options


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, in order. Those of a dataclass are those of its fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])


def _copied(value: Any, keep: Any) -> Any:
    """A copy with tensors of its own. What was one tensor stays one; `keep` is the same object."""
    known: dict[int, Any] = {id(keep): keep}

    def copied(value: Any) -> Any:
        if id(value) in known:
            return known[id(value)]
        new = value
        if isinstance(value, Tensor):
            new = value.clone()
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            new = type(value)(*map(copied, value))
        elif isinstance(value, tuple | list):
            new = type(value)(map(copied, value))
        elif isinstance(value, dict):
            new = {key: copied(each) for key, each in value.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and any(True for _ in _tensors(value)):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            new = dataclasses.replace(value, **{name: copied(getattr(value, name)) for name in fields})
        known[id(value)] = new
        return new

    return copied(value)


def _pairs(got: Any, want: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of two results beside each other. Of ops.Places that of `active` which means something."""
    mine, others = list(_tensors(got)), list(_tensors(want))
    if isinstance(got, tuple) and isinstance(got[0], ops.Places):
        end = 1 + 3 * int(others[2][0])
        mine[2], others[2] = mine[2][:end], others[2][:end]
    return zip(mine, others, strict=True)


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(_bits(x), _bits(y)) for x, y in _pairs(one, other))


def _bits(x: Tensor) -> Tensor:
    """As integers, among which NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def _difference(mine: Tensor, other: Tensor, tolerance: float) -> str:
    """How a tensor differs from torch's, or an empty text."""
    if mine.shape != other.shape:
        return f"a result of shape {list(mine.shape)}, not {list(other.shape)}"
    if not mine.numel():
        return ""
    if not mine.dtype.is_floating_point:
        share = float((mine != other).float().mean())
        allowed = CODES if mine.dtype in (torch.uint8, torch.int8) else 0.0
        return f"{share:.1%} of the numbers are others" if share > allowed else ""
    one, two = mine.float(), other.float()
    if not torch.equal(one.isfinite(), two.isfinite()):
        return "numbers that are not finite"
    one, two = (x.nan_to_num(0.0, 0.0, 0.0).reshape(-1, x.shape[-1] if x.dim() else 1) for x in (one, two))
    largest = two.abs().amax(1, keepdim=True)
    scale = largest.clamp_min(max(1e-3 * float(largest.max()), 1e-6))
    error = float(((one - two).abs() / scale).max())
    return f"errors of {error:.2g} of the largest number, more than {tolerance}" if error > tolerance else ""
