"""Which engine serves a model, why, what it does without, and the command that serves it fastest: for `lmkit inspect`
and the log."""

from __future__ import annotations

from typing import Any

from lmkit import conflicts
from lmkit.config import EngineConfig
from lmkit.models.registry import why_no_family
from lmkit.models.resolved import ResolvedModel

FAST, FLEXIBLE = "fast", "flexible"


def engine_facts(model: ResolvedModel, config: EngineConfig) -> dict[str, Any]:
    """`name`, `why`, `attention`, `images`, `without` and `fastest`."""
    spec, path = model.source.spec, model.reader.path
    rounds = model.source.format.name == "dense" and config.quantize == "none"
    if not spec.foreign:
        fastest = f"lmkit quantize {path} -o OUT && lmkit serve OUT" if rounds else f"lmkit serve {path}"
        why = f"lmkit has the family of {spec.architecture}"
        return {"name": FAST, "why": why, "attention": None, "images": None, "without": [], "fastest": fastest}
    refused = conflicts.excluded(conflicts.FOREIGN)
    lacking = why_no_family(model.source.config)
    lost = {"captured steps": not model.source.captures, "reuse of prefixes": not spec.reusable}
    rounded = "" if "quantize" in refused or not rounds else " --quantize int4"
    return {
        "name": FLEXIBLE,
        "why": lacking or "it was asked for",
        "attention": model.source.how_attends,
        "images": model.source.how_sees,
        "without": [*(name for name in lost if lost[name]), *refused],
        "fastest": f"lmkit serve {path}{rounded if lacking else ' --model-impl fast'}",
    }


def engine_line(facts: dict[str, Any]) -> str:
    """The facts for the log."""
    return f"engine: {facts['name']}, because {facts['why']}; attention: {facts['attention']}"
