"""Parts of the engine on a GPU that can be turned on and off, so that each can be measured with and without.

    LMKIT_CUDA=overlap=off,prefetch=off

None of them changes a result, except where its comment says so.
"""

from __future__ import annotations

from functools import cache

import msgspec

from lmkit.environment import environment
from lmkit.errors import ConfigError


class Switches(msgspec.Struct, frozen=True):
    """What is on."""

    launcher: bool = True  # launches by the driver's cuLaunchKernelEx instead of CuPy's call
    overlap: bool = True  # a kernel begins while the one before it ends; needs `launcher` and compute capability 9.0
    prefetch: bool = True  # a product that begins early asks L2 for its next weights; needs `overlap`
    norm: bool = True  # products of up to 4 tokens compute the norm before them
    mixed: bool = True  # steps with prompt tokens are captured, by size
    drafts: bool = True  # steps with drafts are captured, by size
    argmax: bool = True  # captured steps choose greedy tokens themselves
    work_list: bool = True  # attention to new tokens cuts long sequences into more items than short ones
    wgmma: bool = True  # products of 48 to 256 tokens take csrc/gemm_wide.cu; needs compute capability 9.0
    experts: bool = True  # one product has all experts of a layer, and steps with experts are captured
    plain_heads: bool = True  # long prompts of latent attention are computed over plain keys and values of each head
    # Packed weights are kept in 16 bits, too, if memory allows, and multiplied so from 128 tokens on instead of 257.
    copies: bool = False
    # A row's bits do not depend on the rows beside it: `--deterministic`. It pins the switches of INVARIANT, too.
    invariant: bool = False


INVARIANT = {"norm": False, "wgmma": False, "copies": False}  # other orders of sums, for some numbers of tokens
_TURNED_ON: set[str] = set()  # by engines of this process, for good


@cache
def switches() -> Switches:
    """The switches of this process. Raises ConfigError for text that means nothing."""
    found = msgspec.structs.replace(parse(environment().cuda), **dict.fromkeys(_TURNED_ON, True))
    return msgspec.structs.replace(found, **INVARIANT) if found.invariant else found


def turn_on(name: str) -> None:
    """Turn a switch on for every engine of this process."""
    _TURNED_ON.add(name)
    switches.cache_clear()


def parse(text: str) -> Switches:
    """The switches that `text` asks for; the others are as by default."""
    names, values = Switches.__struct_fields__, {"on": True, "off": False}
    given = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.partition("=")
        if name not in names or value not in values:
            expected = f"expected NAME=on or NAME=off, with NAME one of {', '.join(names)}"
            raise ConfigError(f"LMKIT_CUDA: {part!r}: {expected}")
        given[name] = values[value]
    return Switches(**given)
