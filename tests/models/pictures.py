"""Prompts with images for tiny models of Qwen2.5-VL, and what transformers computes for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

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
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
UNIT = 8  # pixels of a cell of the tiny tower


def tower_of(path: Path) -> Tower:
    with resolved(path) as model:
        return load_tower(model, 1 << 20)


def picture(tower: Tower, rows: int, columns: int, seed: int = 0) -> ReadImage:
    """An image of noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (rows * UNIT, columns * UNIT, 3), dtype=torch.uint8, generator=generator)
    return cut_up(rows * UNIT, columns * UNIT, pixels.numpy().tobytes(), tower.settings)


def rows_of(tower: Tower, image: ReadImage) -> torch.Tensor:
    """What stands in place of the image's embeddings."""
    steps = tower.encode(image.rows, image.columns, image.pixels)
    with torch.inference_mode():
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: torch.Tensor = end.value
                return found


def prompt(tower: Tower, ids: Sequence[int], images: Sequence[ReadImage]) -> tuple[list[int], tuple[ImageInput, ...]]:
    """`ids`, in which -1 stands for an image, with each image's tokens."""
    token = tower.settings.token_id
    found, starts = expanded([token if x < 0 else x for x in ids], images, tower.settings)
    placed = [ImageInput(start, *image) for start, image in zip(starts, images, strict=True)]
    return found, tuple(placed)


def expected(
    model: transformers.PreTrainedModel, tower: Tower, ids: Sequence[int], images: Sequence[ImageInput]
) -> torch.Tensor:
    """The logits [tokens, vocab] of transformers."""
    spec, settings = tower.spec, tower.settings
    rows, grids = [], []
    for image in images:
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
        pixels = pixels.view(image.rows * UNIT, image.columns * UNIT, 3)
        rows.append(patches(pixels, spec, mean=settings.mean, std=settings.std))
        grids.append([1, image.rows * spec.merge_size, image.columns * spec.merge_size])
    kinds = torch.zeros(1, len(ids), dtype=torch.int)
    for image in images:
        kinds[0, image.start : image.end] = 1
    given = {}
    if images:
        given = {"pixel_values": torch.cat(rows), "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": kinds}
    model.model.rope_deltas = None
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(ids)]), **given).logits[0]
    return logits


def chat_checkpoint(path: Path) -> transformers.PreTrainedModel:
    """Write a model that chats about images, with the demo model's tokens and the marks of images."""
    model = tiny.make(path, "qwen2.5-vl", **(SIZES | {"vocab_size": 4100, "max_position_embeddings": 512}))
    with torch.no_grad():
        for weight in model.model.visual.parameters():
            if weight.ndim > 1:  # large enough for images to matter
                weight.normal_(std=0.3)
    model.save_pretrained(path)
    for file in TOKENIZER_FILES:
        shutil.copyfile(DEMO_FOLDER / file, path / file)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [like | {"id": 4096 + i, "content": mark} for i, mark in enumerate(MARKS)]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    processor = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 256, "longest_edge": 4096})
    processor.save_pretrained(path)
    return model
