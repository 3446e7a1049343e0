"""How a proxy that charges learns the tokens of a stream whose API tells them at the end alone.

The proxy sends `x-lmkit-counts: 1`. The node then writes a comment after the events of an output: the tokens of the
prompt, those of them that a cache had, and those of the answer, so far. Clients skip comments (HTML, 9.2.6).

    data: {"type":"response.output_text.delta",...}\\n\\n: usage 12 0 5\\n\\n
"""

from __future__ import annotations

HEADER = b"x-lmkit-counts"
MARK = b": usage "
# A header of answers that need not be JSON, as subtitles: the same three numbers.
ANSWER = b"x-lmkit-usage"
