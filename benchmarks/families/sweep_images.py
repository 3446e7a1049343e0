"""One architecture that sees, in the flexible engine beside transformers: an image, another one in its place, two
images, and a batch with text. The processor of its checkpoint is transformers'."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors.torch import save

from benchmarks.families.sweep import LEAST_MARGIN, SEEDS, answer, describe, engine_of, generate, noting
from benchmarks.families.tiny_images import architecture_of, save_tiny
from lmkit.text.processed_images import of_tensors
from lmkit.text.processor_process import IDS, marker, open_processor, processed
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import ImageInput
from lmkit.turbo.transport.prompt_images import settings_of, with_images

SIDES = (60, 75), (50, 50), (56, 112)  # of images
IMAGE_MEMORY = 16 << 20
CHECKS = ("served", "several", "batch", "prefix")


@dataclass
class ImageResult:
    """What one architecture does with images. Empty reasons: it works."""

    model_type: str
    architecture: str = ""
    transformers: str = ""  # why transformers itself does not write about an image
    refused: str = ""  # why lmkit refuses its images, or the model
    served: str = ""  # what differs with one image
    several: str = ""  # and with two
    batch: str = ""
    prefix: str = ""  # empty: the tokens of an image were found in the cache, and those of another one were not
    engine: str = ""
    kv: str = ""  # see Result
    seconds: float = 0.0
    failure: str = field(default="", repr=False)

    @property
    def is_equal(self) -> bool:
        """Whether all greedy answers are transformers'."""
        return not (self.transformers or self.refused or self.served or self.several or self.batch)


@dataclass(frozen=True)
class Asked:
    """A prompt with images, as transformers takes it and as lmkit does, and transformers' answer."""

    ids: list[int]
    images: tuple[ImageInput, ...]
    answer: list[int]


def picture(number: int, seed: int) -> Image.Image:
    """An image of noise."""
    generator = torch.Generator().manual_seed(100 * seed + number)
    return Image.fromarray(
        torch.randint(0, 256, (*SIDES[number % len(SIDES)], 3), generator=generator, dtype=torch.uint8).numpy()
    )


def ask(model: Any, processor: Any, engine: Engine, text: str, images: list[Image.Image]) -> tuple[Asked, float]:
    """A prompt whose marks of images are M, and the least margin of its answer."""
    mark, words = marker(processor), processor.tokenizer
    plain = words(text.replace("M", mark), add_special_tokens=False).input_ids
    tensors = processed(processor, text.replace("M", mark), images) if images else {IDS: torch.tensor([plain])}
    whole = tensors.pop(IDS)[0].tolist()
    wanted, margin = answer(model, whole, **tensors)
    read = []
    for image in images:
        alone = processed(processor, mark, [image])
        read.append(of_tensors(alone[IDS][0].tolist(), save(alone)))
    ids, placed = with_images(plain, read, engine.info)
    if ids != whole:
        raise ValueError("the processor makes other tokens of the whole text")
    return Asked(ids, placed, wanted), margin


def asked(model: Any, processor: Any, engine: Engine) -> list[Asked]:
    """One image, another one with the same text, text alone, and two images; without close calls, if there are such
    among the first seeds."""
    best, found = -1.0, list[Asked]()
    for seed in range(SEEDS):
        one, other = picture(0, seed), picture(1, seed)
        texts = [("Look at M and tell", [one]), ("Look at M and tell", [other]), ("Tell of a day in the year", [])]
        if settings_of(engine.info).most > 1:
            texts.append(("See M and then M: so", [one, other]))
        made = [ask(model, processor, engine, *each) for each in texts]
        if (least := min(margin for _, margin in made)) > best:
            best, found = least, [each for each, _ in made]
        if best > LEAST_MARGIN:
            break
    return found


def examine_images(model_type: str, folder: Path) -> ImageResult:
    """Everything about one architecture, whose tiny checkpoint is written to `folder`."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    result = ImageResult(model_type, architecture_of(model_type))
    with noting(result, "transformers"):
        model, _ = save_tiny(model_type, folder)
        processor = open_processor(str(folder))
        tensors = processed(processor, "Look at " + marker(processor), [picture(0, 0)])
        answer(model, tensors.pop(IDS)[0].tolist(), **tensors)
    if result.transformers:
        return result
    with noting(result, "refused"):
        engine = engine_of(folder, model_impl="flexible", image_memory=IMAGE_MEMORY)
        try:
            describe(result, folder, "flexible")
            if isinstance(engine.info.images, str):
                result.refused = engine.info.images
            else:
                _compare(result, model, processor, engine)
        finally:
            engine.close()
    result.refused = re.sub(rf"^(UnsupportedError: )?{result.architecture}: ", "", result.refused)
    return result


def _compare(result: ImageResult, model: Any, processor: Any, engine: Engine) -> None:
    with noting(result, "served"):
        given = asked(model, processor, engine)
        alone = [generate(engine, [each.ids], [each.images]) for each in given]
        wrong = [answers[0] != each.answer for (answers, _), each in zip(alone, given, strict=True)]
        result.served = "other tokens" if any(wrong[:3]) else ""
        result.several = ("other tokens" if wrong[3] else "") if len(given) > 3 else "one image a request"
        with noting(result, "batch"):
            together, _ = generate(engine, [each.ids for each in given], [each.images for each in given])
            result.batch = "other tokens" if together != [each.answer for each in given] else ""
        with noting(result, "prefix"):
            _, (found,) = generate(engine, [given[0].ids], [given[0].images])
            (_, (other,)), image = alone[1], given[1].images[0]
            result.prefix = "" if found > image.start else "nothing is reused"
            if other > image.start:
                result.prefix = "another image was taken for it"
