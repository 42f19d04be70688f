"""The arena log of the VTC paper (Sheng et al., OSDI 2024; Apache-2.0): 27 clients over ten minutes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from experiments.workloads.fits import FitName
from experiments.workloads.samples import Sample, WorkloadError
from experiments.workloads.trace_files import TraceLengths, tokens


class VTCLengths(TraceLengths):
    """First line of a .jsonl file of results, `result.responses`: prompt_len, output_len, req_time, adapter_dir.

    The artifact has the same requests in every policy's results; the adapter is the client.
    """

    has_times: ClassVar[bool] = True
    has_clients: ClassVar[bool] = True

    source: Literal["vtc"]

    def public_names(self) -> Sequence[str]:
        return ("vtc_real_FCFS.jsonl", "all_results_real.jsonl")

    def fit_name(self) -> FitName:
        return "vtc"

    def title(self) -> str:
        return "VTC's arena log, random tokens"

    def read(self, path: Path) -> Iterator[Sample]:
        try:
            with path.open(encoding="utf-8-sig") as file:
                responses = json.loads(file.readline())["result"]["responses"]
            samples = [
                Sample(
                    tokens(r, "prompt_len", f"response {index}"),
                    tokens(r, "output_len", f"response {index}"),
                    time=float(r["req_time"]),
                    client=f"client-{_number(r)}",
                )
                for index, r in enumerate(responses, 1)
            ]
        except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise WorkloadError(f"{path}: no results of the VTC artifact: {why}") from error
        yield from sorted(samples, key=lambda sample: sample.time or 0.0)


def _number(response: dict[str, str]) -> str:
    """`dummy-lora-7b-rank-8-13` is client 13."""
    return response["adapter_dir"].rpartition("-")[2]
