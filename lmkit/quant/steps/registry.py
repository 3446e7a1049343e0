"""Every step of this folder. The modules are found and imported here."""

from __future__ import annotations

import functools
import importlib
import operator
import pkgutil
from typing import TYPE_CHECKING

from lmkit.quant import steps
from lmkit.quant.steps.base import Stage, Step

for module in pkgutil.iter_modules(steps.__path__):
    if module.name not in (__name__.rpartition(".")[2], "base"):
        importlib.import_module(f"{steps.__name__}.{module.name}")

# By name, in the order of their stages; plain rounding comes first among the rounders.
STEPS: dict[str, type[Step]] = {
    step.name(): step
    for step in sorted(Step.__subclasses__(), key=lambda step: (step.stage, not step.is_plain, step.name()))
}
if TYPE_CHECKING:
    AnyStep = Step
else:
    AnyStep = functools.reduce(operator.or_, STEPS.values())


def of_stage(stage: Stage) -> list[str]:
    """Names of the steps of a stage. They exclude each other."""
    return [name for name, step in STEPS.items() if step.stage == stage]
