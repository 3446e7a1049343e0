"""GenerationConfig: how to continue a prompt, as a user writes it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from lmkit import neutral, other_names
from lmkit.checked import CheckedMeta
from lmkit.errors import ConfigError, RequestError
from lmkit.formats.generation_config import TOP_K_OFF, SamplingDefaults
from lmkit.turbo.repetition import LMDEPLOYS, NEVER, TWO_RULES, RepetitionStop
from lmkit.turbo.request import MAX_LOGPROBS, Sampling, SamplingParams

DEFAULT_NEW_TOKENS = 512

# A value that users of other tools write, and what it means here.
_MEANINGS: Mapping[str, tuple[Any, Any]] = {
    "logprobs": (True, 0),
    "max_new_tokens": (-1, None),
    "stop": ("", ()),
    "top_k": TOP_K_OFF,
}


class GenerationConfig(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=CheckedMeta):
    """How to continue a prompt; the names are LMDeploy's.

    A field that is not given takes the default of the checkpoint's generation_config.json. Where that has none,
    decoding is greedy, up to 512 tokens.

    `stop` is a string or several, `stop_token_ids` several ids. None means that a field is not given, except that
    max_new_tokens=None generates until the context is full. top_k=-1 is off, and seed=-1 draws a fresh seed. The
    constructor raises ConfigError for an unknown field or a value of a wrong type.
    """

    MAX, MIN = "max_new_tokens", "min_new_tokens"

    do_sample: bool | None = None  # False = greedy, whatever the temperature; True needs a temperature above 0
    max_new_tokens: int | Literal["auto"] | None = "auto"  # None = until the context is full; 0 = only prefill
    min_new_tokens: int = 0  # eos, stop ids and stop strings are suppressed before that many tokens
    response_format: dict[str, Any] | None = None  # OpenAI's: the answer follows a JSON schema; see docs/serving.md

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            temperature: float | None = None,
            top_k: int | None = None,
            top_p: float | None = None,
            min_p: float | None = None,
            repetition_penalty: float | None = None,
            presence_penalty: float | None = None,
            frequency_penalty: float | None = None,
            repetition_stop: RepetitionStop | Mapping[str, int] | None = None,
            logit_bias: Mapping[int, float] | None = None,
            seed: int | None = None,
            stop: str | Sequence[str] | None = None,
            stop_token_ids: Sequence[int] | None = None,
            include_stop_str_in_output: bool | None = None,
            ignore_eos: bool | None = None,
            skip_special_tokens: bool | None = None,
            logprobs: int | None = None,
            do_sample: bool | None = None,
            max_new_tokens: int | Literal["auto"] | None = "auto",
            min_new_tokens: int | None = None,
            response_format: Mapping[str, Any] | None = None,
        ) -> None: ...

    else:

        def __getattr__(self, name: str) -> Any:
            raise other_names.missing(self, name)

    @classmethod
    def plain(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The values that ask for something, each as the field has it."""
        fields = {}
        if theirs := given.keys() & {*LMDEPLOYS}:
            if given.get("repetition_stop") is not None:
                raise ConfigError(TWO_RULES)
            ngram, count = (given.get(name) or 0 for name in LMDEPLOYS)
            rule = {"ngram": ngram, "count": count} if ngram and count else NEVER
            given = {name: value for name, value in given.items() if name not in theirs} | {"repetition_stop": rule}
        for name, value in given.items():
            theirs, ours = _MEANINGS.get(name, (None, None))
            if theirs is not None and type(value) is type(theirs) and value == theirs:
                fields[name] = ours
            elif not _asks_for_nothing(name, value):
                fields[name] = (value,) if name == "stop" and isinstance(value, str) else value
        return fields

    def validate(self, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> None:
        super().validate(vocab_size, max_logprobs)
        if self.do_sample and not self.temperature:
            raise RequestError("invalid_request", "do_sample=True: needs a temperature above 0", "do_sample")
        if self.grammar():
            self.check_end_is_free()

    def grammar(self) -> str:
        """The grammar of `response_format`, "" for any answer. Raises RequestError for one of a wrong shape."""
        if self.response_format is None:
            return ""
        from lmkit.text.grammar import response_format  # most callers never need it

        return response_format(self.response_format)

    def filled(self, defaults: SamplingDefaults) -> GenerationConfig:
        """This configuration with `defaults` in the fields that are not given, and what `do_sample` asks for."""
        fields: dict[str, Any] = {n: value for n, value in defaults.sampling().items() if getattr(self, n) is None}
        if self.max_new_tokens == "auto":
            fields[self.MAX] = defaults.max_new_tokens or DEFAULT_NEW_TOKENS
        if self.do_sample is False:
            fields["temperature"] = 0.0
        return msgspec.structs.replace(self, **fields)

    def params(self) -> SamplingParams:
        """The settings as the engine's SamplingParams, with a random seed if none was given."""
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        fields.pop("do_sample", None)
        fields.pop("response_format", None)
        lengths = {"max_tokens": fields.pop(self.MAX, None), "min_tokens": fields.pop(self.MIN)}
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return SamplingParams(**(fields | lengths | {"seed": seed, "grammar": self.grammar()}))


GenConfigs = GenerationConfig | Sequence[GenerationConfig] | None


def configs_for(gen_config: Any, count: int) -> list[GenerationConfig]:
    """One configuration for each of `count` prompts. Raises ConfigError for another number or type."""
    if gen_config is None or isinstance(gen_config, GenerationConfig):
        return [gen_config or GenerationConfig()] * count
    if not isinstance(gen_config, list | tuple) or not all(isinstance(item, GenerationConfig) for item in gen_config):
        kind = type(gen_config).__name__
        raise ConfigError(f"gen_config: expected a GenerationConfig, or a list of one for each prompt; got {kind}")
    if len(gen_config) != count:
        raise ConfigError(f"{len(gen_config)} generation configs for {count} prompts; give one, or one for each")
    return list(gen_config)


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name in GenerationConfig.__struct_fields__:
        is_unset = type(value) in (int, bool) and neutral.is_neutral(value, neutral.UNSET.get(name, ()))
        return is_unset or (value is None and name != GenerationConfig.MAX)
    values = neutral.PYTHON.get(name) or neutral.GENERATION.get(name) or ()
    return (value is None and name in other_names.names("GenerationConfig")) or neutral.is_neutral(value, values)
