"""Text <-> tokens: tokenizer, sandboxed chat template, incremental detokenizer. No torch, no transformers."""

from lmkit.text.detokenizer import IncrementalDetokenizer
from lmkit.text.template import ChatTemplate
from lmkit.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer"]
