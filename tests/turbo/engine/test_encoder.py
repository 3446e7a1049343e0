"""The images of requests before the scheduler has the requests: order, bounds, ends, and numbers for the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from lmkit.errors import RequestError
from lmkit.models.tower import Tower
from lmkit.turbo.engine import encoder as module
from lmkit.turbo.engine.encoder import Encoder, ImageNumbers
from lmkit.turbo.kv.tiers.keys import block_keys
from lmkit.turbo.request import Request
from lmkit.turbo.runners.images import EncodedImages
from tests.models import tiny
from tests.models.pictures import picture, prompt, tower_of
from tests.turbo.fakes import limits, request


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Tower:
    path = tmp_path_factory.mktemp("tower")
    tiny.make(path, "qwen2.5-vl")
    return tower_of(path)


class Bench:
    """An encoder whose clock stands still, so that each call of `advance` does one part of the work."""

    def __init__(self, tower: Tower, max_bytes: int = 1 << 20, **changes: Any) -> None:
        self.tower, self.now = tower, 0.0
        self.admitted: list[Request] = []
        self.encoded = EncodedImages(max_bytes)
        sizes = {"vocab_size": 199, "num_blocks": 64} | changes
        parts = self.encoded, self.admitted.append, lambda work: work(), lambda: self.now
        self.encoder = Encoder(tower, limits(**sizes), *parts)

    def request(self, name: str, *seeds: int, **fields: Any) -> Request:
        images = [picture(self.tower, 2, 3, seed) for seed in seeds]
        ids, placed = prompt(self.tower, [5, *[-1, 6] * len(seeds)], images)
        return request(name, ids, images=placed, **fields)

    def add(self, name: str, *seeds: int, **fields: Any) -> None:
        self.encoder.add(self.request(name, *seeds, **fields))

    def finish(self) -> int:
        """Encode all that is there. Returns the number of parts."""
        count = 0
        while self.encoder.has_work():
            assert not self.encoder.advance(0.0)
            count += 1
            assert count < 200
        return count

    @property
    def names(self) -> list[str]:
        return [request.request_id for request in self.admitted]


def test_a_video_longer_than_the_context_is_refused(tower: Tower) -> None:
    """Its places in time lie beyond the angles of RoPE, however few tokens it has."""
    bench = Bench(tower)
    given = bench.request("a", 1)
    late = replace(given.images[0], time=bench.encoder._limits.max_model_len)
    with pytest.raises(RequestError, match="a video is as long as"):
        bench.encoder.add(replace(given, images=(late,)))


def test_work_is_done_in_parts_and_in_order(tower: Tower) -> None:
    bench = Bench(tower)
    bench.add("a", 1, 2)
    bench.add("b", 3)
    bench.add("c", 1)  # it waits for a's first image
    assert bench.finish() > 3 * len(range(tower.spec.num_layers))
    assert bench.names == ["a", "b", "c"]
    assert bench.encoder.counts == {"encoded": 3, "reused": 1}
    bench.add("d", 2, 3)
    assert bench.names[-1] == "d", "what is encoded goes on at once"
    first, last = bench.admitted[0].images, bench.admitted[-1].images
    assert [image.pixels for image in first] == [b"", b""], "the scheduler has pixels"
    assert (first[1].number, first[0].number) == (last[0].number, 1)


def test_images_in_use_stay_and_others_leave(tower: Tower) -> None:
    size = 6 * 48 * 4
    bench = Bench(tower, 2 * size)
    for name, seed in (("a", 1), ("b", 2)):
        bench.add(name, seed)
        bench.finish()
    bench.add("c", 3)
    for _ in range(50):
        bench.encoder.advance(0.0)
    assert bench.names == ["a", "b"], "images in use leave no room"
    bench.encoder.ended([module._last(bench.admitted[0], finish_reason="stop")])
    bench.finish()
    assert bench.names == ["a", "b", "c"]
    digests = [request.images[0].digest for request in bench.admitted]
    assert [digest in bench.encoded for digest in digests] == [False, True, True]
    assert bench.encoded.num_bytes == 2 * size


def test_requests_end_while_they_wait(tower: Tower) -> None:
    bench = Bench(tower)
    bench.add("a", 1, timeout=5.0)
    bench.add("b", 2)
    bench.encoder.advance(0.0)
    bench.now = 6.0
    (end,) = bench.encoder.advance(0.0)
    assert (end.request_id, end.finish_reason, end.error_code) == ("a", "error", "deadline_exceeded")
    bench.encoder.abort("b")
    (end,) = bench.encoder.advance(0.0)
    assert (end.request_id, end.finish_reason) == ("b", "abort")
    assert not bench.encoder.has_work()
    bench.add("c", 1, timeout=5.0)
    bench.now += 2.0
    bench.finish()
    assert bench.admitted[-1].timeout == pytest.approx(3.0), "the time that it waited counts"


def test_a_tower_that_fails_ends_one_request(tower: Tower) -> None:
    weights = dict(tower.weights)
    bench = Bench(Tower(tower.spec, weights, tower.settings))
    bench.add("a", 1)
    bench.add("b", 2)
    kept = weights.pop("patch_embed.proj.weight")
    weights["patch_embed.proj.weight"] = torch.zeros(1, 1)
    (end,) = bench.encoder.advance(0.0)
    assert (end.request_id, end.finish_reason) == ("a", "error")
    weights["patch_embed.proj.weight"] = kept
    bench.finish()
    assert bench.names == ["b"]


def test_what_cannot_run_is_refused(tower: Tower) -> None:
    bench = Bench(tower, max_queue=1)
    whole = bench.request("a", 1)
    (image,) = whole.images
    for wrong in (replace(image, start=0), replace(image, columns=2), replace(image, rows=-2, columns=-3),
                  replace(image, pixels=image.pixels[1:])):  # fmt: skip
        with pytest.raises(RequestError, match="image"):
            bench.encoder.add(replace(whole, images=(wrong,)))
    with pytest.raises(RequestError, match="maximum context length"):
        bench.add("b", *range(10))
    bench.encoder.add(whole)
    with pytest.raises(RequestError, match="1 requests wait already") as full:
        bench.add("c", 2)
    assert full.value.code == "queue_full"


def test_a_forgotten_image_gets_a_new_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NUMBERS", 2)
    numbers = ImageNumbers()
    assert [numbers.of(digest) for digest in (b"a", b"b", b"a", b"c", b"a", b"b")] == [1, 2, 1, 3, 1, 4]


def test_keys_depend_on_images_and_not_on_their_numbers() -> None:
    def keys(row: list[int], digests: dict[int, bytes]) -> list[bytes]:
        found: list[bytes] = []
        block_keys(b"root", np.array(row, np.int32), 2, found, digests)
        return found

    one = keys([5, -1, -1, 6, 7, 8], {-1: b"a" * 32})
    assert keys([5, -9, -9, 6, 7, 8], {-9: b"a" * 32}) == one
    other = keys([5, -1, -1, 6, 7, 8], {-1: b"b" * 32})
    assert not set(one) & set(other)
    assert keys([5, 6], {-1: b"a" * 32}) == keys([5, 6], {})


def test_a_plan_of_an_ended_request_finds_its_images(tower: Tower) -> None:
    """A step may be under way with them."""
    bench = Bench(tower, 1)
    bench.add("a", 1)
    bench.finish()
    digest = bench.admitted[0].images[0].digest
    bench.encoder.ended([module._last(bench.admitted[0], finish_reason="abort")])
    for _ in range(2):
        bench.encoder.advance(0.0)
        assert digest in bench.encoded
    for _ in range(3):
        bench.encoder.advance(0.0)
    assert digest not in bench.encoded
