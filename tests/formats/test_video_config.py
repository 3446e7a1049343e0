"""What a file says of videos and cannot be used is one line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.image_config import ImageConfig
from lmkit.formats.video_config import FILE, VideoConfig

USUAL = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 3, 0, 0, (0, 0)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"image_mean": 0.5}, CheckpointError, "image_mean is not a list of three numbers"),
        ({"image_std": [0.5, "0.5", 0.5]}, CheckpointError, "image_std is not a list of three numbers"),
        ({"image_mean": [0.1, 0.5, 0.5]}, UnsupportedError, "image_mean is another than that of images"),
        ({"fps": "2"}, CheckpointError, "fps = '2' is not a sensible number"),
        ({"size": 3}, CheckpointError, "size is not an object"),
        ({"min_frames": -1}, CheckpointError, "min_frames = -1 is not a sensible integer"),
        ({"do_rescale": False}, UnsupportedError, "do_rescale = False is not supported"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], words: str
) -> None:
    (tmp_path / FILE).write_text(json.dumps(given))
    with pytest.raises(error, match=f"{FILE}: {words}"):
        VideoConfig(tmp_path, 32, ImageConfig(tmp_path, USUAL))
