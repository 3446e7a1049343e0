"""Outputs that wait for their client become one."""

from __future__ import annotations

import pytest

from lmkit.serve.collect import joined
from lmkit.turbo.transport.output import RequestOutput


def output(num_output_tokens: int, queue_seconds: float = 0.0) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        text="a" if num_output_tokens else "",
        token_ids=[7] if num_output_tokens else [],
        num_prompt_tokens=3,
        num_output_tokens=num_output_tokens,
        queue_seconds=queue_seconds,
    )


@pytest.mark.parametrize(
    "parts",
    [
        [output(1, 2.5), output(2), output(3)],
        [output(0), output(1, 2.5), output(2)],  # the first one tells how far the prompt is
    ],
)
def test_the_wait_in_the_queue_outlives_the_joining(parts: list[RequestOutput]) -> None:
    whole = joined(joined(parts[0], parts[1]), parts[2])
    assert whole.queue_seconds == 2.5
    assert len(whole.token_ids) == len(whole.text) == parts[-1].num_output_tokens
