"""The dialects, in the order in which a chat template is asked for their marks."""

from __future__ import annotations

from collections.abc import Mapping

from lmkit.text.dialects.dialect import Dialect
from lmkit.text.dialects.json_dialects import DEEPSEEK, HARMONY, KIMI_K2, LISTED, MISTRAL, PLAIN, SINGLE
from lmkit.text.dialects.own_dialects import GEMMA, GLM, INVOKED, KIMI_K3, MINICPM5, MINIMAX_M3, PYTHONIC, QWEN
from lmkit.text.dialects.thoughts import THOUGHTS

_ALL = (
    HARMONY, KIMI_K3, MINIMAX_M3, KIMI_K2, *INVOKED, *QWEN, *GLM, *GEMMA, *DEEPSEEK, *MISTRAL, *LISTED,
    MINICPM5, *PYTHONIC, *SINGLE, PLAIN,
)  # fmt: skip
DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in _ALL}
MARKS = frozenset(mark for dialect in _ALL for mark in dialect.specials) | frozenset(
    mark for thought in THOUGHTS.values() for mark in (thought.begin, thought.end, *thought.around, *thought.specials)
)


def dialect_of(template: str) -> Dialect | None:
    """The dialect whose marks a chat template has."""
    marked = (dialect for dialect in _ALL if dialect.marks and all(mark in template for mark in dialect.marks))
    found = next(marked, None)
    if found is None and "ipython" in template and '"parameters"' in template:  # Llama 3.2 has no <|eom_id|>
        return DIALECTS["llama3"]
    return found
