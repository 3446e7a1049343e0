"""Reading videos: frames, sizes and times are those of transformers' processor, and what cannot be used is refused."""

from __future__ import annotations

import importlib
import io
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from lmkit.errors import RequestError
from lmkit.models.vision_spec import PAD
from lmkit.text.images import ReadImage
from lmkit.text.video_process import resized, sampled, sampled_in_pairs
from lmkit.text.videos import ReadVideo, VideoSettings, pictures, with_videos

MARK = "<|vision_start|><|video_pad|><|vision_end|>"
SETTINGS = VideoSettings(
    token_id=7, mark=MARK, pair="<{:.1f} seconds>" + MARK, unit=8, min_pixels=256, max_pixels=1 << 20,
    max_frame_pixels=1 << 20, fps=2.0, min_frames=4, max_frames=768, resample=3, mean=(0.5,) * 3, std=(0.5,) * 3,
)  # fmt: skip


def film(frames: int = 30, kind: str = "mp4", codec: str = "mpeg4", fps: int = 10) -> bytes:
    """A video of 48 x 32 pixels whose frame i is of brightness 8 i."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 8 * i % 256, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def moving(frames: int = 6, kind: str = "GIF") -> bytes:
    """Half a second for each frame."""
    file, shown = io.BytesIO(), [Image.new("RGB", (48, 32), (40 * i, 0, 0)) for i in range(frames)]
    shown[0].save(file, kind, save_all=True, append_images=shown[1:], duration=500)
    return file.getvalue()


def test_frames_are_those_that_transformers_samples() -> None:
    processor = SimpleNamespace(fps=2, min_frames=4, max_frames=20, num_frames=None)
    for total in (1, 2, 3, 4, 7, 30, 299, 1000):
        for fps in (1.0, 10.0, 23.976, 60.0):
            metadata = SimpleNamespace(total_num_frames=total, fps=fps)
            want = Qwen3VLVideoProcessor.sample_frames(processor, metadata)
            assert sampled(total, fps, 2.0, 4, 20) == want.tolist(), (total, fps)
            assert (np.diff(want) > 0).all(), "each frame once, in order"


def test_sizes_are_those_of_transformers() -> None:
    limits = {"min_pixels": 4000, "max_pixels": 300_000}
    for frames in (2, 3, 6, 40):
        for height in (5, 20, 61, 199, 1000):
            for width in (9, 100, 333, 600):
                want = smart_resize(frames, height, width, factor=16, **limits)
                assert resized(frames, height, width, 16, *limits.values()) == want, (frames, height, width)


@pytest.fixture
def qwen2(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' module for videos of Qwen2-VL. What it takes from torchvision is not used here."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    name = "torchvision.transforms.v2.functional"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["torchvision.transforms.v2"], "functional", ModuleType(name), raising=False)
    return importlib.import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")


def test_frames_and_sizes_of_qwen2_vl_are_those_of_transformers(qwen2: Any) -> None:
    processor = SimpleNamespace(fps=2, min_frames=4, max_frames=20, num_frames=None, temporal_patch_size=2)
    for total in (*range(2, 40), 299, 1000):
        for fps in (1.0, 10.0, 23.976, 60.0):
            metadata = SimpleNamespace(total_num_frames=total, fps=fps)
            want = qwen2.Qwen2VLVideoProcessor.sample_frames(processor, metadata)
            assert sampled_in_pairs(total, fps, 2.0, 4, 20) == want.tolist(), (total, fps)
    assert sampled_in_pairs(1, 10.0, 2.0, 4, 20) == [0], "transformers refuses a single frame"
    for height in (5, 20, 61, 199, 1000):
        for width in (9, 100, 333, 600):
            want = qwen2.smart_resize(height, width, 16, 4000, 30_000)
            assert resized(40, height, width, 16, 4000, 30_000, each=True) == want, (height, width)


@pytest.mark.parametrize(
    ("rate", "places", "want"),
    [
        (2.0, 2.0, [0, 2, 4, 6, 8]),
        (4.0, 2.0, [0, 1, 2, 3, 4]),
        (2.4, 4.0, [0, 3, 6, 10, 13]),
        (0.5, 0.0, [0, 1, 2, 3, 4]),
    ],
)
def test_frames_of_one_grid_have_places_in_time(rate: float, places: float, want: list[int]) -> None:
    """As transformers computes them, in float32."""
    settings = msgspec.structs.replace(SETTINGS, mark=PAD, pair=PAD, grid=True, places=places)
    video = settings.cut_up(8, 16, range(10), bytes(10 * 8 * 16 * 3), rate)
    assert [pair.time for pair in video.pairs] == want
    step = torch.tensor(2.0 / rate) * places if places else 1
    assert (torch.arange(5) * step).long().tolist() == want
    assert [pair.goes_on for pair in video.pairs] == [True] * 4 + [False]
    assert len({pair.digest for pair in video.pairs}) == 5, "equal frames at other places have other KV"
    assert with_videos(f"a{PAD}b", [video], settings) == "a" + 5 * PAD + "b"


def test_the_text_of_a_video_is_that_of_transformers() -> None:
    indices, fps = [0, 6, 12, 17, 23], 7.5
    own = Qwen3VLProcessor._calculate_timestamps(SimpleNamespace(), list(indices), fps, 2)
    times = [i / fps for i in [*indices, indices[-1]]]
    video = SETTINGS.cut_up(8, 16, times, bytes(6 * 8 * 16 * 3))
    found = with_videos(f"a{MARK}b", [video], SETTINGS)
    assert found == "a" + "".join(f"<{time:.1f} seconds>{MARK}" for time in own) + "b"


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx-vp9"), ("gif", "")])
def test_videos_of_all_containers_have_their_frames(kind: str, codec: str) -> None:
    video = SETTINGS.read(film(kind=kind, codec=codec) if codec else moving(), "auto", 0)
    shown = [np.frombuffer(pair.pixels, np.uint8).reshape(2, 32, 48, 3) for pair in video.pairs]
    red = np.concatenate(shown)[:, 5, 5, 0].astype(int)
    numbers = [0, 6, 12, 17, 23, 29] if codec else range(6)
    assert np.abs(red - [(8 if codec else 40) * i for i in numbers]).max() <= 8
    want = np.array([0.3, 1.45, 2.6] if codec else [0.25, 1.25, 2.25])
    assert np.allclose(video.seconds, want)


def test_options_of_a_video_are_kept() -> None:
    assert len(SETTINGS.read(moving(), "auto", 1.0).pairs) == 2  # the least, 4 frames
    wide = VideoSettings(**{name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__} | {"cap": 256})
    assert {(pair.rows, pair.columns) for pair in SETTINGS.read(moving(), "auto", 0).pairs} == {(4, 6)}
    assert {pair.rows * pair.columns <= 4 for pair in wide.read(moving(), "auto", 0).pairs} == {True}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no video that can be read"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "no video that can be read"),
        (b"\0\0\0\x1cftypisom" + bytes(400), "no video that can be read"),
        (b"\x1aE\xdf\xa3" + bytes(400), "no video that can be read"),
        (moving(1), "a single frame"),
    ],
)
def test_what_is_no_video_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SETTINGS.read(data, "auto", 0)


def test_a_video_cut_short_is_refused_or_read() -> None:
    whole = film()
    for size in range(40, len(whole), 977):
        with suppress(RequestError):
            assert SETTINGS.read(whole[:size], "auto", 0).pairs


def test_a_text_that_writes_the_mark_is_refused() -> None:
    video = ReadVideo((ReadImage(1, 1, b"", bytes(6), frames=2),), (0.5,))
    assert pictures([video, video]) == [*video.pairs, *video.pairs]
    with pytest.raises(RequestError, match="1 videos and 2 marks"):
        with_videos(f"{MARK} {MARK}", [video], SETTINGS)
