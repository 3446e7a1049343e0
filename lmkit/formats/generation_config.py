"""The sampling that a checkpoint's authors recommend: `generation_config.json`. No torch here."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lmkit.errors import CheckpointError, ConfigError
from lmkit.jsonfile import read_json
from lmkit.small_files import exists

FILE = "generation_config.json"
MAX_BYTES = 10 << 20
REMEDY = "--generation-config none ignores the file"

# Sampling field -> (accepts a value, the rule in words).
RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= 100, "in [0, 100]"),
    "top_k": (lambda value: 0 <= value < 1 << 31, "at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "repetition_penalty": (lambda value: 1e-7 <= value <= 100, "in [1e-7, 100]"),
}
TOP_K_OFF = -1, 0  # in other tools, in lmkit
LENGTH: tuple[Callable[[float], bool], str] = (lambda value: 1 <= value < 1 << 31, "at least 1")
INTEGERS = ("top_k", "max_new_tokens")

# Fields of transformers that change what is generated and that lmkit does not have, with the values that ask for
# nothing, besides null. Other fields of the file concern tokens, caches or outputs.
NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_length": (20,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "mirostat": (0,),  # of a GGUF file
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
    "xtc_probability": (0,),  # of a GGUF file
}
OF_SPEECH = ("begin_suppress_tokens", "max_length", "suppress_tokens")  # that formats.speech_config reads


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values for the fields that a request does not set. None: the checkpoint does not say."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None  # of a request that names no length; a request may ask for more
    source: str = FILE
    not_applied: tuple[str, ...] = ()  # fields of the file that ask for something that lmkit does not do

    def sampling(self) -> dict[str, float]:
        """The sampling fields that are given; `max_new_tokens` is not one of them."""
        return {name: value for name in RANGES if (value := getattr(self, name)) is not None}

    def text(self) -> str:
        """A line that says which defaults hold, or an empty text."""
        fields = self.sampling() | ({"max_new_tokens": self.max_new_tokens} if self.max_new_tokens else {})
        values = ", ".join(f"{name} {value:g}" for name, value in fields.items())
        return values and f"sampling defaults of {self.source}: {values}; --generation-config none turns them off"

    def announce(self, log: logging.Logger) -> None:
        """Log which defaults hold, and which fields of the file do not."""
        if text := self.text():
            log.info("%s", text)
        if self.not_applied:
            log.warning("%s: %s: not supported, and not applied", self.source, ", ".join(self.not_applied))


def read_defaults(folder: Path, choice: str = "auto") -> SamplingDefaults:
    """The defaults of the checkpoint in `folder`.

    `choice` is auto (its generation_config.json, if there is one), none, or the path of another file or its folder.
    Raises ConfigError if that path does not exist, and CheckpointError for a file that cannot be used.
    """
    file = folder / FILE
    if choice == "none" or (choice == "auto" and not exists(file)):
        return SamplingDefaults()
    if choice != "auto":
        file = Path(choice) / FILE if Path(choice).is_dir() else Path(choice)
        if not file.is_file():
            raise ConfigError(f"--generation-config {choice}: expected auto, none, or a file or folder that exists")
    return parse_defaults(read_json(file, MAX_BYTES), str(file))


def parse_defaults(data: dict[str, Any], where: str) -> SamplingDefaults:
    """The defaults in the content of the file `where`. Raises CheckpointError that names the field at fault."""
    if data.get("top_k") == TOP_K_OFF[0]:
        data = data | {"top_k": TOP_K_OFF[1]}
    rules = {**RANGES, "max_new_tokens": LENGTH}
    fields = {name: _number(data[name], name, rules[name], where) for name in rules if data.get(name) is not None}
    do_sample = data.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise CheckpointError(f"{where}: do_sample={reprlib.repr(do_sample)}: must be true or false; {REMEDY}")
    if do_sample is not None:
        fields["temperature"] = fields.get("temperature", 1.0) if do_sample else 0.0
    known = OF_SPEECH if "no_timestamps_token_id" in data else ()
    found = (name for name, neutral in NOT_APPLIED.items() if data.get(name) not in (None, False, *neutral))
    asked = tuple(name for name in found if name not in known)
    return SamplingDefaults(**fields, source=Path(where).name, not_applied=asked)


def _number(value: Any, name: str, rule: tuple[Callable[[float], bool], str], where: str) -> Any:
    """`value` if it has the type and range of the field. A number that is not finite is in no range."""
    accepts, words = rule
    kind, types = ("an integer", (int,)) if name in INTEGERS else ("a number", (int, float))
    if type(value) not in types or not accepts(value):
        raise CheckpointError(f"{where}: {name}={reprlib.repr(value)}: must be {kind} {words}; {REMEDY}")
    return value if name in INTEGERS else float(value)
