"""Records of a .csv file with a header, or of a .jsonl file of objects, one at a time."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Each record by the names of its columns; values of a .csv file are texts.

    Raises:
        ValueError: the file has another suffix, cannot be read, or a line of it is no JSON object.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"{path}: records are read from .csv and .jsonl files")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                yield from csv.DictReader(file)
                return
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    end = "" if line.endswith("\n") else ", the file's last, perhaps cut short"
                    why = f"line {number}{end}: cannot be read as JSON: {line[:60]!r}: {error.msg}"
                    raise ValueError(f"{path.name}, {why}") from error
                if not isinstance(record, dict):
                    raise ValueError(f"{path.name}, line {number}: {line[:60]!r} is no JSON object")
                yield record
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
