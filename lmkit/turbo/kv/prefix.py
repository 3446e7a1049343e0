"""What the prefix caches of all classes of layers have of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.turbo.kv.radix_cache import Match


@dataclass(frozen=True)
class Prefix:
    """The longest prefix of a prompt that the caches of all classes have."""

    matches: tuple[Match, ...]  # one for each class, each of `num_tokens` tokens
    num_tokens: int  # fewer than those of the matches' blocks if no recurrent state is kept behind these

    @property
    def num_full(self) -> int:
        """Full blocks of each class, HOLEs included."""
        return len(self.matches[0].blocks)
