"""The Azure LLM inference traces of 2023, code and conversation (Patel et al., Splitwise, ISCA 2024; CC-BY-4.0)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from experiments.workloads.fits import FitName
from experiments.workloads.samples import Sample
from experiments.workloads.trace_files import TraceLengths, rows, seconds, tokens


class AzureLengths(TraceLengths):
    """TIMESTAMP, ContextTokens, GeneratedTokens: about an hour, with times of 100 ns.

    Args:
        trace: `code` (8,819 requests; silent for up to 217 s) or `conv` (19,366).
    """

    has_times: ClassVar[bool] = True

    source: Literal["azure"]
    trace: Literal["code", "conv"] = "conv"

    def public_names(self) -> Sequence[str]:
        return (f"AzureLLMInferenceTrace_{self.trace}_2023.csv", f"AzureLLMInferenceTrace_{self.trace}.csv")

    def fit_name(self) -> FitName:
        return "azure_code" if self.trace == "code" else "azure_conv"

    def title(self) -> str:
        return f"Azure 2023 {self.trace}, random tokens"

    def read(self, path: Path) -> Iterator[Sample]:
        for index, row in enumerate(rows(path), 1):
            where = f"{path.name}, record {index}"
            prompt, output = (tokens(row, column, where) for column in ("ContextTokens", "GeneratedTokens"))
            yield Sample(prompt, output, time=seconds(row, "TIMESTAMP", where))
