"""Work for offline measurements as (prompt, output) lengths, and a job file that another engine's process can read."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Length = tuple[int, int]  # prompt tokens, output tokens


@dataclass(frozen=True)
class Job:
    """What an engine is to do: the same for every engine that is compared.

    Attributes:
        model: a directory with config.json, or whatever name the engine takes.
        options: engine options by vLLM's names.
        vocab_size: prompts' token ids are below it.
        warmup: lengths of a first call that is not timed.
        works: name -> lengths of one timed call.
        repeats: work's name -> calls, of which the fastest counts; one where it is not named.
    """

    model: str
    options: dict[str, Any]
    vocab_size: int
    warmup: list[Length]
    works: dict[str, list[Length]]
    repeats: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class JobResult:
    """What an engine made of a job.

    Attributes:
        engine: name and version.
        startup: seconds until it was ready.
        seconds: work's name -> seconds of its fastest call.
        output_tokens: work's name -> tokens that came out of it.
        joules: work's name -> what the GPU used in that call; empty where it does not tell.
        extra: what else the engine tells of itself.
    """

    engine: str
    startup: float
    seconds: dict[str, float]
    output_tokens: dict[str, int]
    joules: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def lengths_from_csv(path: Path, count: int, *, max_prompt: int, max_total: int, least: int = 4) -> list[Length]:
    """The first `count` pairs of a file of (prompt, output) lengths that keep the bounds.

    Args:
        path: CSV whose first two columns are prompt and output tokens, with one line of titles.
        max_prompt: prompt tokens at most.
        max_total: prompt and output tokens at most.
        least: prompt and output tokens at least.

    Raises:
        ValueError: the file cannot be read, or holds too few such pairs.
    """
    kept: list[Length] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.reader(file), 1):
                if number == 1 or not row:
                    continue
                prompt, output = int(row[0]), int(row[1])
                if prompt >= least and output >= least and prompt <= max_prompt and prompt + output <= max_total:
                    kept.append((prompt, output))
                if len(kept) == count:
                    return kept
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"lengths = {str(path)!r}: cannot be read: {error}") from error
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}, line {number}: prompt and output tokens expected first: {error}") from error
    raise ValueError(
        f"{path}: {len(kept)} pairs have prompts of {least} to {max_prompt} tokens and {max_total} in all; "
        f"{count} were asked for"
    )


def random_prompts(lengths: Sequence[Length], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Token ids of prompts of these lengths: no two begin alike but by chance. Special tokens' ids are left out."""
    rng = random.Random(seed)
    low, high = (10, vocab_size - 10) if vocab_size > 40 else (0, vocab_size)
    return [[rng.randrange(low, high) for _ in range(prompt)] for prompt, _ in lengths]
