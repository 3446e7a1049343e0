"""How models write reasoning and calls of tools: a table, a parser of answers, and grammars that hold a call's form."""

from lmkit.text.dialects.parser import Event, Parser, collected
from lmkit.text.dialects.table import DIALECTS, THOUGHTS, Dialect, Thought, dialect_of, thought_of

__all__ = ["DIALECTS", "THOUGHTS", "Dialect", "Event", "Parser", "Thought", "collected", "dialect_of", "thought_of"]
