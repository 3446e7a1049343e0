"""lmkit with a GGUF file as it is: its own bits, head included, and every other default."""

from __future__ import annotations

import lmkit
from benchmarks.peers.lmkit_engine import LmkitEngine, prepare
from benchmarks.peers.protocol import Facts, Options, main
from lmkit.config import EngineConfig
from lmkit.kernels.cpu import isa


class GgufEngine(LmkitEngine):
    def _facts(self, options: Options, settings: EngineConfig) -> Facts:
        kv = self.engine.info.kv_dtype
        note = f"the file's own bits, int8 activations, {kv} KV, no prefix cache, {isa.describe()}"
        return Facts(lmkit.__version__, note, options.model.stat().st_size, 2.0)


if __name__ == "__main__":
    main(GgufEngine, prepare)
