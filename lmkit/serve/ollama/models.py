"""What Ollama's API tells of the models: /api/tags, /api/ps, /api/show."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

from lmkit.errors import LMKitError
from lmkit.formats.fingerprint import fingerprint
from lmkit.serve.pool import PooledModel
from lmkit.serve.serving import Serving
from lmkit.small_files import exists
from lmkit.text.infill import find_marks
from lmkit.text.special_tokens import read_config
from lmkit.turbo.request import EngineInfo
from lmkit.web.ollama import entry, written

FILLS_IN = "{# .Suffix #}"  # Continue looks for this word of Go's templates in the template of a model that fills in
FOREVER = 3600.0 * 24 * 365 * 100  # what Ollama tells of a model that stays


def listed(model: PooledModel, name: str) -> dict[str, Any]:
    """A model under one of its names, in /api/tags."""
    path = model.engine.model_path
    return entry(
        name, created=model.serving.created, size=_size(path), digest=fingerprint(path), family=_config(path)[0]
    )


def running(model: PooledModel) -> dict[str, Any]:
    """A model that is awake, in /api/ps. Its sizes are those of its engine."""
    info, left = model.engine.info, FOREVER if model.keep_alive is None else model.keep_alive
    size = info.reserved if info else 0
    since = model.used_at - time.monotonic() if model.used_at and model.keep_alive is not None else 0.0
    return listed(model, model.name) | {
        "size": size,
        "expires_at": written(time.time() + max(0.0, since + left)),
        "size_vram": size if info and info.captured else 0,
        "context_length": info.max_model_len if info else 0,
    }


def shown(server: Serving) -> dict[str, Any]:
    """What /api/show tells. The model must be awake."""
    info, tokenizer = server.info, server.tokenizer
    path = server.engine.model_path
    family, config = _config(path)
    template = tokenizer.chat_template
    facts = {
        "general.architecture": family or "lmkit",
        "general.basename": server.model_name,
        f"{family or 'lmkit'}.context_length": info.max_model_len,
        f"{family or 'lmkit'}.embedding_length": info.hidden_size or config.get("hidden_size"),
        f"{family or 'lmkit'}.block_count": config.get("num_hidden_layers"),
        f"{family or 'lmkit'}.vocab_size": info.vocab_size,
    }
    parameters = {"num_ctx": info.max_model_len} | info.sampling.sampling()
    can = capabilities(server, info)
    about = entry(server.model_name, created=server.created, family=family)
    return {
        "modelfile": f"# served by lmkit\nFROM {server.model_name}\n",
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
        "template": ("" if template is None else template.source) + FILLS_IN * ("insert" in can),
        "details": about["details"],
        "model_info": {name: value for name, value in facts.items() if value is not None},
        "capabilities": can,
        "modified_at": about["modified_at"],
    }


def capabilities(server: Serving, info: EngineInfo) -> list[str]:
    """Ollama's words for what a model can."""
    style = server.style
    can = {
        "completion": info.has_head,
        "embedding": not info.has_head,
        "vision": not isinstance(info.images, str),
        "tools": info.has_head and style.dialect is not None,
        "insert": info.has_head and find_marks(server.tokenizer) is not None,
        "thinking": style.thought is not None,
    }
    return [name for name, it_can in can.items() if it_can]


@cache
def _config(path: Path) -> tuple[str, dict[str, Any]]:
    """The model's family as its config.json names it, and that file."""
    try:
        config = read_config(path / "config.json") if exists(path / "config.json") else {}
    except LMKitError:
        config = {}
    family = config.get("model_type")
    return family if isinstance(family, str) else "", config


@cache
def _size(path: Path) -> int:
    """Bytes of the model's files; 0 if they are gone."""
    try:
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0
