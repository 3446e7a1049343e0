"""Tokens that come one by one -> text, and the stop string that ends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from lmkit.text.tokenizer import Tokenizer


class _StopMatcher:
    """Finds the stop string that ends first in a text that arrives in parts: one automaton step per character.

    Aho and Corasick, "Efficient string matching", CACM 18(6), 1975. A node is a prefix of some stop string. `_depth` of
    the current node is the length of the text's end that could still become a stop string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth, self._fail, self._match = [0], [0], [0]  # _match: length of the longest stop ending here
        for stop in stops:
            node = 0
            for char in stop:
                if char not in self._next[node]:
                    self._next[node][char] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[node] + 1)
                    self._fail.append(0)
                    self._match.append(0)
                node = self._next[node][char]
            self._match[node] = len(stop)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            self._match[node] = self._match[node] or self._match[self._fail[node]]
            for char, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], char)
                queue.append(child)
        self._node = 0
        self._held = ""

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(char, 0)

    def push(self, text: str, armed: bool) -> tuple[str, str]:
        """(text that cannot belong to a later stop string, the stop string that follows it or "").

        A stop string counts only where its last character comes while `armed`.
        """
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            self._node = self._step(self._node, buffer[end - 1])
            if armed and (length := self._match[self._node]):
                return buffer[: end - length], buffer[end - length : end]
        cut = len(buffer) - self._depth[self._node]
        self._held = buffer[cut:]
        return buffer[:cut], ""

    def finish(self) -> str:
        """The text that is still held back."""
        text, self._held, self._node = self._held, "", 0
        return text


class IncrementalDetokenizer:
    """Turns a sequence's tokens into text as they come. The parts add up to `tokenizer.decode` of all tokens,
    but for a character at the end whose last bytes are missing, as a limit of tokens leaves it: it is not shown.

    The work is linear in the output. Text is held back while it may be the beginning of a stop string, a character
    whose last byte is missing, or a run of byte tokens that has not ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_special_ids: Iterable[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids.difference(shown_special_ids) if skip_special_tokens else frozenset()
        self._stages = tokenizer.make_stages()
        self._matcher = _StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self.matched: str | None = None  # the stop string that ended the text
        self.num_chars = 0  # decoded so far, held back or not

    def push(self, token_ids: Iterable[int], *, armed: bool = True) -> str:
        """The text that became certain.

        Stop strings that end here count only if `armed`. After a stop string no text follows.
        """
        pieces = [
            piece for i in token_ids if i not in self._skip and (piece := self._tokenizer.id_to_token(i)) is not None
        ]
        for stage in self._stages:
            pieces = stage.push(pieces)
        return self._emit("".join(pieces), armed)

    def finish(self, *, armed: bool = True) -> str:
        """The rest of the text, after the last token."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = stage.push(pieces) + stage.finish()
        text = self._emit("".join(pieces), armed)
        return text + self._matcher.finish() if self._matcher and self.matched is None else text

    def _emit(self, text: str, armed: bool) -> str:
        if self.matched is not None:
            return ""
        self.num_chars += len(text)
        if self._matcher is None:
            return text
        text, stop = self._matcher.push(text, armed)
        if stop:
            self.matched = stop
            text += stop if self._include_stop else ""
        return text
