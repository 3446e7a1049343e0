"""One pass of a transformers module that only looks: which layers call attention, and what a sequence keeps.

The module is on the meta device, where a pass computes shapes alone. Modules that ask for a value there are given
zeros, which take no memory until they are written.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import DynamicCache

from lmkit.attention_spec import AttentionSpec
from lmkit.errors import UnsupportedError
from lmkit.models.flexible.caches import KNOWN_LAYERS, NAMES, PLAIN_LAYERS, PagedLayer, tensors_in
from lmkit.models.flexible.interface import NAME, attending, use

LENGTHS = (3, 7)  # tokens of two passes: what grows between them grows with each token
FLOAT_BYTES = 4
THEIRS = "eager"  # the attention that all modules have
# Options of attention calls that change nothing here.
IGNORED = frozenset({
    "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "s_aux", "scaling", "sliding_window", "softcap", "training",
    "use_cache",
})  # fmt: skip
CAUSAL, WINDOWED = "causal_mask_function", "sliding_window_overlay"


@dataclass(frozen=True)
class AttentionCall:
    """A module's call of the attention function. Keys and values have `key_dim` and `value_dim` numbers a head."""

    layer: int  # of the cache
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    spec: AttentionSpec
    source: int | None = None  # the layer whose keys and values these are

    @property
    def dim(self) -> int:
        """What lmkit stores for each head, of keys as of values."""
        return max(self.key_dim, self.value_dim)


@dataclass(frozen=True)
class Trace:
    """What passes showed."""

    calls: tuple[AttentionCall, ...]  # in the order in which a pass makes them; none if attention is not lmkit's
    modules: tuple[str, ...]  # of each call: the name of the module that makes it
    fixed_bytes: int  # of a sequence's own cache, whatever its length
    token_bytes: int  # and for each token
    cache: str  # of NAMES, or an empty text if the module gives none
    takes_positions: bool  # whether tokens' positions are computed with
    reason: str = ""  # why lmkit's attention does not compute the calls
    language: str = ""  # the part that has the layers; towers stand beside it
    stored: tuple[AttentionCall, ...] = ()  # layers of the cache that lmkit keeps for attention of transformers

    @property
    def packs(self) -> bool:
        """Whether a step's tokens, of several sequences, are computed side by side."""
        return bool(self.calls) and self.takes_positions and not (self.fixed_bytes or self.token_bytes)

    @property
    def text(self) -> str:
        """Where attention and states are."""
        if self.packs:
            return "lmkit's KV blocks, all sequences of a step together"
        if self.calls:
            states = ", states in transformers' caches" if self.fixed_bytes or self.token_bytes else ""
            return f"lmkit's KV blocks{states}, one sequence at a time"
        where = " on lmkit's KV blocks" if self.stored else ""
        return f"transformers' own{where}, one sequence at a time: {self.reason}"


@dataclass
class _Watch(TorchFunctionMode):
    """Sees whether any operation reads a tensor."""

    tensor: Tensor
    was_read: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.was_read = self.was_read or any(each is self.tensor for each in args)
        return func(*args, **(kwargs or {}))


@dataclass
class _Looks:
    """Takes attention calls down. `problem` is the first reason why lmkit cannot compute one."""

    names: dict[nn.Module, str]
    calls: list[AttentionCall] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    problem: str = ""
    windows: set[int] = field(default_factory=set)  # of the masks that the pass asks for; 0: a mask without one
    language: str = ""  # the innermost part that makes states of embeddings
    stored: tuple[AttentionCall, ...] = ()  # see Trace

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        layer, window = getattr(module, "layer_idx", None), self._window(options.get("sliding_window") or 0)
        scale = options.get("scaling")
        spec = AttentionSpec(
            float(q.shape[-1] ** -0.5 if scale is None else scale), int(window), 0, float(options.get("softcap") or 0)
        )
        others = {name for name, value in options.items() if value is not None} - IGNORED
        if layer is None:
            self.problem = self.problem or "its attention modules have no number"
        elif others:
            self.problem = self.problem or f"its attention takes {', '.join(sorted(others))}"
        elif k.shape[2] != q.shape[2] or len(q) != 1:
            self.problem = self.problem or "its queries are not those of the keys' tokens"
        else:
            source = next((call.layer for call, key in zip(self.calls, self.keys, strict=True) if key is k), None)
            self.calls.append(AttentionCall(layer, q.shape[1], k.shape[1], k.shape[3], v.shape[3], spec, source))
            self.modules.append(self.names[module])
            self.keys.append(k)
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def _window(self, named: int) -> int:
        """The window of a call that names one, or names none: 0. transformers' own attention heeds the mask alone."""
        return next(iter(self.windows)) if len(self.windows) == 1 else named

    def end(self, part: nn.Module, args: Any, output: Any) -> None:
        """A part's pass has ended. Inner parts end before outer ones."""
        takes_embeddings = "inputs_embeds" in inspect.signature(part.forward).parameters
        if takes_embeddings and getattr(output, "last_hidden_state", None) is not None:
            self.language = self.language or self.names[part]

    def mask(self, options: dict[str, Any]) -> None:
        parts = dict(_parts(options["mask_function"]))
        self.windows.add(parts.get(WINDOWED) or 0)
        if other := [name for name in parts if name not in (CAUSAL, WINDOWED)]:
            self.problem = self.problem or f"its tokens see others by {other[0]}"


def _parts(function: Any) -> Iterator[tuple[str, int | None]]:
    """The names of the conditions that a mask function of transformers joins, each with the size of its window."""
    name, inner = function.__qualname__.partition(".<locals>")[0], inspect.getclosurevars(function).nonlocals
    if name.startswith("and_") and "mask_functions" in inner:
        for each in inner["mask_functions"]:
            yield from _parts(each)
    else:
        yield name, inner.get("sliding_window")


def trace(module: nn.Module, architecture: str) -> Trace:
    """Look at a module, which is on the meta device. Raises UnsupportedError for one that cannot be served.

    If a pass with lmkit's attention fails there, memory that nothing is written to takes the place of weights. If it
    fails again, the module needs masks: attention is transformers' own then.
    """
    errors = list[Exception]()
    for name, device in ((NAME, "meta"), (NAME, "cpu"), (THEIRS, "cpu")):
        if device != "meta" and next(module.parameters()).device.type == "meta":
            module.to_empty(device=device)
        try:
            return _trace(module, name, repr(errors[-1]) if errors else "")
        except UnsupportedError as error:
            raise UnsupportedError(f"{architecture}: {error}") from None
        except Exception as error:  # noqa: BLE001 - of any kind: it is foreign code
            errors.append(error)
    raise UnsupportedError(
        f"{architecture}: transformers cannot compute a token of it: {errors[-1]!r:.300}"
    ) from errors[-1]


def _trace(module: nn.Module, implementation: str, failed: str) -> Trace:
    use(module, implementation)
    looks, kept, read, name = _passes(module)
    first, language = looks[0], looks[0].language
    reason = first.problem or ("" if first.calls else "its modules do not call transformers' attention functions")
    if len({call.layer for call in first.calls}) < len(first.calls):
        reason = reason or "several of its attention modules share a number"
    if implementation != NAME:
        reason = f"its modules fail with other attention: {failed:.200}"
    elif reason:
        use(module, THEIRS)
        looks, kept, read, name = _passes(module)
    calls, modules = ((), ()) if reason else (tuple(first.calls), tuple(first.modules))
    if reason and looks[0].stored and looks[0].stored == looks[1].stored:
        return Trace((), (), 0, 0, name, read, reason, language, looks[0].stored)
    growth = (kept[1] - kept[0]) // (LENGTHS[1] - LENGTHS[0])
    return Trace(calls, modules, kept[0] - growth * LENGTHS[0], growth, name, read, reason, language)


def _passes(module: nn.Module) -> tuple[list[_Looks], list[int], bool, str]:
    """Two passes: the calls, the bytes of what is kept besides keys and values of calls, whether positions are read,
    and the name of the cache."""
    names = {part: name for name, part in module.named_modules()}
    looks, kept, read, found = list[_Looks](), list[int](), False, ""
    for length in LENGTHS:
        look = _Looks(names)
        found, cache, was_read = _look(module, look, length)
        look.problem, look.stored = look.problem or _more_than_pages(cache, look), _plain_layers(cache, length)
        _check_windows(cache, look)
        read = read or was_read
        looks.append(look)
        numbers = (x.numel() for x in tensors_in(_apart(cache, look)))
        kept.append(FLOAT_BYTES * sum(count for count in numbers if count > 1))  # a window's size is one number
    return looks, kept, read, found


def _apart(cache: Any, look: _Looks) -> Any:
    """A cache without the keys and values that lmkit's attention has."""
    layers = getattr(cache, "layers", None)
    if layers is None or look.problem:
        return cache
    ours = {call.layer for call in look.calls}
    return [_of_layer(layer) if index in ours else layer for index, layer in enumerate(layers)]


def _more_than_pages(cache: Any, look: _Looks) -> str:
    """Why keys and values of calls cannot leave a cache, or an empty text."""
    if isinstance(cache, DynamicCache) and type(cache) is not DynamicCache:
        return f"it takes no cache but {type(cache).__name__}"
    layers = getattr(cache, "layers", [])
    kinds = {type(layers[call.layer]) for call in look.calls if call.layer < len(layers)} - {*KNOWN_LAYERS}
    return f"its attention keeps more than keys and values ({kinds.pop().__name__})" if kinds else ""


def _plain_layers(cache: Any, length: int) -> tuple[AttentionCall, ...]:
    """The layers of a cache of so many tokens that keeps keys and values of each, and nothing else. None otherwise."""
    found = []
    for index, layer in enumerate(cache.layers if type(cache) is DynamicCache else ()):
        if type(layer) not in PLAIN_LAYERS:
            return ()
        if layer.is_initialized:
            keys, values = layer.keys.shape, layer.values.shape
            if len(keys) != 4 or keys[::2] != (1, length) or values[:3] != keys[:3]:
                return ()
            found.append(AttentionCall(index, keys[1], keys[1], keys[3], values[3], AttentionSpec(1.0)))
    return tuple(found)


def _check_windows(cache: Any, look: _Looks) -> None:
    """Raise UnsupportedError if transformers' cache forgets keys that its mask shows: answers would depend on where a
    prompt is cut."""
    layers = getattr(cache, "layers", []) if not look.problem else []
    for call in look.calls:
        kept = getattr(layers[call.layer], "sliding_window", 0) if call.layer < len(layers) else 0
        if kept and kept != call.spec.window:
            seen = f"the last {call.spec.window}" if call.spec.window else "all"
            raise UnsupportedError(
                f"transformers keeps keys of the last {kept} tokens and lets a token of a whole prompt see {seen}"
            )


def _of_layer(layer: Any) -> Any:
    """What a layer keeps besides keys and values."""
    known = ("keys", "values") if not isinstance(layer, PagedLayer) else ()
    return {name: value for name, value in vars(layer).items() if name not in known}


@torch.no_grad()
def _look(module: nn.Module, look: _Looks, length: int) -> tuple[str, Any, bool]:
    """A pass over `length` tokens: the name of what it keeps, what it keeps, and whether it reads positions."""
    device = next(module.parameters()).device
    ids = torch.ones(1, length, dtype=torch.long, device=device)
    positions = torch.arange(length, device=device)[None]
    watch = _Watch(positions)
    options: dict[str, Any] = {"position_ids": positions} if takes(module, "position_ids") else {}
    hooks = [part.register_forward_hook(look.end) for part in module.modules() if part is not module]
    try:
        with attending(look), watch:
            output = module(input_ids=ids, use_cache=True, **options)
    finally:
        for hook in hooks:
            hook.remove()
    name = next((each for each in NAMES if getattr(output, each, None) is not None), "")
    return name, getattr(output, name, None), watch.was_read


def takes(module: nn.Module, name: str) -> bool:
    """Whether a module's forward takes an argument."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
