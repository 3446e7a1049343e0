"""Prompts with images for tiny models of Qwen2.5-VL, and what transformers computes for them."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lmkit.formats.hub import DEMO_FOLDER
from lmkit.models.resolved import resolved
from lmkit.models.tower import Tower, load_tower
from lmkit.models.vision import patches
from lmkit.text.images import ReadImage, cut_up, expanded
from lmkit.turbo.request import ImageInput
from tests.models import tiny
from tests.quant.helpers import SIZES, TOKENIZER_FILES

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # in the order of tiny.MARKS
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATE_BESIDE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Beside(NamedTuple):
    """Of a tower beside a language model: its marks by their names in tokenizer_config.json, the last one of cells; the
    one that the template writes; and how images are read."""

    processor: str
    marks: dict[str, str]
    written: str
    reading: dict[str, object]


BESIDE = {
    "gemma3-vision": Beside(
        "Gemma3Processor",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<start_of_image>",
        {"size": {"height": 32, "width": 32}, "resample": 2, "do_pan_and_scan": None},
    ),
    "internvl": Beside(
        "InternVLProcessor",
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
        "<IMG_CONTEXT>",
        {"size": {"height": 16, "width": 16}, "crop_to_patches": False, "max_patches": 6},
    ),
}
# transformers' names of the pixels and grids of single images, and of frames that are read two and two.
ARGUMENTS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
UNIT = 8  # pixels of a cell of the tiny tower


def tower_of(path: Path) -> Tower:
    with resolved(path) as model:
        return load_tower(model, 1 << 20)


def picture(tower: Tower, rows: int, columns: int, seed: int = 0) -> ReadImage:
    """An image of noise. A tower that reads one size gets that, or so many `rows` of it."""
    if side := tower.settings.side:
        columns = side // UNIT
        rows = columns * (rows if tower.settings.tiles[1] else 1)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (rows * UNIT, columns * UNIT, 3), dtype=torch.uint8, generator=generator)
    return cut_up(rows * UNIT, columns * UNIT, pixels.numpy().tobytes(), tower.settings)


def frames(tower: Tower, rows: int, columns: int, count: int) -> list[ReadImage]:
    """So many pairs of frames of a video of noise; none for a tower that reads no videos."""
    if isinstance(tower.videos, str):
        return []
    size = (2 * count, rows * UNIT, columns * UNIT, 3)
    pixels = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    video = tower.videos.cut_up(rows * UNIT, columns * UNIT, range(2 * count), pixels.numpy().tobytes())
    return list(video.pairs)


def marks_of(frames: Sequence[ReadImage]) -> list[int]:
    """A piece of a prompt in which -1 stands for each pair of frames. A token ends what is one grid."""
    return [x for pair in frames for x in ([-1] if pair.goes_on else [-1, 5])]


def rows_of(tower: Tower, image: ReadImage) -> torch.Tensor:
    """What stands in place of the image's embeddings."""
    steps = tower.encode(image.rows, image.columns, image.pixels)
    with torch.inference_mode():
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: torch.Tensor = end.value[0]
                return found


def prompt(tower: Tower, ids: Sequence[int], images: Sequence[ReadImage]) -> tuple[list[int], tuple[ImageInput, ...]]:
    """`ids`, in which -1 stands for an image, with each image's tokens."""
    marks = map(tower.settings.mark_of, images)
    found, starts = expanded([next(marks) if x < 0 else x for x in ids], images, tower.settings)
    placed = [ImageInput(start, *image) for start, image in zip(starts, images, strict=True)]
    return found, tuple(placed)


def expected(
    model: transformers.PreTrainedModel, tower: Tower, ids: Sequence[int], images: Sequence[ImageInput]
) -> torch.Tensor:
    """The logits [tokens, vocab] of transformers."""
    spec, settings = tower.spec, tower.settings
    if not hasattr(model.model, "visual"):
        return _expected_beside(model, tower, ids, images)
    kinds = torch.zeros(1, len(ids), dtype=torch.int)
    given: dict[str, torch.Tensor] = {}
    for kind, (pixel_values, grid) in enumerate(ARGUMENTS, 1):
        rows, grids, goes_on = [], [], False
        for image in (image for image in images if image.frames == kind):
            pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
            pixels = pixels.view(-1, image.rows * UNIT, image.columns * UNIT, 3)
            rows.append(patches(pixels, spec, mean=settings.mean, std=settings.std))
            if goes_on:
                grids[-1][0] += 1
            else:
                grids.append([1, image.rows * spec.merge_size, image.columns * spec.merge_size])
            goes_on = image.goes_on
            kinds[0, image.start : image.end] = kind
        if rows:
            given |= {pixel_values: torch.cat(rows), grid: torch.tensor(grids), "mm_token_type_ids": kinds}
    if spec.videos and spec.videos.places and "pixel_values_videos" in given:
        firsts = [one.time for zero, one in itertools.pairwise(images) if zero.goes_on and not zero.time]
        given["second_per_grid_ts"] = torch.tensor(firsts) / spec.videos.places
    model.model.rope_deltas = None
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(ids)]), **given).logits[0]
    return logits


def _expected_beside(
    model: transformers.PreTrainedModel, tower: Tower, ids: Sequence[int], images: Sequence[ImageInput]
) -> torch.Tensor:
    """See `expected`, of towers that read pixels."""
    settings, given, scaled = tower.settings, dict[str, torch.Tensor](), []
    for image in images:
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.rows * UNIT, -1, 3)
        one = ((pixels / 255 - torch.tensor(settings.mean)) / torch.tensor(settings.std)).permute(2, 0, 1)
        scaled += one.split(settings.side or one.shape[1], 1)
    if images:
        high, wide = (max(x.shape[i] for x in scaled) for i in (1, 2))
        padded = [torch.nn.functional.pad(x, (0, wide - x.shape[2], 0, high - x.shape[1])) for x in scaled]
        given["pixel_values"] = torch.stack(padded)
        if settings.breaks:
            given["image_sizes"] = torch.tensor([x.shape[1:] for x in scaled])
        if settings.sees_all:
            given["token_type_ids"] = torch.tensor([[int(x == settings.token_id) for x in ids]])
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(ids)]), **given).logits[0]
    return logits


def chat_checkpoint(path: Path, name: str = "qwen2.5-vl") -> transformers.PreTrainedModel:
    """Write a model that chats about images, with the demo model's tokens and the marks of images."""
    model = tiny.make(path, name, **(SIZES | {"vocab_size": 4100, "max_position_embeddings": 512}))
    with torch.no_grad():
        for part in tiny.tower_parts(model):
            for weight in part.parameters():
                if weight.ndim > 1:  # large enough for images to matter
                    weight.normal_(std=0.3)
    model.save_pretrained(path)
    for file in TOKENIZER_FILES:
        shutil.copyfile(DEMO_FOLDER / file, path / file)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    beside = BESIDE.get(name)
    marks = MARKS if beside is None else (*beside.marks.values(), "<unused>")
    tokenizer["added_tokens"] += [like | {"id": 4096 + i, "content": mark} for i, mark in enumerate(marks)]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = TEMPLATE if beside is None else TEMPLATE_BESIDE.replace("MARK", beside.written)
    (path / "chat_template.jinja").write_text(template)
    if beside is not None:
        config = json.loads((path / "tokenizer_config.json").read_text())
        config |= beside.marks | {"processor_class": beside.processor}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        (path / "processor_config.json").write_text(json.dumps({"image_processor": beside.reading}))
        return model
    processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 256, "longest_edge": 4096})
    processor.save_pretrained(path)
    of_videos = {"size": {"shortest_edge": 1024, "longest_edge": 8192}, "fps": 2}
    (path / "video_preprocessor_config.json").write_text(json.dumps(of_videos))
    return model
