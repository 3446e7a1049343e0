"""Prompts with images: logits are those of transformers for whole prompts, chunks that cut images, and decoding; and
the engine's tokens are, after a preemption and after cached prefixes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lmkit.config import EngineConfig
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import KVLayer
from lmkit.models import load_spec
from lmkit.models.families.towers import BREAKS
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.loader import load_model
from lmkit.models.tower import Tower
from lmkit.quant.recipe import parse_recipe
from lmkit.quant.run import prepare
from lmkit.turbo.engine.encoder import Encoder
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.plan import Chunk, NewSequence
from lmkit.turbo.request import ImageInput, Request, SamplingParams, StepOutput
from lmkit.turbo.runners.batch import PersistentBatch
from lmkit.turbo.runners.images import EncodedImages
from lmkit.turbo.scheduling.limits import fitted_to_images
from tests.models import peft_folder, tiny
from tests.models.pictures import expected, frames, marks_of, picture, prompt, rows_of, tower_of
from tests.quant.helpers import tiny_checkpoint

TOLERANCE = 1e-4  # how far logits may be from those of transformers
MARKS = [197, 198]  # of images and videos; transformers would take one in an answer for an image
Model = tuple[transformers.PreTrainedModel, Path, Tower]


@pytest.fixture(scope="module", params=list(tiny.VISION))
def vl(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Model:
    path = tmp_path_factory.mktemp("vl")
    model = tiny.make(path, request.param)
    with torch.no_grad():
        for part in tiny.tower_parts(model):
            for name, weight in part.named_parameters():
                if weight.ndim > 1:  # large enough for images to matter
                    weight.normal_(std=0.3 if "merger" in name else 0.2)
    model.save_pretrained(path)
    return model, path, tower_of(path)


def text(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 190, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_chunks_that_cut_images_match_transformers(vl: Model) -> None:
    """Beside a prompt of text, whose bits the images do not change."""
    model, path, tower = vl
    decoder = load_model(path)
    images = [picture(tower, 3, 4, 1), picture(tower, 2, 2, 2), picture(tower, 1, 5, 3)]
    video = frames(tower, 2, 3, 2)  # towers that read videos get one, too
    ids, placed = prompt(tower, [*text(3), -1, *text(2), -1, 7, -1, *text(4), *marks_of(video)], images + video)
    images += video
    whole = tower.settings.sees_all
    encoded = EncodedImages.of(1 << 20, decoder.spec)
    for image in images:
        encoded.keep(image.digest, rows_of(tower, image))
        encoded.use(image.digest)
    rows = [(ids, placed), (text(len(ids), 9), ())]
    wants = [expected(model, tower, *row) for row in rows]
    assert (wants[0] - expected(model, tower, ids, placed[:0])).abs().max() > 0.1, "images change nothing"
    for sizes in ([len(ids)], [5, 6, 2, 9, 4, 100]):
        batch = PersistentBatch(num_slots=2, max_model_len=96, block_size=8, max_step_tokens=256)
        batch.encoded = encoded
        for slot, (row, of_row) in enumerate(rows):
            batch.enter(NewSequence(slot, row, len(row), SamplingParams(), (), False, images=of_row))
        given = request("whole", ids, placed if whole else ())
        storages = [KVStorage(FLOAT32, FLOAT32)] * decoder.spec.num_layers
        kv: list[KVLayer] = allocate(decoder.spec.layers, storages, 24, 8, 96)
        done = 0
        for size in sizes:
            count = fitted_to_images(given, done, min(size, len(ids) - done), 100)
            held = -(-done // 8)
            new = range(held, -(-(done + count) // 8))
            chunks = [Chunk(slot, done, count, [[slot * 12 + i for i in new]], count) for slot in range(2)]
            inputs, _ = batch.inputs(chunks)
            got = decoder(inputs, kv).split(count)
            for logits, want in zip(got, wants, strict=True):
                torch.testing.assert_close(logits, want[done : done + count], rtol=TOLERANCE, atol=TOLERANCE)
            done += count


def run(engine: Engine, requests: list[Request]) -> dict[str, list[StepOutput]]:
    found: dict[str, list[StepOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            found[output.request_id].append(output)
    engine.check_integrity()
    return found


def tokens(outputs: list[StepOutput]) -> list[int]:
    assert outputs[-1].finish_reason == "length", outputs[-1]
    return [token for output in outputs for token in output.token_ids]


def request(name: str, ids: list[int], images: tuple[ImageInput, ...], count: int = 8, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=count, ignore_eos=True, logit_bias=dict.fromkeys(MARKS, -100.0))
    return Request(request_id=name, prompt_ids=ids, images=images, params=params, **fields)


def check(model: transformers.PreTrainedModel, tower: Tower, given: Request, got: list[int]) -> None:
    logits = expected(model, tower, [*given.prompt_ids, *got], given.images)[len(given.prompt_ids) - 1 : -1]
    logits[:, MARKS] = -torch.inf
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > TOLERANCE, "a last bit could decide"
    assert got == logits.argmax(-1).tolist()


@pytest.fixture
def served(tmp_path: Path, vl: Model) -> Path:
    """The checkpoint with a tokenizer."""
    path = tiny_checkpoint(tmp_path / "served", "qwen2.5-vl", vocab_size=199)
    for file in vl[1].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [like | {"id": i, "content": mark} for mark, i in BREAKS.items()]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


SIZES: dict[str, Any] = {"block_size": 8, "max_batch_size": 2, "max_step_tokens": 18, "max_model_len": 80,
                         "kv_dtype": "float32", "packed_cache": False}  # fmt: skip


def blocks(path: Path, count: int) -> int:
    """Bytes of so many blocks of 8 tokens."""
    spec = load_spec(json.loads((path / "config.json").read_text()))
    return count * 8 * sum(layer.kv_token_bytes(FLOAT32, FLOAT32) for layer in spec.layers)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_engine_gives_transformers_tokens(
    served: Path, vl: Model, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shared steps, after a preemption, and after cached prefixes; the same marks with other images do not hit."""
    model, _, tower = vl
    encode = Encoder.advance  # a request's images in one step, so that no time decides when it begins
    monkeypatch.setattr(Encoder, "advance", lambda encoder, seconds: encode(encoder, math.inf))
    engine = Engine(str(served), EngineConfig(**SIZES, kv_memory=blocks(served, 12), overlap=overlap))
    ids = [*text(3), -1, *text(2, 1), -1, *text(5, 2)]
    first = request("a", *prompt(tower, ids, [picture(tower, 4, 4, 1), picture(tower, 3, 5, 2)]), count=22)
    other = request("b", *prompt(tower, ids, [picture(tower, 4, 4, 1), picture(tower, 3, 5, 3)]), count=22)
    found = run(engine, [first, other])
    for given in (first, other):
        check(model, tower, given, tokens(found[given.request_id]))
    assert engine.stats().preemptions, "the blocks hold both"
    assert engine.stats().images == {"encoded": 3, "reused": 1}
    again = run(engine, [other])["b"]
    assert tokens(again) == tokens(found["b"])
    assert again[0].cached_tokens >= len(other.prompt_ids) - 8
    third = request("c", *prompt(tower, ids, [picture(tower, 4, 4, 1), picture(tower, 3, 5, 4)]))
    cut = run(engine, [third])["c"]
    check(model, tower, third, tokens(cut))
    second = third.images[1].start
    least = 0 if tower.settings.sees_all else 16  # windows let go of the first blocks when memory is short
    assert least <= cut[0].cached_tokens <= second, "what stands before the second image hits, and nothing of the image"
    assert engine.stats().images["encoded"] == 4
    engine.close()


def test_an_adapter_gets_its_place_when_images_are_encoded(tmp_path: Path) -> None:
    """Until then another may have it."""
    path = tiny_checkpoint(tmp_path / "model", "qwen2.5-vl", vocab_size=199)
    for name in "ab":
        peft_folder.write(tmp_path / name, peft_folder.linears_of(path), ord(name))
    folders = tuple(f"{name}={tmp_path / name}" for name in "ab")
    engine, tower = Engine(str(path), EngineConfig(**SIZES, adapters=folders, max_adapters=1)), tower_of(path)
    engine.add(request("a", *prompt(tower, [*text(3), -1, 5], [picture(tower, 4, 4)]), adapter="a"))
    engine.add(request("b", text(3), (), adapter="b"))
    assert [*engine.adapters.placed] == ["b"]
    engine.abort("b")
    ends = dict[str, str]()
    while engine.has_work():
        ends |= {output.request_id: output.finish_reason for output in engine.step() if output.finish_reason}
    assert ends == {"a": "length", "b": "abort"}
    engine.close()


def test_a_quantized_model_with_int8_kv_sees_images(served: Path, vl: Model, tmp_path: Path) -> None:
    """Its answers depend on the image."""
    asked = {"scheme": {"group_size": -1}, "steps": [{"step": "rtn"}], "calibration": {"dataset": "none"}}
    prepare(served, parse_recipe(asked, "test")).run(tmp_path / "out")
    engine, tower = Engine(str(tmp_path / "out"), EngineConfig(**SIZES | {"kv_dtype": "int8"})), vl[2]
    found = []
    for seed in (1, 2, 1):
        given = request(str(seed), *prompt(tower, [*text(3), -1, *text(4, 2)], [picture(tower, 4, 4, seed)]))
        found.append(tokens(run(engine, [given])[str(seed)]))
    engine.close()
    assert found[0] == found[2] != found[1]


def test_prefixes_of_random_conversations(served: Path, vl: Model) -> None:
    """Conversations with images of few kinds: a hit ends where the first other token or image begins."""
    model, _, tower = vl
    engine = Engine(str(served), EngineConfig(**SIZES, kv_memory=blocks(served, 200)))
    draw, known = random.Random(5), list[list[Any]]()
    length = 4 if tower.settings.sees_all else 6
    for turn in range(24):
        parts: list[Any] = list(draw.choice(known))[: draw.randint(0, length)] if known and turn % 3 else []
        while len(parts) < length:
            parts.append(draw.choice([("image", draw.randint(0, 2)), ("text", draw.randint(0, 1))]))
        marks, images = [], []
        for kind, number in parts:
            marks += [-1, 21] if kind == "image" else [10 + number, 20]
            images += [picture(tower, 2, 2 + number % 2, number)] if kind == "image" else []
        given = request(str(turn), *prompt(tower, [*marks, 30], images), count=2)
        outputs = run(engine, [given])[str(turn)]
        check(model, tower, given, tokens(outputs))
        cells = {n: picture(tower, 2, 2 + n, n).num_tokens for n in (0, 1)}
        units = _units(parts, cells)
        most = max((_common(units, _units(other, cells)) for other in known), default=0)
        assert outputs[0].cached_tokens <= most
        assert outputs[0].cached_tokens >= most // 8 * 8 - 8
        known.append(parts)
    assert engine.stats().prefix_hits
    engine.close()


def _units(parts: list[Any], cells: dict[int, int]) -> list[Any]:
    """One value for each token. Images of odd and even numbers have `cells` tokens."""
    return [(kind, n) for kind, n in parts for _ in range(cells[n % 2] + 1 if kind == "image" else 2)]


def _common(a: list[Any], b: list[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
