"""Parts of the engine on a GPU that can be turned on and off: to measure with and without, and to go on without one
that fails.

    LMKIT_CUDA=overlap=off,prefetch=off         # see Switches
    LMKIT_CUDA=kernels=off                      # torch computes everything
    LMKIT_CUDA=gemm_wide.cu=off,norm.cu=off     # the kernels of these files of csrc

None of them changes a result, except where its comment says so. What a file's kernels computed, others compute then:

    programmatic launch (overlap) -> the driver's launch (launcher) -> CuPy's; capture -> launch by launch
    float8 -> the same inputs in 16 bits;  gemm_wide.cu -> gemm.cu -> dequantize.cu and torch's library -> torch
    decode_attention.cu -> prefill_attention.cu -> torch
    argmax -> sampling.cu -> the host;  any other file -> torch
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import msgspec

from lmkit.environment import environment
from lmkit.errors import ConfigError
from lmkit.kernels.cuda.source import FOLDER
from lmkit.log import get_logger

log = get_logger(__name__)

FILES = frozenset(path.name for path in FOLDER.glob("*.cu"))
ASKED = "LMKIT_CUDA"


class Switches(msgspec.Struct, frozen=True):
    """What is on."""

    kernels: bool = True  # otherwise torch computes everything
    capture: bool = True  # steps are captured
    launcher: bool = True  # launches by the driver's cuLaunchKernelEx instead of CuPy's call
    overlap: bool = True  # a kernel begins while the one before it ends; needs `launcher` and compute capability 9.0
    prefetch: bool = True  # a product that begins early asks L2 for its next weights; needs `overlap`
    norm: bool = True  # products of up to 4 tokens compute the norm before them
    mixed: bool = True  # steps with prompt tokens are captured, by size
    drafts: bool = True  # steps with drafts are captured, by size
    argmax: bool = True  # captured steps choose tokens, and a kernel of its own those of greedy sequences
    work_list: bool = True  # attention to new tokens cuts long sequences into more items than short ones
    wgmma: bool = True  # products of 48 to 256 tokens take csrc/gemm_wide.cu; needs compute capability 9.0
    experts: bool = True  # one product has all experts of a layer, and steps with experts are captured
    # Products of float8 weights and rounded inputs are of float8 numbers; needs compute capability 8.9. Otherwise the
    # same inputs are multiplied in 16 bits.
    float8: bool = True
    plain_heads: bool = True  # long prompts of latent attention are computed over plain keys and values of each head
    # Packed weights are kept in 16 bits, too, if memory allows, and multiplied so from 128 tokens on instead of 257.
    copies: bool = False
    # A row's bits do not depend on the rows beside it: `--deterministic`. It pins the switches of INVARIANT, too.
    invariant: bool = False

    off: frozenset[str] = frozenset()  # of FILES: those whose kernels are not launched


INVARIANT = {"norm": False, "wgmma": False, "copies": False}  # other orders of sums, for some numbers of tokens
_TURNED_OFF: dict[str, str] = {}  # switches and FILES that this process goes on without, with the reasons


# Whether the engine that computes now is deterministic: kernels.settings sets it.
IS_PINNED: ContextVar[bool] = ContextVar("deterministic", default=False)


def switches() -> Switches:
    """The switches of the process, or what the engine that computes now makes of them. Raises ConfigError for text that
    means nothing."""
    return _switches(IS_PINNED.get())


@cache
def _switches(is_pinned: bool) -> Switches:
    found = parse(environment().cuda)
    found = msgspec.structs.replace(found, off=found.off | (FILES & _TURNED_OFF.keys()), **_without(_TURNED_OFF))
    if is_pinned or found.invariant:
        return msgspec.structs.replace(found, invariant=True, **INVARIANT)
    return found


def read_anew() -> None:
    """Read the environment again, which has changed, or what is turned off."""
    _switches.cache_clear()


def turn_off(name: str, reason: str) -> None:
    """Go on without a switch or one of FILES in this process. Engines that are made from now on know it."""
    log.warning("%s is turned off: %s", name, reason)
    _TURNED_OFF.setdefault(name, reason)
    read_anew()


@contextmanager
def without(name: str) -> Iterator[None]:
    """Without a switch or one of FILES for a while. Only what is looked up meanwhile knows it."""
    before = dict(_TURNED_OFF)
    _TURNED_OFF[name] = "for a while"
    read_anew()
    try:
        yield
    finally:
        _TURNED_OFF.clear()
        _TURNED_OFF.update(before)
        read_anew()


def turned_off() -> dict[str, str]:
    """What this process goes on without, and why: `turn_off`."""
    return dict(_TURNED_OFF)


def off(*files: str) -> str | None:
    """Why the kernels of some of these files are not launched, or None."""
    return next(
        (f"{file} is turned off: {_TURNED_OFF.get(file, ASKED)}" for file in files if file in switches().off), None
    )


def parse(text: str) -> Switches:
    """The switches that `text` asks for; the others are as by default."""
    names, values = [name for name in Switches.__struct_fields__ if name != "off"], {"on": True, "off": False}
    given: dict[str, bool] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.partition("=")
        if name not in (*names, *FILES) or value not in values:
            expected = f"expected NAME=on or NAME=off, with NAME one of {', '.join((*names, *sorted(FILES)))}"
            raise ConfigError(f"{ASKED}: {part!r}: {expected}")
        given[name] = values[value]
    files = frozenset(name for name in FILES if not given.pop(name, True))
    return Switches(**given, off=files)


def _without(names: Iterable[str]) -> dict[str, bool]:
    return {name: False for name in names if name not in FILES}
