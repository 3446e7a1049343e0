"""The module of a checkpoint: transformers' class of it, on the meta device or with its weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.jsonfile import read_json
from lmkit.log import get_logger
from lmkit.models.flexible.experts import place_experts
from lmkit.models.flexible.linears import find_linears
from lmkit.models.registry import UnknownArchitectureError

log = get_logger(__name__)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()  # what matters is raised

LinearOf = Callable[[str], nn.Module | None]
METHOD = "lmkit"
MAX_CONFIG_BYTES = 1 << 20
WARNING = "warn_if_padding_and_no_attention_mask"
KINDS = AutoModelForCausalLM, AutoModelForImageTextToText  # of models that write text


@contextmanager
def foreign(architecture: str, what: str) -> Iterator[None]:
    """An error of transformers becomes one line that names the architecture."""
    try:
        yield
    except (CheckpointError, UnsupportedError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{architecture}: transformers {transformers.__version__} {what}: {error!r:.400}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers would list the tensors that lmkit's linears read themselves, as ones that nothing reads."""
    logs, bars = transformers.utils.logging, transformers.utils.logging.is_progress_bar_enabled()
    before = logs.get_verbosity()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(before)
        if bars:
            logs.enable_progress_bar()


def read_config(folder: Path, architecture: str) -> Any:
    """A checkpoint's configuration as transformers' class. Raises UnsupportedError for code of the repository."""
    model_type = read_json(folder / "config.json", MAX_CONFIG_BYTES).get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UnknownArchitectureError(
            f"{architecture}: transformers {transformers.__version__} has no model_type {model_type!r:.60}; a newer "
            "one may have it, and lmkit runs no code of a repository"
        )
    with foreign(architecture, "does not read config.json"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = auto_class(config, architecture)
    if kind is None:
        raise UnknownArchitectureError(
            f"{architecture}: transformers {transformers.__version__} has no class of it that writes text"
        )
    taken = kind._model_mapping[type(config)]
    # Another name may be another computation, whatever the model_type says.
    if not hasattr(transformers, architecture) and architecture.lower() != taken.__name__.lower():
        raise UnknownArchitectureError(
            f"{architecture}: transformers {transformers.__version__} has no class of that name, only "
            f"{taken.__name__} for model_type {model_type!r:.60}"
        )
    if kind is AutoModelForImageTextToText and config.is_encoder_decoder:
        raise UnsupportedError(f"{architecture}: it is an encoder with a decoder, and lmkit runs decoders alone")
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # lmkit reads such weights itself
    return config


def auto_class(config: Any, architecture: str) -> Any:
    """transformers' table that has a configuration's class of this name, or one of another name; None if none has."""
    found = {kind: kind._model_mapping[type(config)] for kind in KINDS if type(config) in kind._model_mapping}
    named = (kind for kind, taken in found.items() if taken.__name__.lower() == architecture.lower())
    return next(named, next(iter(found), None))


def reads_images(config: Any) -> bool:
    """Whether transformers has a model of images and text with this configuration."""
    return type(config) in AutoModelForImageTextToText._model_mapping


def outline(config: Any, architecture: str) -> nn.Module:
    """The module on the meta device. bfloat16: products of experts take nothing else there."""
    with foreign(architecture, "cannot build it"), torch.device("meta"):
        module: nn.Module = auto_class(config, architecture).from_config(config, dtype=torch.bfloat16)
    return module.eval()


def load_module(folder: Path, config: Any, architecture: str, linear_of: LinearOf) -> nn.Module:
    """The module with its weights in float32, but for the linears that `linear_of` gives by their names."""
    with foreign(architecture, "cannot load its weights"), _quiet():
        module, report = auto_class(config, architecture).from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            quantization_config=_OwnLinears(linear_of),
        )
    if missing := sorted(set(report["missing_keys"])):
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder}: tensor {missing[0]} is missing{more}")
    loaded: nn.Module = module.eval().requires_grad_(False)
    for part in loaded.modules():
        if hasattr(part, WARNING):  # it looks for padding in every step, and there is none
            setattr(part, WARNING, lambda *args: None)
    return loaded


@register_quantization_config(METHOD)
class _OwnLinears(QuantizationConfigMixin):  # type: ignore[misc]  # transformers has no types
    """Carries `linear_of` to the quantizer below. It is never written."""

    def __init__(self, linear_of: LinearOf | None = None, **kwargs: Any) -> None:
        self.quant_method = METHOD
        self.linear_of = linear_of

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD}


@register_quantizer(METHOD)
class _Replaces(HfQuantizer):  # type: ignore[misc]
    """Puts lmkit's linears in the places of torch's before weights are read."""

    requires_calibration = False
    requires_parameters_quantization = False

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        linear_of = self.quantization_config.linear_of
        for name in find_linears(model):
            if (own := linear_of(name)) is not None:
                model.set_submodule(name, own)
        place_experts(model, linear_of)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def keeps_rows(module: nn.Module) -> bool:
    """Whether the module computes the logits of chosen rows alone."""
    return "logits_to_keep" in inspect.signature(module.forward).parameters
