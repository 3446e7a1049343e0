"""lmkit: quantize large language models and serve them.

Public names are resolved on first use, so importing lmkit is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lmkit.other_names import hint

if TYPE_CHECKING:
    from lmkit.api.async_pipeline import AsyncPipeline
    from lmkit.api.generation import GenerationConfig
    from lmkit.api.in_process import Pipeline, pipeline
    from lmkit.api.response import Response, Session
    from lmkit.config import EngineConfig, ServerConfig
    from lmkit.errors import LMKitError, RequestError

__version__ = "0.1.0"

__all__ = [
    "AsyncPipeline",
    "EngineConfig",
    "GenerationConfig",
    "LMKitError",
    "Pipeline",
    "RequestError",
    "Response",
    "ServerConfig",
    "Session",
    "__version__",
    "pipeline",
]

_HOMES = {
    "AsyncPipeline": "api.async_pipeline",
    "EngineConfig": "config",
    "GenerationConfig": "api.generation",
    "LMKitError": "errors",
    "Pipeline": "api.in_process",
    "RequestError": "errors",
    "Response": "api.response",
    "ServerConfig": "config",
    "Session": "api.response",
    "pipeline": "api.in_process",
}

if not TYPE_CHECKING:  # a type checker sees the imports above

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            if _HOMES[name].startswith("api."):  # not every other system can import it
                importlib.import_module("lmkit.config").require_linux()
            return getattr(importlib.import_module(f"lmkit.{_HOMES[name]}"), name)
        if advice := hint(name, table="package"):  # an ImportError shows its message where an AttributeError would not
            raise ImportError(f"lmkit has no {name}{advice}")
        raise AttributeError(f"module 'lmkit' has no attribute {name!r}{hint(name, __all__)}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
