"""Statistics of public traces that ship in their place: quantiles of both lengths, their rank correlation, the load.

fits.json is made of the traces by `python -m experiments.workloads.public_traces DIR`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

FILE = Path(__file__).with_name("fits.json")
SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
FitName = Literal[
    "azure_code", "azure_conv", "mooncake", "sharegpt", "etalon_sharegpt_8k", "etalon_bwb_4k", "etalon_arxiv_4k", "vtc",
    "sharegpt_first_round", "alpaca_sample",
]  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """What is known of a trace without it.

    Attributes:
        name: in words.
        records: in the trace.
        prompt, output: quantiles in tokens at SHARES, the first and last the extremes.
        spearman: rank correlation of the two lengths.
        rate: requests per second on average; None where the trace has no times.
        cv: coefficient of variation of the gaps between arrivals; None likewise.
    """

    name: str
    records: int
    prompt: tuple[float, ...]
    output: tuple[float, ...]
    spearman: float
    rate: float | None = None
    cv: float | None = None

    def draw(self, count: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """`count` prompt lengths and output lengths, as a Gaussian copula joins them."""
        from scipy.special import ndtr

        # of two normal variates, Spearman's rho is 6/pi asin(r/2) (Kruskal 1958)
        correlation = 2 * np.sin(np.pi / 6 * self.spearman)
        first, second = rng.standard_normal((2, count))
        second = correlation * first + np.sqrt(1 - correlation**2) * second
        return _at(self.prompt, ndtr(first)), _at(self.output, ndtr(second))


def _at(quantiles: Sequence[float], shares: npt.NDArray[np.float64]) -> list[int]:
    lengths: list[int] = np.rint(np.exp(np.interp(shares, SHARES, np.log(quantiles)))).astype(np.int64).tolist()
    return lengths


def fit_of(
    name: str, prompts: Sequence[int], outputs: Sequence[int], times: Sequence[float] | None = None, tick: float = 0.0
) -> Fit:
    """Statistics of a trace.

    Args:
        name: in words.
        prompts, outputs: tokens of each request, at least 1.
        times: seconds of each request's arrival, ascending.
        tick: seconds to which times are rounded down; gaps within one say nothing, so that no cv is given.
    """
    from scipy.stats import spearmanr

    rate = cv = None
    if times is not None:
        gaps = np.diff(times)
        rate = float(len(gaps) / (times[-1] - times[0]))
        cv = None if tick else float(gaps.std() / gaps.mean())
    prompt, output = (tuple(np.quantile(np.asarray(v, dtype=np.float64), SHARES).tolist()) for v in (prompts, outputs))
    return Fit(name, len(prompts), prompt, output, float(spearmanr(prompts, outputs).statistic), rate, cv)


@lru_cache(maxsize=1)
def shipped_fits() -> dict[str, Fit]:
    """Statistics by name, out of fits.json."""
    raw = json.loads(FILE.read_text(encoding="utf-8"))
    return {key: Fit(**{**fit, "prompt": tuple(fit["prompt"]), "output": tuple(fit["output"])})
            for key, fit in raw.items()}  # fmt: skip
