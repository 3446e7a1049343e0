from __future__ import annotations

from lmkit.web.sse import EventData


def test_data_at_every_cut() -> None:
    stream = "data: é\r\n\r\n: c\n\ndata:a\ndata: b\u2028c\n\nevent: x\n\ndata: [DONE]\n\n".encode()
    expected = ["é".encode(), "a\nb\u2028c".encode(), b"[DONE]"]
    for cut in range(len(stream)):
        events = EventData()
        assert events.feed(stream[:cut]) + events.feed(stream[cut:]) == expected
