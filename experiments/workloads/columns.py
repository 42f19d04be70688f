"""Any .csv or .jsonl file with numbers of prompt and output tokens, by a map to its own column names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from experiments.workloads.samples import Sample, UsualBounds
from experiments.workloads.trace_files import TraceLengths, field, rows, seconds, tokens


class FileLengths(UsualBounds, TraceLengths):
    """Columns of a file.

    Args:
        path: the file, or its name in the traces' folder.
        prompt_column, output_column: names of the columns with numbers of tokens.
        time_column: of seconds, or of dates with times of day; needed for `arrivals: {process: trace}`.
        time_scale: what a number in it is in seconds, such as 0.001.
        client_column: of names.
    """

    has_times: ClassVar[bool] = True
    has_clients: ClassVar[bool] = True

    source: Literal["file"]
    path: str
    prompt_column: str = "prompt_tokens"
    output_column: str = "output_tokens"
    time_column: str | None = None
    time_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    client_column: str | None = None

    def title(self) -> str:
        return "random tokens"

    def read(self, path: Path) -> Iterator[Sample]:
        for index, row in enumerate(rows(path), 1):
            where = f"{path.name}, record {index}"
            prompt, output = (tokens(row, column, where) for column in (self.prompt_column, self.output_column))
            time = None if self.time_column is None else seconds(row, self.time_column, where, self.time_scale)
            client = None if self.client_column is None else str(field(row, self.client_column, where))
            yield Sample(prompt, output, time=time, client=client)
