"""Images in a pipeline: files, data: URLs, bytes and images of Pillow give the tokens of transformers, several in a
message and over several turns. What cannot be used is refused in one line."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lmkit import GenerationConfig, Pipeline, pipeline
from lmkit.api.images import load
from lmkit.models.vision import patches
from lmkit.text.image_process import FORMATS
from lmkit.text.images import read_image
from lmkit.turbo.transport.prompt_images import settings_of
from tests.models.pictures import chat_checkpoint
from tests.models.test_vision import SPEC

COUNT = 6
CONFIG = GenerationConfig(max_new_tokens=COUNT, ignore_eos=True, logit_bias={4098: -100.0, 4099: -100.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chats")


@pytest.fixture(scope="module")
def model(folder: Path) -> transformers.PreTrainedModel:
    return chat_checkpoint(folder)


@pytest.fixture(scope="module")
def pipe(folder: Path, model: transformers.PreTrainedModel) -> Iterator[Pipeline]:
    with pipeline(folder, max_batch_size=4, generation_config="none", packed_cache=False) as opened:
        yield opened


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth image of several colors."""
    colors = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return Image.fromarray(colors).resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def shown(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def expected(pipe: Pipeline, model: Any, folder: Path, messages: list[Any], images: list[Image.Image]) -> list[int]:
    """Greedy tokens by transformers' processor and model."""
    text = pipe.tokenizer.render_chat(messages)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    given = processor(images, return_tensors="pt")
    for grid in given["image_grid_thw"].tolist():
        text = text.replace("<|image_pad|>", "<|holder|>" * (grid[1] * grid[2] // 4), 1)
    ids = pipe.tokenizer.encode(text.replace("<|holder|>", "<|image_pad|>"), False)
    found: list[int] = []
    for _ in range(COUNT):
        row = torch.tensor([[*ids, *found]])
        model.model.rope_deltas = None
        with torch.no_grad():
            kinds = (row == 4098).int()
            logits = model(row, **given, mm_token_type_ids=kinds).logits[0, -1]
        logits[[4098, 4099]] = -torch.inf
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-3, "a last bit could decide"
        found.append(int(logits.argmax()))
    return found


def shown_as(messages: list[Any]) -> list[Any]:
    """The messages with marks for images."""
    marked = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [part if part["type"] == "text" else {"type": "image"} for part in content]
        marked.append(message | {"content": content})
    return marked


def test_all_sources_give_the_tokens_of_transformers(pipe: Pipeline, model: Any, folder: Path, tmp_path: Path) -> None:
    image = drawn(50, 30)
    (tmp_path / "a.png").write_bytes(saved(image))
    url = "data:image/png;base64," + base64.b64encode(saved(image)).decode()
    sources: list[Any] = [tmp_path / "a.png", str(tmp_path / "a.png"), saved(image), saved(image, "BMP"), url, image]
    parts = [*map(shown, sources), {"type": "image_url", "image_url": {"url": url}}]
    prompts = [[{"role": "user", "content": [part, words("What is it?")]}] for part in parts]
    want = expected(pipe, model, folder, shown_as(prompts[0]), [image])
    before = pipe.engine.stats().images["encoded"]
    for answer in pipe(prompts, CONFIG):
        assert (answer.error_message, answer.token_ids) == (None, want)
    assert pipe.engine.stats().images["encoded"] == before + 1
    other = pipe([{"role": "user", "content": [shown(drawn(50, 30, 7)), words("What is it?")]}], CONFIG)
    assert other.token_ids != want, "images change nothing"
    assert other.input_token_len == answer.input_token_len


def test_several_images_over_several_turns(pipe: Pipeline, model: Any, folder: Path) -> None:
    images = [drawn(64, 64, 1), drawn(90, 30, 2), drawn(24, 60, 3)]
    content = [words("These:"), shown(images[0]), words("and"), shown(saved(images[1]))]
    session = pipe.chat(content, gen_config=CONFIG)
    messages: list[Any] = [{"role": "user", "content": content}]
    assert session.response.token_ids == expected(pipe, model, folder, shown_as(messages), images[:2])
    for content in ([shown(images[2]), words("And this?")], "Fine."):
        before = session.response.input_token_len
        messages.append({"role": "assistant", "content": session.response.text})
        messages.append({"role": "user", "content": content})
        session = pipe.chat(content, session, CONFIG)
        assert session.response.token_ids == expected(pipe, model, folder, shown_as(messages), images)
        assert session.response.cached_token_len >= before, "a turn before is computed again"


def test_detail_is_one_of_openais(pipe: Pipeline) -> None:
    url = "data:image/jpeg;base64," + base64.b64encode(saved(drawn(300, 200), "JPEG")).decode()
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": detail}} for detail in ("high", "low", "auto")]
    answers = pipe([[{"role": "user", "content": [part]}] for part in parts], CONFIG)
    assert {answer.finish_reason for answer in answers} == {"length"}


def glass(width: int, height: int) -> Image.Image:
    """An image that is transparent on its left and half so on its right."""
    image = drawn(width, height)
    image.putalpha(Image.linear_gradient("L").rotate(90).resize((width, height)))
    return image


def cut_out(width: int, height: int) -> Image.Image:
    """An image of a palette of which a color is transparent."""
    image = drawn(width, height).quantize(8)
    image.info["transparency"] = image.getpixel((0, 0))
    return image


@pytest.mark.parametrize(
    "image",
    [drawn(16, 16), drawn(31, 200).convert("RGBA"), drawn(500, 377), drawn(9, 1), drawn(40, 24).convert("CMYK"),
     glass(40, 24), glass(40, 24).convert("LA"), cut_out(40, 24), drawn(40, 24).convert("1")],
    ids=lambda image: f"{image.mode}-{image.width}",
)  # fmt: skip
def test_pixels_are_those_of_transformers(pipe: Pipeline, folder: Path, image: Image.Image) -> None:
    settings = settings_of(pipe.engine.info)
    found = read_image(load(image), settings)
    assert image.mode == "CMYK" or read_image(saved(image), settings) == found, "the file has the same pixels"
    shape = 1, found.rows * settings.unit, found.columns * settings.unit, 3
    pixels = torch.frombuffer(bytearray(found.pixels), dtype=torch.uint8).view(shape)
    want = Qwen2VLImageProcessorPil.from_pretrained(folder)(image, return_tensors="pt")
    assert want["image_grid_thw"].tolist() == [[1, 2 * found.rows, 2 * found.columns]]
    rows = patches(pixels, SPEC, mean=settings.mean, std=settings.std)
    torch.testing.assert_close(rows, want["pixel_values"], rtol=0, atol=1e-5)


def test_a_photo_of_a_phone_is_its_first_picture(pipe: Pipeline) -> None:
    """Beside it the file has a preview or a map of depth: Pillow calls it MPO, and other programs JPEG."""
    turned = Image.Exif()
    turned[0x0112] = 6
    plain, photo = io.BytesIO(), io.BytesIO()
    drawn(50, 30).save(plain, "JPEG", exif=turned)
    drawn(50, 30).save(photo, "MPO", exif=turned, save_all=True, append_images=[drawn(20, 12, 1)])
    assert Image.open(photo).n_frames == 2  # type: ignore[attr-defined]
    found, want = (read_image(file.getvalue(), settings_of(pipe.engine.info)) for file in (photo, plain))
    assert found == want
    assert found.rows > found.columns


def test_gray_of_16_bits_keeps_its_upper_ones(pipe: Pipeline) -> None:
    """Pillow alone would clip all above 255 to white."""
    dark, light = (Image.fromarray(np.full((16, 16), value, np.uint16)) for value in (10_000, 50_000))
    pixels = [read_image(saved(image), settings_of(pipe.engine.info)).pixels[:3] for image in (dark, light)]
    assert pixels == [bytes([39] * 3), bytes([195] * 3)]


def test_data_urls_of_other_spellings_are_read(pipe: Pipeline) -> None:
    text = base64.encodebytes(saved(drawn(50, 30))).decode()
    assert "\n" in text[:80]
    for head in ("data:image/png;base64,", "DATA:image/png;BASE64,", "data:;base64,\r\n"):
        assert load(head + text) == saved(drawn(50, 30))


def animated() -> bytes:
    file = io.BytesIO()
    drawn(20, 20).save(file, "GIF", save_all=True, append_images=[drawn(20, 20, 5)])
    return file.getvalue()


def huge() -> bytes:
    """A small file of many pixels."""
    return saved(Image.new("1", (20000, 20000)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"no image", f"no image that can be read; the formats are {', '.join(FORMATS)}"),
        (saved(drawn(20, 20))[:-30], "no image that can be read"),
        (saved(drawn(20, 20), "TIFF"), "no image that can be read"),
        (saved(drawn(1000, 3)), "1000 x 3 pixels: one side is over 200 times the other"),
        (animated, "several frames"),
        (huge, "20000 x 20000 pixels: at most 50,000,000"),
        ("http://127.0.0.1/a.png", "a pipeline fetches nothing"),
        ("/nowhere/a.png", "/nowhere/a.png: there is no such file"),
        ("data:image/png;base64,***", "not valid base64"),
        ("data:image/png,abc", "write a data: URL as"),
        (5, "expected a path, bytes, a data: URL or an image of Pillow, got int"),
    ],
)
def test_images_that_cannot_be_used_are_refused(pipe: Pipeline, source: Any, message: str) -> None:
    answer = pipe([{"role": "user", "content": [shown(source() if callable(source) else source)]}], CONFIG)
    assert (answer.finish_reason, answer.error_code) == ("error", "invalid_request")
    assert message in answer.error_message
    assert "\n" not in answer.error_message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([words("<|image_pad|>"), shown(drawn(20, 20))], "1 images and 2 marks"),
        ([shown(drawn(8, 8))] * 65, "65 images: at most 64"),
        ([{"type": "image", "image": b"x", "size": 3}], "only parts"),
        ([{"type": "image_url", "image_url": {"url": "data:", "detail": "ultra"}}], "detail is one of auto, low, high"),
    ],
)
def test_messages_that_cannot_be_used_are_refused(pipe: Pipeline, content: list[Any], message: str) -> None:
    answer = pipe([{"role": "user", "content": content}], CONFIG)
    assert answer.finish_reason == "error"
    assert message in answer.error_message


def test_models_of_text_refuse_images() -> None:
    with pipeline("demo") as pipe:
        answer = pipe([{"role": "user", "content": [shown(drawn(20, 20))]}], CONFIG)
    assert answer.error_code == "unsupported_parameter"
    assert answer.error_message == "images are not supported: this model reads text alone"
