"""The vision tower and the patches of an image. Both oracles are transformers."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.models import load_spec
from lmkit.models.families.qwen_vl import windowed_tower
from lmkit.models.vision import patches, tower
from lmkit.models.vision_spec import VisionSpec
from lmkit.text.image_process import answer, resized, strip
from tests.models import tiny
from tests.models.pictures import tower_of

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.25, 0.27)
SPEC = VisionSpec(
    num_layers=2, hidden_size=32, inner_size=48, num_heads=2, channels=3, patch_size=4, temporal_patch_size=2,
    merge_size=2, window_size=16, full_layers=(1,), token_id=197,
)  # fmt: skip


def image(height: int, width: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (1, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(height)
    )


@pytest.mark.parametrize("size", [(16, 16), (24, 40), (8, 56), (40, 8)])
def test_patches_are_those_of_transformers(size: tuple[int, int]) -> None:
    options = {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 4096}}
    processor = Qwen2VLImageProcessorPil(image_mean=list(MEAN), image_std=list(STD), **options)
    expected = processor(image(*size)[0].numpy(), return_tensors="pt", input_data_format="channels_last")
    assert expected["image_grid_thw"].tolist() == [[1, size[0] // 4, size[1] // 4]]
    found = patches(image(*size), SPEC, mean=MEAN, std=STD)
    torch.testing.assert_close(found, expected["pixel_values"], rtol=0, atol=1e-5)


def test_sizes_are_those_of_transformers() -> None:
    limits = {"min_pixels": 500, "max_pixels": 20000}
    for height in (5, 20, 61, 100, 199, 1000):
        for width in (5, 13, 100, 333, 600):
            expected = smart_resize(height, width, factor=8, **limits)
            assert resized(height, width, 8, **limits) == expected, (height, width)
    assert strip(3, 1000) == "1000 x 3 pixels: one side is over 200 times the other"
    assert not strip(5, 1000)


@pytest.mark.parametrize("name", [name for name, sizes in tiny.VISION.items() if "model_type" not in sizes])
@pytest.mark.parametrize("grid", [(4, 4), (6, 10), (2, 14), (10, 2)])
def test_tower_is_that_of_transformers(tmp_path: Path, name: str, grid: tuple[int, int]) -> None:
    """Windows that are whole and windows cut by the image's edge, and layers that see the whole image. The learned
    positions of a smaller and of a larger grid. Tapped layers, in another order than their own."""
    model = tiny.make(tmp_path, name)
    model_spec, reader = load_spec(json.loads((tmp_path / "config.json").read_text())), CheckpointReader(tmp_path)
    spec = model_spec.vision
    assert spec is not None
    prefix = spec.prefix
    assert name != "qwen2.5-vl" or replace(spec, videos=None) == SPEC
    rows = patches(image(grid[0] * 4, grid[1] * 4), spec, mean=MEAN, std=STD)
    weights = model.model.visual.state_dict()
    assert {name for name in reader.names() if name.startswith(prefix)} == {prefix + name for name in weights}
    with torch.no_grad():
        for weight in weights.values():  # large enough for attention to be far from uniform
            if weight.ndim > 1:
                weight.normal_(std=0.3)
        output = model.model.visual(rows, grid_thw=torch.tensor([[1, *grid]]))
        expected = torch.cat([output.pooler_output, *(output.get("deepstack_features") or ())], -1)
        found = tower(rows, grid, spec, weights.__getitem__)
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "grid"),
    [("gemma3-vision", (8, 8)), ("internvl", (4, 4)), ("mistral3-vision", (4, 6)), ("mistral3-vision", (2, 4))],
)
def test_towers_beside_are_those_of_transformers(tmp_path: Path, name: str, grid: tuple[int, int]) -> None:
    """SigLIP and Pixtral, with what leads to the language model. A row of cells of Pixtral ends with the embedding of
    a token."""
    model = tiny.make(tmp_path, name)
    with torch.no_grad():
        for part in tiny.tower_parts(model):
            for weight in part.parameters():
                weight.normal_(mean=float(weight.ndim == 1), std=0.3)
    model.save_pretrained(tmp_path)
    tower_file = tower_of(tmp_path)
    spec, settings = tower_file.spec, tower_file.settings
    pixels = image(grid[0] * 4, grid[1] * 4)
    scaled = (pixels.float() / 255 - torch.tensor(settings.mean)) / torch.tensor(settings.std)
    sizes = {"image_sizes": torch.tensor([pixels.shape[1:3]])} if settings.breaks else {}
    with torch.no_grad():
        found = model.model.get_image_features(pixel_values=scaled.permute(0, 3, 1, 2), **sizes).pooler_output[0]
        rows = patches(pixels, spec, mean=settings.mean, std=settings.std)
        got = tower(rows, grid, spec, tower_file.weights.__getitem__)
    assert found.std() > 0.01
    if settings.breaks:
        got = got.view(grid[0] // 2, -1, found.shape[1])
        table = model.model.language_model.embed_tokens.weight
        ends = [*settings.breaks[:1]] * (len(got) - 1) + [*settings.breaks[1:]]
        assert torch.equal(got[:, -1], table[ends])
        got = got[:, :-1].flatten(0, 1)
    torch.testing.assert_close(got, found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [1, 4, 12])
def test_tiles_are_those_of_transformers(most: int) -> None:
    """Of its processor on Pillow. Ties between shapes go to the larger one, as far as the image fills it."""
    processor = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, max_patches=most, do_normalize=False, do_rescale=False
    )
    for size in ((16, 16), (40, 41), (10, 33), (64, 16), (7, 90), (70, 34), (5, 4)):
        pixels = image(*size)[0].numpy()
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        encoded = base64.b64encode(file.getvalue()).decode()
        kind, (height, width, found) = answer(encoded, 8, 1, 1 << 20, 16, 0, 3, (1, most))
        wanted = processor(Image.fromarray(pixels), return_tensors="pt")
        tiles = torch.frombuffer(bytearray(base64.b64decode(found)), dtype=torch.uint8).view(-1, 16, 16, 3)
        assert (kind, height, width) == ("image", 16 * len(tiles), 16)
        assert torch.equal(tiles.permute(0, 3, 1, 2).float(), wanted["pixel_values"].float()), size
    _, (height, *_) = answer(encoded, 8, 1, 3 * 16 * 16, 16, 0, 3, (1, 12))
    assert height <= 3 * 16  # within the pixels that are allowed


def test_sizes_of_towers_beside_are_those_of_transformers() -> None:
    for height in (5, 20, 61, 100, 199, 1000):
        for width in (5, 13, 100, 333, 600):
            shape = torch.zeros(3, height, width)
            expected = get_resize_output_image_size(shape, size=(120, 120), patch_size=(8, 8))
            assert resized(height, width, 8, 1, 1 << 20, edge=120) == (*(max(8, x) for x in expected),), (height, width)
            assert resized(height, width, 8, 1, 1 << 20, side=32) == (32, 32)
            high, wide = resized(height, width, 8, 1, 4096, edge=120)
            assert high * wide <= 4096
            assert high % 8 == wide % 8 == 0 < high * wide


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fullatt_block_indexes": "all"}, "fullatt_block_indexes is not a list"),
        ({"window_size": 4}, "do not fit together"),
        ({"num_heads": 3}, "do not fit together"),
    ],
)
def test_broken_towers_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    tiny.make(tmp_path, "qwen2.5-vl")
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    with pytest.raises(CheckpointError, match=message):
        windowed_tower({"vision_config": vision | changes})
    with pytest.raises(CheckpointError, match="vision_config is not an object"):
        windowed_tower({})
    with pytest.raises(UnsupportedError, match="hidden_act 'gelu'; lmkit has silu"):
        windowed_tower({"vision_config": vision | {"hidden_act": "gelu"}})
