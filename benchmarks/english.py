"""English for publicly trained models: the language reference that Python carries."""

from __future__ import annotations

import pydoc_data.topics

MOST = 120_000  # characters of a text


def english() -> tuple[str, str]:
    """(calibration text, other text for evaluation)."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 2000]
    return "\n\n".join(topics[::2])[:MOST], "\n\n".join(topics[1::2])[:MOST]
