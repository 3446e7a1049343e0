"""How often Python looks for garbage in the processes of servers."""

from __future__ import annotations

import gc

RARELY = 10_000, 20, 50  # hundreds of connections have objects enough to be searched for 50 ms


def search_rarely() -> None:
    """Look for garbage rarely from now on in this process. For the entry of a server: its modules and routes stay, and
    searches among them take a sixth of its start.
    """
    gc.set_threshold(*RARELY)
