"""Length files of etalon and Vidur (Apache-2.0 and MIT): ShareGPT, BWB and arXiv summaries by Llama 2's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from experiments.workloads.fits import FitName
from experiments.workloads.samples import Sample
from experiments.workloads.trace_files import TraceLengths, rows, tokens

_NAMES = {
    "sharegpt_8k": ("etalon_sharegpt_8k.csv", "sharegpt_8k_filtered_stats_llama2_tokenizer.csv"),
    "bwb_4k": ("etalon_bwb_4k.csv", "bwb_stats_llama2_tokenizer_filtered_v2.csv"),
    "arxiv_4k": ("vidur_arxiv_summarization_4k.csv", "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"),
}

_FITS: dict[str, FitName] = {
    "sharegpt_8k": "etalon_sharegpt_8k",
    "bwb_4k": "etalon_bwb_4k",
    "arxiv_4k": "etalon_arxiv_4k",
}


class EtalonLengths(TraceLengths):
    """num_prefill_tokens, num_decode_tokens; no times.

    Args:
        trace: `sharegpt_8k` ("openchat_sharegpt4" of Sarathi-Serve), `bwb_4k` (translation, long outputs) or `arxiv_4k`
            (summaries, long prompts; one row in 23 has more than 1,024 output tokens).
    """

    source: Literal["etalon"]
    trace: Literal["sharegpt_8k", "bwb_4k", "arxiv_4k"] = "sharegpt_8k"

    def public_names(self) -> Sequence[str]:
        return _NAMES[self.trace]

    def fit_name(self) -> FitName:
        return _FITS[self.trace]

    def title(self) -> str:
        return f"{self.trace}, random tokens"

    def read(self, path: Path) -> Iterator[Sample]:
        for index, row in enumerate(rows(path), 1):
            where = f"{path.name}, record {index}"
            prompt, output = (tokens(row, column, where) for column in ("num_prefill_tokens", "num_decode_tokens"))
            yield Sample(prompt, output)
