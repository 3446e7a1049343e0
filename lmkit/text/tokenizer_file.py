"""A checkpoint's tokenizer before it is read.

Reading takes seconds and hundreds of MiB for the largest vocabularies. An engine whose requests come as token ids needs
the ids that end a sequence, and the rest only for a grammar.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from lmkit.text.special_tokens import CONFIG, eos_token_id, read_config
from lmkit.text.tokenizer import Tokenizer, listed_ends


@dataclass
class TokenizerFile:
    """Safe to use from several threads at once. Methods raise as `Tokenizer.from_pretrained`."""

    path: Path  # a folder, or a GGUF file
    chat_template: str | None = None
    _read: Tokenizer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> Tokenizer:
        """The tokenizer, which is read at the first call."""
        with self._lock:
            if self._read is None:
                self._read = Tokenizer.from_pretrained(self.path, self.chat_template)
            return self._read

    def eos_token_ids(self) -> tuple[int, ...]:
        """Those of the tokenizer, which is not read if tokenizer_config.json has the id of its eos_token."""
        end = eos_token_id(self.path, read_config(self.path / CONFIG))
        return self.read().eos_token_ids if end is None else tuple(sorted({end, *listed_ends(self.path)}))
