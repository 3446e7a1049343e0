"""lmkit with an INT8 head and an INT8 KV cache, like the defaults of llama.cpp (Q6_K head) and OpenVINO (INT8 both)."""

from __future__ import annotations

from benchmarks.peers.lmkit_engine import LmkitEngine, prepare
from benchmarks.peers.protocol import Options, main


def load(options: Options) -> LmkitEngine:
    return LmkitEngine(options, kv_dtype="int8", lm_head="int8")


if __name__ == "__main__":
    main(load, prepare)
