"""ik_llama.cpp by ik-llama-cpp-python's low-level interface, whose calls get the names of llama-cpp-python's."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any

from ik_llama_cpp import _ctypes_api as fork

ENABLED = 1


def _context_params() -> Any:
    params = fork.llama_context_default_params()
    params.flash_attn = True
    return params


def _system_info() -> bytes:
    function = fork._lib.llama_print_system_info
    function.restype = ctypes.c_char_p
    return bytes(function())


def _copy_sequence(context: int, source: int, target: int, start: int, end: int) -> None:
    function = fork._lib.llama_kv_cache_seq_cp
    function.argtypes, function.restype = (ctypes.c_void_p, *[ctypes.c_int32] * 4), None
    function(context, source, target, start, end)


def named_as_mainline() -> ModuleType:
    """The module that benchmarks.peers.llama_cpp imports as llama_cpp. It has no loop for answers."""
    module = ModuleType("llama_cpp")
    module.__dict__.update(vars(fork))
    names: Any = module
    names.LLAMA_FLASH_ATTN_TYPE_ENABLED = ENABLED
    names.llama_context_default_params, names.llama_print_system_info = _context_params, _system_info
    names.llama_get_memory, names.llama_memory_seq_cp = lambda context: context, _copy_sequence
    names.llama_memory_clear = lambda context, _data: fork.llama_kv_cache_clear(context)
    return module


if __name__ == "__main__":
    sys.modules["llama_cpp"] = named_as_mainline()
    sys.modules["llama_cpp.llama_speculative"] = speculative = ModuleType("llama_cpp.llama_speculative")
    speculative.__dict__["LlamaPromptLookupDecoding"] = None
    from benchmarks.peers.llama_cpp import LlamaCpp, prepare
    from benchmarks.peers.protocol import main

    LlamaCpp.package = "ik-llama-cpp-python"
    main(LlamaCpp, prepare)
