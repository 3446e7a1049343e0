"""Architectures of transformers that see, on the flexible engine: their answers are those of transformers."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.families.sweep import ANSWER, answer
from benchmarks.families.sweep_images import examine_images, picture
from benchmarks.families.tiny_images import save_tiny
from lmkit import GenerationConfig, Pipeline, pipeline
from lmkit.config import EngineConfig
from lmkit.text.processor_process import IDS, marker, open_processor, processed
from lmkit.text.tokenizer import Tokenizer
from lmkit.turbo.engine.describe import describe_model
from tests.flexible import tiny

EQUAL = [
    "llava",
    "qwen2_vl",  # positions of rows and columns
    pytest.param("qwen3_vl", marks=pytest.mark.exhaustive),  # images are added to the first layers, too
    pytest.param("idefics3", marks=pytest.mark.exhaustive),  # words between the tiles of an image
    pytest.param("internvl", marks=pytest.mark.exhaustive),
    pytest.param("lfm3_vl", marks=pytest.mark.exhaustive),  # recurrent states
]


@pytest.mark.parametrize("model_type", EQUAL)
def test_images_in_chunks_batches_and_prefixes(tmp_path: Path, model_type: str) -> None:
    result = examine_images(model_type, tmp_path)
    assert not result.transformers, result.failure
    assert not result.refused, result.failure
    assert (result.served, result.several, result.batch) == ("", "", ""), result.failure
    assert bool(result.prefix) == ("own" in result.kv)  # states have no snapshot inside these prompts


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma3", "the tokens of an image see later ones"),
        pytest.param("paligemma", "its states are not those of transformers", marks=pytest.mark.exhaustive),
        pytest.param("mllama", "its language model is given no embeddings of images", marks=pytest.mark.exhaustive),
    ],
)
def test_what_lmkit_has_no_part_for_is_refused(tmp_path: Path, model_type: str, reason: str) -> None:
    assert reason in examine_images(model_type, tmp_path).refused


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llava")
    return save_tiny("llava", folder)[0], folder


@pytest.fixture(scope="module")
def pipe(seeing: tuple[Any, Path]) -> Iterator[Pipeline]:
    sizes: dict[str, Any] = {"max_model_len": 256, "kv_memory": 4 << 20, "max_step_tokens": 16}
    with pipeline(str(seeing[1]), device="cpu", activations="exact", **sizes) as pipe:
        yield pipe


def data_url(number: int) -> str:
    file = io.BytesIO()
    picture(number, 0).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def content(text: str, *numbers: int) -> list[dict[str, Any]]:
    images = ({"type": "image_url", "image_url": {"url": data_url(number)}} for number in numbers)
    return [*images, {"type": "text", "text": text}]


GREEDY = GenerationConfig(do_sample=False, max_new_tokens=ANSWER, min_new_tokens=ANSWER)


def expected(seeing: tuple[Any, Path], text: str, *numbers: int) -> list[int]:
    model, folder = seeing
    processor = open_processor(str(folder))
    tensors = processed(processor, text.replace("M", marker(processor)), [picture(number, 0) for number in numbers])
    found, margin = answer(model, tensors.pop(IDS)[0].tolist(), **tensors)
    assert margin > 1e-4
    return found


def test_messages_with_images(pipe: Pipeline, seeing: tuple[Any, Path]) -> None:
    """Several images, an image of a second turn, and the same text with another image."""
    asked = [{"role": "user", "content": content("what", 0, 1)}]
    first = pipe(asked, GREEDY)
    prompt = "<|im_start|>user\nMMwhat<|im_end|>\n<|im_start|>assistant\n"
    assert first.token_ids == expected(seeing, prompt, 0, 1)
    other = pipe([{"role": "user", "content": content("what", 1, 0)}], GREEDY)
    assert other.token_ids == expected(seeing, prompt, 1, 0)
    assert other.token_ids != first.token_ids
    said = [*asked, {"role": "assistant", "content": "a dog"}, {"role": "user", "content": content("and", 2)}]
    second = pipe(said, GREEDY)
    prompt += "a dog<|im_end|>\n<|im_start|>user\nMand<|im_end|>\n<|im_start|>assistant\n"
    assert second.token_ids == expected(seeing, prompt, 0, 1, 2)


def test_text_alone(pipe: Pipeline, seeing: tuple[Any, Path]) -> None:
    found = pipe([{"role": "user", "content": "hello"}], GREEDY)
    ids = pipe.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert found.token_ids == answer(seeing[0], ids)[0]


def test_a_file_that_is_no_image_is_refused(pipe: Pipeline) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGFsbG8="}}]
    found = pipe([{"role": "user", "content": parts}])
    assert "no image that can be read" in str(found.error_message)


def test_inspect_says_what_reads_images(seeing: tuple[Any, Path], tmp_path: Path) -> None:
    def said(folder: Path) -> Any:
        return describe_model(str(folder), EngineConfig(device="cpu"))["engine"]["images"]

    assert said(seeing[1]) == "LlavaProcessor of transformers"
    shutil.copytree(seeing[1], tmp_path / "other")
    (tmp_path / "other" / "processor_config.json").write_text('{"processor_class": "OtherProcessor"}')
    assert said(tmp_path / "other") == "refused: transformers has no processor 'OtherProcessor'"
    tiny.make(tmp_path / "text", "olmo")
    assert said(tmp_path / "text") is None


def test_a_word_after_an_image_of_idefics_2(tmp_path: Path) -> None:
    """Its processor writes a space before one, and before nothing else."""
    _, processor = save_tiny("idefics2", tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"processor_class": type(processor).__name__}))
    tokenizer, mark = Tokenizer.from_pretrained(tmp_path), marker(processor)
    image = processed(processor, mark, [picture(0, 0)])[IDS][0].tolist()
    for text in ("what", " what", "\nwhat", "<b>", "?"):
        parts = [{"type": "image"}, {"type": "text", "text": text}]
        ids = tokenizer.encode_chat([{"role": "user", "content": parts}])
        at = ids.index(processor.tokenizer.convert_tokens_to_ids(mark))
        whole = f"<|im_start|>user\n{mark}{text}<|im_end|>\n<|im_start|>assistant\n"
        wanted = processed(processor, whole, [picture(0, 0)])[IDS][0].tolist()
        assert [*ids[:at], *image, *ids[at + 1 :]] == wanted, text
