"""Mooncake's conversation trace (Qin et al., FAST 2025; Apache-2.0): lengths, times, and which prefixes are shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from experiments.workloads.fits import FitName
from experiments.workloads.samples import Sample, Segment, WorkloadError
from experiments.workloads.trace_files import TraceLengths, field, rows, seconds, tokens

BLOCK = 512  # prompt tokens that one hash stands for


class MooncakeLengths(TraceLengths):
    """timestamp (ms), input_length, output_length, hash_ids.

    The i-th hash stands for tokens 512 i to 512 (i + 1) of the prompt (the last one for what is left) and for all
    before them; requests that begin with the same hashes get prompts that begin with the same tokens. Times are in
    ticks of 3 s; requests of one tick are spread evenly at random over it.
    """

    has_times: ClassVar[bool] = True
    tick: ClassVar[float] = 3.0

    source: Literal["mooncake"]

    def public_names(self) -> Sequence[str]:
        return ("mooncake_conversation_trace.jsonl", "conversation_trace.jsonl")

    def fit_name(self) -> FitName:
        return "mooncake"

    def title(self) -> str:
        return "Mooncake conversations, random tokens with its shared prefixes"

    def read(self, path: Path) -> Iterator[Sample]:
        for index, row in enumerate(rows(path), 1):
            where = f"{path.name}, record {index}"
            prompt, output = (tokens(row, column, where) for column in ("input_length", "output_length"))
            hashes = field(row, "hash_ids", where)
            if not isinstance(hashes, list) or len(hashes) != -(-prompt // BLOCK):
                raise WorkloadError(f"{where}: hash_ids must have a hash for every {BLOCK} of {prompt} tokens")
            segments = tuple(Segment(str(key), min(BLOCK, prompt - BLOCK * i)) for i, key in enumerate(hashes))
            yield Sample(prompt, output, segments=segments, time=seconds(row, "timestamp", where, 1e-3))
