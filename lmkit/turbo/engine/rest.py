"""What an engine gives back while it has nothing to do: memory of KV blocks that nobody needs."""

from __future__ import annotations

from lmkit.config import EngineConfig
from lmkit.log import get_logger
from lmkit.turbo import host_memory
from lmkit.turbo.engine import pages
from lmkit.turbo.host_memory import gib
from lmkit.turbo.kv.blocks import KVBlocks
from lmkit.turbo.kv.manager import KVManager

GIVE_BACK_TURNS = 60  # calls of `Rest.turn`, one a second, after which free blocks give back their memory

log = get_logger(__name__)


class Rest:
    """The memory of one engine's blocks on a CPU. Processes that share a model keep theirs, and so does a GPU; blocks
    of a model without attention have none.

    A minute without work gives back the memory of free blocks. If the system is short of memory, cached blocks give
    back as much as it lacks, the least recently used first, unless the user chose the size of the pool.
    """

    def __init__(self, config: EngineConfig, kv: KVManager, blocks: KVBlocks) -> None:
        self._kv, self._blocks = kv, blocks
        self._on_host = not config.target.own_memory
        self._is_on = self._on_host and config.num_processes == 1 and blocks.nbytes > 0
        self._evicts = config.kv_memory is None
        self._turns = self._steps = 0
        if self._on_host:
            kv.growth.shortage = host_memory.shortage

    def figures(self) -> dict[str, int]:
        """Fields of EngineStats: a GPU's blocks have their memory from the start."""
        return {} if self._on_host else {"blocks_backed": self._kv.pool.num_blocks}

    def turn(self, steps: int) -> None:
        """Another second has passed without work. `steps`: of the engine so far."""
        self._turns, self._steps = self._turns + 1 if steps == self._steps else 1, steps
        if not self._is_on or self._kv.copies or self._kv.saves:  # these are blocks that the next plan still reads
            return
        evicted = -(-self._kv.growth.shortage() // self._blocks.nbytes) if self._evicts else 0
        if evicted or self._turns == GIVE_BACK_TURNS:
            given = pages.give_back(self._blocks.parts, self._kv.growth.give_back(evicted))
            if given:
                log.info("%s of the KV cache's memory was given back", gib(given))
