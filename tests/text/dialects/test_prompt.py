"""Conversations with tools as texts, for templates that know no tools."""

from __future__ import annotations

from lmkit.text.dialects import DIALECTS
from lmkit.text.dialects.prompt import with_texts


def test_images_of_a_result_stand_in_a_template_without_tools() -> None:
    """Results beside each other are one message of the user, whose parts keep their images."""
    contents = "one", [{"type": "image"}, {"type": "text", "text": "two"}]
    results = [{"role": "tool", "content": content} for content in contents]
    (message,) = with_texts(results, DIALECTS["hermes"])
    assert message["role"] == "user"
    shown = "".join(part.get("text", "IMAGE") for part in message["content"])
    assert shown == "<tool_response>\none\n</tool_response>\n<tool_response>\nIMAGEtwo\n</tool_response>"
    (plain,) = with_texts(results[:1], DIALECTS["hermes"])
    assert plain == {"role": "user", "content": "<tool_response>\none\n</tool_response>"}
