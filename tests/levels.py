"""Print the instruction set levels of this machine, best first, without the best one. `make test-isa` forces each."""

from __future__ import annotations

from lmkit.kernels.cpu import isa

if __name__ == "__main__":
    print(*[name for name, level in isa.LEVELS.items() if not isa.obstacle(level)][1:])
