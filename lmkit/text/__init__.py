"""Text <-> tokens: tokenizer, sandboxed chat template, incremental detokenizer, token history. No torch here."""

from lmkit.text.detokenizer import IncrementalDetokenizer
from lmkit.text.history import EncodedTurn, TokenHistory
from lmkit.text.template import ChatTemplate
from lmkit.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "EncodedTurn", "IncrementalDetokenizer", "TokenHistory", "Tokenizer"]
