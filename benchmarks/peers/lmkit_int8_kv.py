"""lmkit with an INT8 KV cache."""

from __future__ import annotations

from benchmarks.peers.lmkit_engine import LmkitEngine, prepare
from benchmarks.peers.protocol import Options, main


def make(options: Options) -> LmkitEngine:
    return LmkitEngine(options, kv_dtype="int8")


if __name__ == "__main__":
    main(make, prepare)
