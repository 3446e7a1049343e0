"""Videos in a pipeline and over HTTP's way into the engine: greedy tokens are those of transformers."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit import GenerationConfig, pipeline
from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.serve.to_request import chat_requests
from lmkit.text.images import expanded
from lmkit.text.videos import VideoSettings, pictures, with_videos
from lmkit.turbo.request import ImageInput
from lmkit.turbo.transport.prompt_images import settings_of
from tests.api.test_images import drawn, saved
from tests.models.pictures import chat_checkpoint, expected, tower_of
from tests.text.test_videos import moving

BANNED = {4098: -100.0, 4099: -100.0}
CONFIG = GenerationConfig(max_new_tokens=6, ignore_eos=True, logit_bias=BANNED)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen3-vl", "First<0.2 seconds><|vision_start|><|video_pad|>"),
        ("qwen2.5-vl", "First<|vision_start|><|video_pad|><|video_pad|><|video_pad|><|vision_end|>then"),
        pytest.param("qwen2-vl", "First<|vision_start|><|video_pad|><|video_pad|>", marks=pytest.mark.exhaustive),
    ],
)
def test_a_video_and_an_image_give_the_tokens_of_transformers(tmp_path: Path, name: str, written: str) -> None:
    model, tower = chat_checkpoint(tmp_path, name), tower_of(tmp_path)
    picture = saved(drawn(50, 30))
    content: list[dict[str, Any]] = [
        {"type": "text", "text": "First"},
        {"type": "video", "video": moving()},
        {"type": "text", "text": "then"},
        {"type": "image", "image": picture},
    ]
    with pipeline(tmp_path, max_batch_size=2, generation_config="none", packed_cache=False) as pipe:
        session = pipe.chat(content, gen_config=CONFIG)
        first, info, tokenizer = session.response, pipe.engine.info, pipe.tokenizer
        session = pipe.chat("And now?", session, CONFIG)
        assert session.response.cached_token_len >= first.input_token_len, "the video is computed again"
    assert isinstance(info.videos, VideoSettings)
    shown = info.videos.read(moving(), "auto", 0), settings_of(info).read(picture, "auto")
    marks = [{"type": "video"} if part["type"] == "video" else part for part in content]
    text = tokenizer.render_chat([{"role": "user", "content": marks}])
    assert "First<|vision_start|><|video_pad|>" in text
    text = with_videos(text, shown[:1], info.videos)
    assert written in text
    images = pictures(shown)
    ids, starts = expanded(tokenizer.encode(text, False), images, settings_of(info))
    placed = [ImageInput(start, *image) for start, image in zip(starts, images, strict=True)]
    assert len(ids) == first.input_token_len

    url = {"url": "data:image/gif;base64," + base64.b64encode(moving()).decode()}
    still = {"url": "data:image/png;base64," + base64.b64encode(picture).decode()}
    sent = [content[0], {"type": "video_url", "video_url": url}, content[2], {"type": "image_url", "image_url": still}]
    body = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": sent}])
    (request,), _ = chat_requests(body, tokenizer, info, "id")
    assert (request.prompt_ids, list(request.images)) == (ids, placed)

    for token in first.token_ids:
        logits = expected(model, tower, ids, placed)[-1]
        logits[list(BANNED)] = -torch.inf
        assert token == int(logits.argmax())
        ids.append(token)
