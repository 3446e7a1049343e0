"""What sentence-transformers' files say of embeddings: how texts are read, pooled, and what follows.

    modules.json                       [{"type": "sentence_transformers.models.Transformer", "path": ""},
                                        {"type": "...Pooling", "path": "1_Pooling"},
                                        {"type": "...Dense", "path": "2_Dense"},
                                        {"type": "...Normalize", "path": "3_Normalize"}]
    sentence_bert_config.json          {"max_seq_length": 256, "do_lower_case": false}
    config_sentence_transformers.json  {"prompts": {"query": "query: "}, "default_prompt_name": null,
                                        "similarity_fn_name": "cosine"}
    1_Pooling/config.json              {"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false, ...}, or
                                       {"pooling_mode": "lasttoken"}, or a list of modes, whose vectors are concatenated

No torch here: `turbo.engine.sentences` reads the weights of modules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from lmkit.errors import CheckpointError, RequestError, UnsupportedError
from lmkit.jsonfile import read_json, read_list
from lmkit.small_files import exists
from lmkit.text.sentence_settings import MODULES, sentence_settings

CONFIG, OF_SENTENCES = "config.json", "config_sentence_transformers.json"
MAX_BYTES, MAX_CONFIG_BYTES = 1 << 20, 16 << 20
Mode = Literal["last", "mean", "cls", "max", "weighted_mean", "mean_sqrt_len"]
# Names in files, in the order in which flags are concatenated.
MODES: dict[str, Mode] = {
    "cls_token": "cls", "cls": "cls", "max_tokens": "max", "max": "max", "mean_tokens": "mean", "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len", "weightedmean_tokens": "weighted_mean", "weightedmean": "weighted_mean",
    "lasttoken": "last",
}  # fmt: skip
Layer = Literal["Dense", "LayerNorm", "Normalize"]
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "Sigmoid", "GELU", "SiLU")  # of torch.nn
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
REMEDY = f"choose with --pooling {', '.join(get_args(Mode)[:-1])} or {get_args(Mode)[-1]}"
# What clients call a kind of text, and the names of prompts for it: the first that a model has.
KINDS = {
    **dict.fromkeys(("query", "search_query"), ("query", "search_query")),
    **dict.fromkeys(("document", "passage", "search_document"), ("document", "passage", "corpus", "search_document")),
}


class Module(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with a pooled vector. Its weights are in `folder`."""

    kind: Layer
    folder: str = ""
    activation: str = "Identity"  # of Dense, one of ACTIVATIONS
    residual: bool = False  # of Dense: its input is added to its output


class Sentences(msgspec.Struct, frozen=True, kw_only=True):
    """How a model makes embeddings of texts."""

    pooling: str = "last"  # modes, joined by "+"; their vectors are concatenated
    modules: tuple[Module, ...] = ()  # what follows, in order; without a Normalize at the end
    is_unit: bool = False  # whether a Normalize is at the end
    max_tokens: int = 0  # longer texts are cut; 0 = the model's context, and longer texts are refused
    prompts: dict[str, str] = {}  # by name: what is put before a text
    default_prompt: str = ""
    similarity: Similarity = "cosine"

    def text(self, size: int) -> str:
        """What a start says of embeddings of `size` numbers."""
        cut = f", of a text's first {self.max_tokens:,} tokens" if self.max_tokens else ""
        return f"{self.pooling} pooling, {size:,} numbers{cut}"

    def prompt(self, name: str | None, kind: str | None = None) -> str:
        """What is put before a text: the prompt of that name, or for a kind of text as clients name it.

        Raises RequestError for a name that the model does not have.
        """
        if name is None and kind is None:
            return self.default_prompt
        names = KINDS.get(kind or "", (kind,)) if name is None else (name,)
        for known in names:
            if known in self.prompts:
                return self.prompts[known]
        if name is None and kind in KINDS:
            return ""
        param, had = ("input_type", kind) if name is None else ("prompt_name", name)
        known_names = ", ".join(self.prompts) or "none"
        raise RequestError("invalid_request", f"{param}={had!r:.80}: this model has the prompts: {known_names}", param)


def read_sentences(folder: Path, usual: Mode = "last") -> Sentences:
    """How the checkpoint in `folder` makes embeddings. Without files of sentence-transformers: the `usual` pooling.

    Raises UnsupportedError for modules and poolings that lmkit does not compute, and CheckpointError for broken files.
    """
    if not exists(folder / MODULES):
        return Sentences(pooling=usual)
    pooling, modules, includes_prompt = str(usual), list[Module](), True
    for entry in read_list(folder / MODULES, MAX_BYTES):
        kind, path = _fields(entry, folder / MODULES)
        file = folder / path / CONFIG
        if kind == "Pooling":
            config = read_json(file, MAX_BYTES)
            pooling, includes_prompt = _pooling(config, file), config.get("include_prompt") is not False
        elif kind in get_args(Layer):
            modules.append(_module(kind, path, file))
        elif kind not in ("Transformer", "Dropout"):
            raise UnsupportedError(
                f"{folder / MODULES}: module {kind[:64]!r} is not supported; {REMEDY} to leave it out"
            )
    is_unit = bool(modules) and modules[-1].kind == "Normalize"
    prompts = _prompts(folder)
    if any(prompts["prompts"].values()) and not includes_prompt:
        raise UnsupportedError(f"{folder / MODULES}: pooling without the prompt's tokens is not supported; {REMEDY}")
    return Sentences(
        pooling=pooling, modules=tuple(modules[:-1] if is_unit else modules), is_unit=is_unit,
        max_tokens=_max_tokens(folder), **prompts,
    )  # fmt: skip


def read_dimensions(folder: Path) -> tuple[int, ...]:
    """The sizes that the checkpoint's embeddings were trained to be cut to (Matryoshka, arXiv 2205.13147), ascending.

    They stand in config.json as `matryoshka_dimensions`, or are empty. Raises CheckpointError for any other value.
    """
    file = folder / CONFIG
    named = read_json(file, MAX_BYTES).get("matryoshka_dimensions") if exists(file) else None
    if named is None:
        return ()
    if not (isinstance(named, list) and named and all(type(size) is int and size > 0 for size in named)):
        raise CheckpointError(f"{file}: matryoshka_dimensions: expected a list of whole numbers above zero")
    return tuple(sorted(named))


def _fields(module: Any, file: Path) -> tuple[str, str]:
    """The last part of a module's type, and the name of its folder in the checkpoint."""
    kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
    if not (isinstance(kind, str) and isinstance(path, str) and path != ".." and "/" not in path.rstrip("/")):
        raise CheckpointError(f"{file}: expected modules with a type and a path inside the checkpoint; {REMEDY}")
    return kind.rpartition(".")[2], path.rstrip("/")


def _pooling(config: dict[str, Any], file: Path) -> str:
    prefix = "pooling_mode"
    named = config.get(prefix)
    flags = [name for name in MODES if config.get(f"{prefix}_{name}") is True]
    asked = flags or ["mean"] if named is None else named if isinstance(named, list) else [named]
    unknown = [name for name in config if name.startswith(f"{prefix}_") and config[name] is True
               and name.removeprefix(f"{prefix}_") not in MODES]  # fmt: skip
    if unknown or not all(isinstance(name, str) and name in MODES for name in asked):
        shown = ", ".join(map(str, unknown or asked))[:64] or "none"
        raise UnsupportedError(f"{file}: pooling {shown} is not supported; {REMEDY}")
    return "+".join(MODES[name] for name in asked)


def _module(kind: str, path: str, file: Path) -> Module:
    config = read_json(file, MAX_BYTES) if exists(file) else {}
    places = {config.get(name) or "sentence_embedding" for name in ("module_input_name", "module_output_name")}
    activation = str(config.get("activation_function", "Tanh" if kind == "Dense" else "Identity")).rpartition(".")[2]
    if places != {"sentence_embedding"}:
        raise UnsupportedError(f"{file}: a module of other values than the embedding is not supported; {REMEDY}")
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"{file}: activation_function {activation[:64]} is not supported; {REMEDY}")
    return Module(
        kind=msgspec.convert(kind, Layer), folder=path, activation=activation,
        residual=config.get("use_residual") is True,
    )  # fmt: skip


def _max_tokens(folder: Path) -> int:
    """As many tokens as sentence-transformers reads of a text; 0 if no file says it."""
    asked = sentence_settings(folder).get("max_seq_length")
    if asked is None:
        places = (("tokenizer_config.json", "model_max_length"), (CONFIG, "max_position_embeddings"))
        files = [(folder / file, key) for file, key in places if exists(folder / file)]
        found = [read_json(file, MAX_CONFIG_BYTES).get(key) for file, key in files]
        asked = min((n for n in found if type(n) is int and n > 0), default=None)
    if asked is not None and not (type(asked) is int and asked > 0):
        raise CheckpointError(f"{folder}: max_seq_length: expected a whole number above zero")
    return min(asked or 0, (1 << 31) - 1)


def _prompts(folder: Path) -> dict[str, Any]:
    file = folder / OF_SENTENCES
    config = read_json(file, MAX_BYTES) if exists(file) else {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{file}: prompts: expected an object of name -> text")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{file}: default_prompt_name {default!r:.80} is not one of its prompts")
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in get_args(Similarity):
        raise UnsupportedError(f"{file}: similarity_fn_name {similarity!r:.80}: not {', '.join(get_args(Similarity))}")
    return {"prompts": prompts, "default_prompt": prompts.get(default, ""), "similarity": similarity}
