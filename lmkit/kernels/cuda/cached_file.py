"""Files in the cache folder that several processes may make at once: compiled kernels, tuned plans, self-tests."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Make or replace a file, completely or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    partial.write_bytes(data)
    partial.replace(path)
