"""Decode and prefill on this CPU against transformers' `generate`: same weights, token ids and threads, in one run.

What is timed, on both sides alike: a call that prefills a batch and decodes N tokens of each prompt. Prefill is the
time to the first tokens, decode the time from the first tokens to the last. Prompts are ragged; transformers pads them
on the left, as its users must, so prefill is measured on one prompt without padding, too. The two sides take turns.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from research_engine.engine.sampling_params import SamplingParams
from research_engine.llm import LoadedModel, build_engine, load
from research_engine.options import EngineOptions
from research_engine.other_load import usable_cores

if TYPE_CHECKING:
    from research_engine.bench.transformers_twin import TimedTokens
    from research_engine.engine.engine import Engine

Runner = Callable[[Sequence[Sequence[int]], int], "TimedTokens"]


@dataclass(frozen=True)
class CpuBenchOptions:
    """What to measure.

    Args:
        model: as `research-engine` takes it everywhere.
        batch: prompts decoded together.
        min_context: tokens of the shortest prompt.
        max_context: tokens of the longest prompt, and of the single one.
        decode_tokens: decode steps that are timed.
        repeats: runs of each side; medians are reported.
        threads: of both sides; 0 takes every core this process may use.
        seed: of lengths and token ids.
    """

    model: str = "smollm2-135m-instruct"
    batch: int = 16
    min_context: int = 32
    max_context: int = 512
    decode_tokens: int = 32
    repeats: int = 3
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "min_context", "decode_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be >= 1")
        if self.seed < 0:
            raise ValueError(f"seed = {self.seed}: must be >= 0")
        if self.max_context < self.min_context or self.threads < 0:
            raise ValueError(
                f"max_context = {self.max_context} must be >= min_context = {self.min_context}, "
                f"and threads = {self.threads} >= 0"
            )


@dataclass
class Rates:
    """Tokens per second, one entry a repeat."""

    decode: list[float] = field(default_factory=list)
    ragged_prefill: list[float] = field(default_factory=list)
    single_prefill: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class CpuBenchResult:
    """Both sides' rates, and how far their greedy tokens agree.

    Attributes:
        same_tokens: share of all decoded tokens that come before the first difference of their row.
    """

    project: Rates
    transformers: Rates
    same_tokens: float
    machine: str


def main(options: Annotated[CpuBenchOptions, tyro.conf.arg(name="")], loop: bool = False) -> int:
    """Decode and prefill on this CPU against transformers' generate, in float32, with the same weights and threads.

    Args:
        options: what to measure.
        loop: measure the host time of the loop instead, with a stub executor at 256 running sequences.
    """
    console = Console()
    if loop:
        from research_engine.bench.loop import LoopBenchOptions
        from research_engine.bench.loop import report as report_loop

        report_loop(LoopBenchOptions(), console)
    else:
        report(run(options), console)
    return 0


def run(options: CpuBenchOptions) -> CpuBenchResult:
    """Load both sides and measure them in turn."""
    import torch

    from research_engine.bench.transformers_twin import TransformersTwin

    threads = options.threads or usable_cores()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        loaded = load(EngineOptions(options.model, device="cpu", dtype="float32", skip_tokenizer_init=True))
        twin = TransformersTwin(loaded.source, loaded.config)
        own = project_runner(options, loaded)  # first, since it refuses what the model cannot hold
        prompts, single = make_prompts(options, loaded.config.vocab_size)
        sides: tuple[tuple[Runner, Rates], ...] = ((own, Rates()), (twin.generate, Rates()))
        agreement = [0.0]
        for repeat in range(options.repeats + 1):  # the first warms both sides up
            tokens = []
            for generate, rates in sides:
                batched, alone = generate(prompts, options.decode_tokens + 1), generate([single], 1)
                tokens.append(batched.token_ids)
                if repeat:
                    seconds = batched.times[-1] - batched.times[0]
                    rates.decode.append(options.batch * options.decode_tokens / seconds)
                    rates.ragged_prefill.append(sum(map(len, prompts)) / batched.times[0])
                    rates.single_prefill.append(len(single) / alone.times[0])
            agreement.append(_agreement(tokens[0], tokens[1]))
    finally:
        torch.set_num_threads(before)
    machine = f"{cpu_name()}, {threads} threads, torch {torch.__version__}, float32"
    return CpuBenchResult(sides[0][1], sides[1][1], agreement[-1], machine)


def make_prompts(options: CpuBenchOptions, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """The ragged batch, from min_context to max_context tokens a prompt, both among them; and the single prompt."""
    import numpy as np

    rng = np.random.default_rng(options.seed)
    lengths = rng.integers(options.min_context, options.max_context, size=options.batch, endpoint=True).tolist()
    lengths[0] = options.max_context
    if options.batch > 1:
        lengths[1] = options.min_context
    prompts = [rng.integers(0, vocab_size, size=length).tolist() for length in lengths]
    return prompts, rng.integers(0, vocab_size, size=options.max_context).tolist()


def project_runner(options: CpuBenchOptions, loaded: LoadedModel) -> Runner:
    """The project's side: an engine with room for the batch, all prompts prefilled in one step, no prefix cache."""
    longest = options.max_context + options.decode_tokens + 1
    engine = build_engine(
        EngineOptions(
            options.model,
            max_num_seqs=options.batch,
            max_num_batched_tokens=options.batch * options.max_context,
            max_model_len=longest + 1,
            num_blocks=options.batch * -(-longest // 16) + 1,
            scheduler_params={"watermark": 0.0},
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        ),
        loaded,
    )

    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> TimedTokens:
        return _generate(engine, prompts, num_tokens)

    return generate


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> TimedTokens:
    from research_engine.bench.transformers_twin import TimedTokens

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start, times = engine.clock.now(), []
    requests = [engine.add_request(str(i), prompt, params)[0] for i, prompt in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
        times.append(engine.clock.now() - start)
    return TimedTokens([request.output_token_ids for request in requests], times)


def _agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(b)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))
    return same / total


def report(result: CpuBenchResult, console: Console) -> None:
    """Print the table: medians, the range over repeats, ratios."""
    table = Table(title=f"tokens per second on {result.machine}", title_justify="left")
    table.add_column("")
    for name in ("research_engine", "transformers", "ratio"):
        table.add_column(name, justify="right")
    for label, name in (
        ("decode, ragged batch", "decode"),
        ("prefill, ragged batch (real tokens)", "ragged_prefill"),
        ("prefill, one prompt, no padding", "single_prefill"),
    ):
        ours, theirs = getattr(result.project, name), getattr(result.transformers, name)
        ratio = statistics.median(ours) / statistics.median(theirs)
        table.add_row(label, _spread(ours), _spread(theirs), f"{ratio:.2f}")
    console.print(table)
    console.print(f"greedy tokens equal up to the first difference of each row: {result.same_tokens:.1%}")


def _spread(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def cpu_name() -> str:
    """The processor's model."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
