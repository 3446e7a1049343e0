"""Print the instruction set levels that this machine has, best first, without the best: `make test-isa` forces each."""

from __future__ import annotations

from lmkit.kernels.cpu import isa

if __name__ == "__main__":
    print(*[name for name, level in isa.LEVELS.items() if not isa.missing(level)][1:])
