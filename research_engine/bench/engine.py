"""`research-engine bench engine`: piles of requests, fixed batches, energy and memory in one go, alone or beside vLLM.

The works are those of `bench throughput` and `bench latency`, done by one start of each engine, so that a comparison
takes one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from research_engine.bench.offline import LatencyOptions, latencies, latency_works, measure
from research_engine.bench.offline_work import JobResult, Length, lengths_from_csv

GIB = 1 << 30


@dataclass(frozen=True)
class EngineBenchOptions(LatencyOptions):
    """What `bench latency` measures, and two piles of requests that are all there at once.

    Args:
        lengths: CSV of prompt and output tokens of the first pile, which is left out without it.
        num_prompts: requests of the first pile.
        max_prompt: of lengths, pairs with longer prompts are left out.
        max_total: of lengths, pairs of more tokens are left out.
        pile: requests, prompt tokens and output tokens of the second one; 0 0 0 leaves it out.
    """

    lengths: Path | None = None
    num_prompts: int = 1000
    max_prompt: int = 1024
    max_total: int = 2048
    pile: tuple[int, int, int] = (256, 1024, 128)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_prompts", "max_prompt", "max_total"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be an integer >= 1")
        if self.pile != (0, 0, 0) and not all(value >= 1 for value in self.pile):
            raise ValueError(f"pile = {self.pile}: must be three integers >= 1, or 0 0 0 for none")


def main(options: Annotated[EngineBenchOptions, tyro.conf.arg(name="")]) -> int:
    """Measure throughput, latency, energy and memory with one start of the engine."""
    piles: dict[str, list[Length]] = {}
    if options.lengths is not None:
        piles[f"{options.num_prompts} of {options.lengths.name}"] = lengths_from_csv(
            options.lengths, options.num_prompts, max_prompt=options.max_prompt, max_total=options.max_total
        )
    if options.pile[0]:
        requests, prompt, output = options.pile
        piles[f"{requests} x ({prompt} in, {output} out)"] = [(prompt, output)] * requests
    fixed = latency_works(options)
    console = Console()
    measured = measure(options, {**fixed, **piles}, dict.fromkeys(fixed, options.repeats), console)
    results = measured.results
    console.print(_table(options, piles, results))
    for result in results:
        for line in _memory(result):
            console.print(line, highlight=False)
    return measured.exit_code()


def _table(options: EngineBenchOptions, piles: dict[str, list[Length]], results: Sequence[JobResult]) -> Table:
    table = Table(title=f"{options.model}, max_num_seqs {options.max_num_seqs}", title_justify="left")
    table.add_column("what")
    for result in results:
        table.add_column(result.engine, justify="right")
    if len(results) == 2:
        table.add_column("ours / theirs", justify="right")

    def row(what: str, values: Sequence[float], form: str) -> None:
        ratio = [f"{values[0] / values[1]:.3f}"] if len(values) == 2 else []
        table.add_row(what, *(format(value, form) for value in values), *ratio)

    for what, times in latencies(options, results):
        row(f"ms {what}", [1000 * seconds for seconds in times], ".3f")
    for name, lengths in piles.items():
        tokens = sum(prompt for prompt, _ in lengths)
        row(f"requests/s, {name}", [len(lengths) / result.seconds[name] for result in results], ".2f")
        totals = [(tokens + result.output_tokens[name]) / result.seconds[name] for result in results]
        row("  tokens/s, prompts included", totals, ",.0f")
        if all(name in result.joules for result in results):
            row("  joules per output token", [r.joules[name] / r.output_tokens[name] for r in results], ".3f")
    row("start-up, s", [result.startup for result in results], ".1f")
    return table


def _memory(result: JobResult) -> list[str]:
    """The engine's memory beside its KV cache, if it told it."""
    if "memory_beside_cache" not in result.extra:
        return []
    measured = result.extra["memory_beside_cache"]
    line = f"{result.engine}: {measured / GIB:.2f} GiB of the GPU beside the KV cache at most"
    planned = result.extra.get("memory_planned")
    if planned:
        line += f", {planned / GIB:.2f} GiB planned ({measured / planned - 1:+.1%})"
    return [line]
