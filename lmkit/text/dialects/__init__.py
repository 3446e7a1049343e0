"""How models write reasoning and calls of tools: a table, a parser of answers, and grammars that hold a call's form."""

from lmkit.text.dialects.dialect import Dialect
from lmkit.text.dialects.json_dialects import PLAIN
from lmkit.text.dialects.parser import Parser
from lmkit.text.dialects.reader import Event, collected
from lmkit.text.dialects.table import DIALECTS, dialect_of
from lmkit.text.dialects.thoughts import THOUGHTS, Thought, thought_of

__all__ = [
    "DIALECTS", "PLAIN", "THOUGHTS", "Dialect", "Event", "Parser", "Thought", "collected", "dialect_of", "thought_of",
]  # fmt: skip
