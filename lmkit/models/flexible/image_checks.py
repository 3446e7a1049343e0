"""The first image of a loaded model, as lmkit computes it and as transformers does: what lmkit has no part for is found
at the start, and images are refused then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import UnsupportedError
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import KVLayer
from lmkit.log import get_logger
from lmkit.models.flexible.checks import BLOCK, difference, limit_of, step
from lmkit.models.flexible.decoder import FlexibleDecoder
from lmkit.models.flexible.module import foreign
from lmkit.models.flexible.tower import ForeignTower, Given, followed, given
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.text.images import MAX_IMAGES
from lmkit.text.processed_images import ProcessorSettings
from lmkit.text.processor_process import IDS, marker, open_processor, processed

log = get_logger(__name__)

SIDES = (60, 75), (50, 50)  # of two images
BEFORE, AFTER = "one two", " three four five"  # the text around one


@torch.inference_mode()
def tower_of(decoder: FlexibleDecoder, folder: Path, max_pixels: int) -> ForeignTower:
    """What encodes a checkpoint's images. Raises UnsupportedError, with the architecture's name, if nothing does."""
    name = decoder.spec.architecture
    with foreign(name, "has no processor for its images"):
        processor = open_processor(str(folder))
        mark = marker(processor)
        token_id = int(processor.tokenizer.convert_tokens_to_ids(mark))
        one, two = (_processed(processor, mark, [side]) for side in SIDES)
        both, whole = _processed(processor, mark + mark, SIDES), _processed(processor, BEFORE + mark + AFTER, SIDES[:1])
    is_alike = both[IDS].tolist() == torch.cat([one[IDS], two[IDS]], -1).tolist()
    if not is_alike:
        log.info("%s: its processor reads several images otherwise than each alone; a request may have one", name)
    found = given(decoder, followed(one))
    others = f"; its layers read {', '.join(found.others)}" if found.others else ""
    start = _start(whole[IDS][0].tolist(), one[IDS][0].tolist())
    if start < 0:
        raise UnsupportedError(f"{name}: its processor joins an image's tokens with the text around them{others}")
    if found.sees_later:
        raise UnsupportedError(f"{name}: the tokens of an image see later ones")
    decoder.turned, decoder.deep = found.turned, found.deep
    with foreign(name, "cannot compute an image"):
        error = _error(decoder, whole, found, start)
    if error >= limit_of(decoder):
        raise UnsupportedError(f"{name}: after an image its states are not those of transformers{others}")
    most = MAX_IMAGES if is_alike else 1
    settings = ProcessorSettings(token_id=token_id, folder=str(folder), max_pixels=max_pixels, most=most)
    return ForeignTower(decoder, settings)


def _processed(processor: Any, text: str, sides: Any) -> dict[str, Tensor]:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    pixels = (torch.randint(0, 256, (*side, 3), generator=generator, dtype=torch.uint8).numpy() for side in sides)
    return processed(processor, text, [Image.fromarray(each) for each in pixels])


def _start(ids: list[int], part: list[int]) -> int:
    """Where `part` stands in `ids`, or -1."""
    return next((i for i in range(len(ids)) if ids[i : i + len(part)] == part), -1)


def _error(decoder: FlexibleDecoder, whole: dict[str, Tensor], found: Given, start: int) -> float:
    """How far states of two chunks are off those of transformers. The first chunk ends inside the image."""
    ids = whole[IDS][0].tolist()
    right, count = decoder.plain_with(whole), len(ids)
    cut = start + len(found.rows) // 2
    spec, storage = decoder.spec, KVStorage(FLOAT32, FLOAT32)
    kv = allocate(spec.layers, [storage] * spec.num_layers, 1, -(-count // BLOCK) * BLOCK, count, num_states=1)
    kv = [kv[layer.index] for layer in decoder.layers]
    parts = [_states(decoder, kv, ids, edges, found, start) for edges in ((0, cut), (cut, count))]
    return difference(torch.cat(parts), right)


def _states(
    decoder: FlexibleDecoder, kv: list[KVLayer], ids: list[int], edges: tuple[int, int], found: Given, start: int
) -> Tensor:
    """The states of the tokens at `edges` of a sequence with one image, whose first token stands at `start`."""
    inputs, stop = step([ids], (edges,)), start + len(found.rows) - 1
    at = torch.arange(*edges)
    shift = int(found.places[0, -1]) - (stop - start)
    places = (at + shift * (at >= stop)).expand(3, -1).clone()
    inside = (at >= start) & (at < stop)
    places[:, inside] = found.places[:, at[inside] - start].long() + start
    rows = inside.nonzero()[:, 0]
    if len(rows):
        values = found.rows[at[inside] - start]
        inputs = replace(inputs, places=places.int(), image_rows=rows, image_values=values)
    states, _ = decoder.hidden(replace(inputs, positions=places[0].int()), kv)
    return states
