"""One architecture in lmkit's engine beside transformers: tokens, chunks, a prefix hit, a batch, 4-bit weights."""

from __future__ import annotations

import shutil
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.families.tiny import architecture_of, save_tiny
from lmkit.config import EngineConfig, ModelImpl
from lmkit.formats.base import resolve_format
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.models.engines import open_source
from lmkit.models.flexible.experts import find_mixtures
from lmkit.models.flexible.linears import all_sites, find_linears
from lmkit.models.flexible.names import OF_EXPERT, Names, weights_of
from lmkit.models.flexible.source import FlexibleSource
from lmkit.qtensor import QTensor, dequantize
from lmkit.quant.recipe import load_recipe
from lmkit.quant.run import prepare
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import ImageInput, Request, SamplingParams

LENGTHS = (6, 17, 40, 70, 33)  # of the prompts of a batch; chunks are of CHUNK tokens
CHUNK, ANSWER, FIRST = 16, 12, 10  # tokens below FIRST are special
LEAST_MARGIN = 1e-3  # between the two likeliest tokens of a position: closer ones may change places by rounding
SEEDS = 6  # of prompts that are tried until no two tokens are closer
GROUP = 32  # of the 4-bit weights


@dataclass
class Result:
    """What one architecture does. Empty reasons: it works."""

    model_type: str
    architecture: str = ""
    transformers: str = ""  # why transformers itself does not write
    interface: bool = False  # whether it declares transformers' attention interface
    engine: str = ""  # "fast" or "flexible"
    kv: str = ""  # "paged", "own" (transformers' caches) or "paged and own"
    served: str = ""  # why not, or what differs
    batch: str = ""
    prefix: str = ""  # empty: a prefix was found, with the same tokens
    quantized: str = ""
    seconds: float = 0.0
    failure: str = field(default="", repr=False)  # where in the code

    @property
    def is_equal(self) -> bool:
        """Whether all greedy answers are transformers'."""
        return not (self.transformers or self.served or self.batch)


def prompts(seed: int) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(FIRST, 4000, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.no_grad()
def answer(model: Any, prompt: list[int], **images: torch.Tensor) -> tuple[list[int], float]:
    """transformers' greedy answer to one prompt, and the smallest margin between the two likeliest tokens. `images` are
    the tensors of a processor."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **images,
        do_sample=False,
        max_new_tokens=ANSWER,
        min_new_tokens=ANSWER,
        eos_token_id=None,
        forced_bos_token_id=None,
        forced_eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    top = torch.stack([scores[0].topk(2).values for scores in found.scores])
    return found.sequences[0, len(prompt) :].tolist(), float((top[:, 0] - top[:, 1]).min())


def expected(model: Any) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, transformers' answers) without close calls, if there are such among the first seeds."""
    best: tuple[float, list[list[int]], list[list[int]]] = (-1.0, [], [])
    for seed in range(SEEDS):
        asked = prompts(seed)
        answers, margins = zip(*(answer(model, prompt) for prompt in asked), strict=True)
        if min(margins) > best[0]:
            best = min(margins), asked, list(answers)
        if best[0] > LEAST_MARGIN:
            break
    return best[1], best[2]


def generate(
    engine: Engine, batch: list[list[int]], images: Sequence[tuple[ImageInput, ...]] = ()
) -> tuple[list[list[int]], list[int]]:
    """(answers, cached tokens) of prompts that the engine gets together, each with its `images`. Raises RuntimeError
    for a failed request."""
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(batch))}
    cached = dict.fromkeys(answers, 0)
    for name, prompt, seen in zip(answers, batch, images or [()] * len(batch), strict=True):
        engine.add(Request(request_id=name, prompt_ids=prompt, params=params, images=seen))
    while engine.has_work():
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            answers[output.request_id] += output.token_ids
            cached[output.request_id] = max(cached[output.request_id], output.cached_tokens)
    return list(answers.values()), list(cached.values())


def engine_of(folder: Path, **options: Any) -> Engine:
    """An engine whose prompts take several chunks."""
    config = EngineConfig(
        device="cpu", dtype="float32", activations="exact", max_step_tokens=CHUNK, max_batch_size=5,
        kv_memory=8 << 20, packed_cache=False, num_threads=1, generation_config="none", **options,
    )  # fmt: skip
    return Engine(str(folder), config)


def examine(model_type: str, folder: Path) -> Result:
    """Everything about one architecture, whose tiny checkpoint is written to `folder`."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    result = Result(model_type, architecture_of(model_type))
    model: Any = None
    with noting(result, "transformers"):
        model = save_tiny(model_type, folder).eval()
        result.interface = bool(getattr(model, "_supports_attention_backend", False))
        asked, wanted = expected(model)
    if result.transformers:
        return result
    with noting(result, "served"):
        describe(result, folder)
        engine = engine_of(folder)
        try:
            one = [generate(engine, [prompt])[0][0] for prompt in asked]
            result.served = _difference(one, wanted)
            with noting(result, "batch"):
                result.batch = _difference(generate(engine, asked)[0], wanted)
            with noting(result, "prefix"):
                longest = max(range(len(asked)), key=lambda i: len(asked[i]))
                answers, cached = generate(engine, [asked[longest]])
                result.prefix = _difference(answers, [wanted[longest]]) or ("" if cached[0] else "nothing is reused")
        finally:
            engine.close()
    if not result.served:
        with noting(result, "quantized"):
            result.quantized = _quantized(folder, model, asked)
    return result


def _quantized(folder: Path, model: Any, asked: list[list[int]]) -> str:
    """Round the model to 4 bits and serve it beside transformers with the rounded weights. Returns what is wrong, or an
    empty text. Weights that transformers keeps otherwise than the file are only served."""
    output = folder.with_name(f"{folder.name}-4bit")
    shutil.rmtree(output, ignore_errors=True)
    scheme = {"group_size": GROUP, "smaller_groups": False}
    recipe = load_recipe("rtn_w4a16_g128", {"format": "compressed-tensors", "scheme": scheme})
    prepare(folder, recipe).run(output, restart=True)
    all_known = rounded_like(model, output)
    wanted = [answer(model, prompt)[0] for prompt in asked[:2]]
    engine = engine_of(output)
    try:
        answers, _ = generate(engine, asked[:2])
    finally:
        engine.close()
    return _difference(answers, wanted) if all_known else ""


@torch.no_grad()
def rounded_like(model: Any, folder: Path) -> bool:
    """Give a transformers model the weights of a quantized checkpoint. Whether it has each of them by itself."""
    reader = CheckpointReader(folder)
    names, weights = Names(model, reader), resolve_format(reader.config)
    linears, sites = find_linears(model), all_sites(model)
    known = set(weights_of(reader)) <= names.modules.keys()
    for file, name in names.modules.items():
        if name not in sites or not isinstance(weight := weights.read_linear(reader, file), QTensor):
            continue
        numbers = dequantize(weight)
        if name in linears:
            model.get_submodule(name).weight.copy_(numbers.T if sites[name].transposed else numbers)
        else:
            rows = _of_expert(model, name)
            rows.copy_(numbers.unflatten(0, rows.shape[:2]))
    return known and not names.parts


def _of_expert(model: Any, name: str) -> torch.Tensor:
    """An expert's weight in a parameter of all, [groups, outputs, in]."""
    module, number, leaf = OF_EXPERT.fullmatch(name).groups()  # type: ignore[union-attr]
    mixture = find_mixtures(model)[module]
    part = next(part for part in mixture.parts if part.name == leaf)
    whole: torch.Tensor = getattr(model.get_submodule(module), part.parameter)[int(number)]
    whole = (whole.T if mixture.transposed else whole).unflatten(0, (part.rows.groups, -1))
    return whole[:, int(part.rows.start * whole.shape[1]) : int(part.rows.stop * whole.shape[1])]


def describe(result: Any, folder: Path, impl: ModelImpl = "auto") -> None:
    """Note the engine of a checkpoint and its KV cache."""
    source = open_source(folder, impl)
    result.engine = "flexible" if source.spec.foreign else "fast"
    kept = {"paged": source.spec.has_kv, "own": source.spec.is_recurrent}
    if isinstance(source, FlexibleSource):  # its specification plans the memory of transformers' caches as both
        kept = {
            "paged": bool(source.seen.calls or source.seen.stored),
            "own": bool(source.seen.fixed_bytes or source.seen.token_bytes),
        }
    result.kv = " and ".join(name for name, there in kept.items() if there)
    source.close()


def _difference(found: list[list[int]], wanted: list[list[int]]) -> str:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one != other:
            first = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
            return f"prompt {number} of {LENGTHS[number % len(LENGTHS)]} tokens differs from answer token {first} on"
    return ""


class noting:
    """Inside, an exception is the reason of a field of the result."""

    def __init__(self, result: Any, name: str) -> None:
        self.result, self.name = result, name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        setattr(self.result, self.name, f"{type(error).__name__}: {error}"[:300])
        self.result.failure = "".join(traceback.format_exception(error))[-1500:]
        return True
