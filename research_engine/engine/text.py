"""From tokens to text without ever showing what a stop string takes back.

Text that could be the beginning of a stop string is held back until it cannot be one any more; nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DecodeStream(Protocol):
    """Turns one sequence's tokens into text; what it has given out never changes."""

    def push(self, token_id: int) -> str:
        """Text that became final with this token; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """The rest, such as the replacement character of an incomplete one; called once."""
        ...


class TextAssembler:
    """Text of one output, with stop strings.

    Args:
        stream: decodes the tokens.
        stop: strings that end the text.
        include_stop: whether the stop string stays in the text.
        min_tokens: stop strings are ignored in text that ends before that many tokens.
    """

    __slots__ = ("_finished", "_include_stop", "_longest", "_min_tokens", "_num_tokens", "_searched", "_sent", "_stop",
                 "_stream", "stopped_by", "text")  # fmt: skip

    def __init__(
        self, stream: DecodeStream, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._stream = stream
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stop), default=0)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._searched = 0  # characters already examined: a stop string that ends among them does not count
        self._sent = 0
        self._finished = False
        self.text = ""  # all decoded text so far; after a stop, cut at the stop
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Text that may be shown now. After this call `stopped_by` names the stop string that appeared, if one did."""
        self._num_tokens += 1
        self.text += self._stream.push(token_id)
        self._find_stop()
        return self._show(len(self.text) if self.stopped_by is not None else len(self.text) - self._held_back())

    def finish(self) -> str:
        """The rest of the text once no token follows. A stop string completed by the tail still cuts."""
        if not self._finished:
            self._finished = True
            if self.stopped_by is None:
                self.text += self._stream.finish()
                self._find_stop()
        return self._show(len(self.text))

    def _find_stop(self) -> None:
        if not self._stop:
            return
        examined, self._searched = self._searched, len(self.text)
        if self._num_tokens < self._min_tokens:
            return
        starts = ((stop, max(0, examined - len(stop) + 1)) for stop in self._stop)
        hits = [(at, stop) for stop, start in starts if (at := self.text.find(stop, start)) >= 0]
        if hits:
            at, stop = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self.text = self.text[: at + (len(stop) if self._include_stop else 0)]
            self.stopped_by = stop

    def _held_back(self) -> int:
        """Length of the longest end of the text that could begin a stop string."""
        for length in range(min(self._longest - 1, len(self.text) - self._sent), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _show(self, until: int) -> str:
        delta = self.text[self._sent : until]
        self._sent = max(self._sent, until)
        return delta
