"""lmkit: quantize large language models and serve them.

Public names are resolved on first use, so importing lmkit is cheap.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "pipeline": "lmkit.api",
    "Pipeline": "lmkit.api",
    "Response": "lmkit.api",
    "Session": "lmkit.api",
    "GenerationConfig": "lmkit.api",
    "EngineConfig": "lmkit.config",
    "ServerConfig": "lmkit.config",
    "LMKitError": "lmkit.errors",
    "RequestError": "lmkit.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lmkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
