"""The bodies of what an operator does with a model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lmkit.strict import Strict


class ModelCommand(Strict):
    """What an operator does with a model."""

    takes_hints = False

    model: str | None = None


class SleepCommand(ModelCommand):
    level: Annotated[int, Field(ge=1, le=2)] | None = None  # 2 ends the process as well


class AdapterCommand(ModelCommand):
    lora_name: Annotated[str, Field(min_length=1, max_length=256, pattern="^[^=\x00-\x1f]+$")]


class LoadAdapterCommand(AdapterCommand):
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False  # in the place of a loaded adapter of the same name
