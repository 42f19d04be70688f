"""What every source of lengths gives, samples of requests, and the bounds that samples keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pydantic import Field

from experiments.settings import Settings
from experiments.workloads.file_notice import FileNotice

TRIES = 1_000  # draws for each request wanted before a filter is called impossible


class Encoder(Protocol):
    """What lengths need of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


class WorkloadError(ValueError):
    """A workload cannot be made as asked; names the source, the value and the rule."""


class Segment(NamedTuple):
    """A part of a prompt. Segments of the same key have the same tokens, so that the prefix cache can share them."""

    key: str
    tokens: int


@dataclass(frozen=True)
class Sample:
    """One request of a source.

    Attributes:
        prompt_tokens, output_tokens: its lengths.
        prompt_token_ids: the prompt itself, where the source has texts.
        segments: parts of the prompt that requests share, from its beginning; their tokens sum to prompt_tokens.
        time: seconds at which the source recorded it.
        client: who sent it, where the source tells.
    """

    prompt_tokens: int
    output_tokens: int
    prompt_token_ids: Sequence[int] | None = None
    segments: tuple[Segment, ...] | None = None
    time: float | None = None
    client: str | None = None


@dataclass(frozen=True)
class Lengths:
    """Samples, and in words where they come from, for the table.

    Attributes:
        warnings: what was not as asked for.
        notice: one of the warnings that is about a file, and worth hearing once.
    """

    samples: list[Sample]
    origin: str
    warnings: tuple[str, ...] = ()
    notice: FileNotice | None = None


class Bounds(Settings):
    """Bounds that a sample keeps or is left out by; None sets none.

    Args:
        min_tokens: fewest prompt tokens, and fewest output tokens.
        max_prompt, max_output: most prompt tokens and output tokens.
        max_total: most of both together.
    """

    min_tokens: int = Field(default=1, ge=1)
    max_prompt: int | None = Field(default=None, ge=1)
    max_output: int | None = Field(default=None, ge=1)
    max_total: int | None = Field(default=None, ge=2)

    def keeps(self, prompt: int, output: int) -> bool:
        limits = ((prompt, self.max_prompt), (output, self.max_output), (prompt + output, self.max_total))
        return min(prompt, output) >= self.min_tokens and all(most is None or value <= most for value, most in limits)

    def of_bounds(self) -> dict[str, Any]:
        """The bounds alone, to give them to another source."""
        return {name: getattr(self, name) for name in Bounds.model_fields}


class UsualBounds(Bounds):
    """The bounds of ShareGPT benchmarks unless said otherwise."""

    min_tokens: int = Field(default=4, ge=1)
    max_prompt: int | None = Field(default=1024, ge=1)
    max_output: int | None = Field(default=2048, ge=1)
    max_total: int | None = Field(default=2048, ge=2)


def first_kept(samples: Iterable[Sample], keeps: Callable[[int, int], bool], count: int, name: str) -> list[Sample]:
    """The first `count` samples that keep the bounds.

    Raises:
        WorkloadError: there are fewer.
    """
    kept: list[Sample] = []
    for sample in samples:
        if len(kept) == count:
            break
        if keeps(sample.prompt_tokens, sample.output_tokens):
            kept.append(sample)
    if len(kept) < count:
        raise WorkloadError(f"{name}: only {len(kept)} samples keep the bounds on lengths, {count} are wanted")
    return kept
