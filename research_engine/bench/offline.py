"""`research-engine bench throughput` and `bench latency`: whole jobs offline, alone or beside vLLM in the same run.

throughput  requests with forced lengths, all there at once: requests and tokens per second
latency     seconds per output token at fixed batches, from a call with one output token and one with more, both of the
            same prompts; and seconds to the first token of one prompt
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from research_engine.bench.offline_work import Job, JobResult, Length, lengths_from_csv
from research_engine.bench.result_file import check_place, save
from research_engine.bench.vllm_process import run_twin

if TYPE_CHECKING:
    from research_engine.models.config import ModelConfig


@dataclass(frozen=True)
class EngineChoice:
    """Which engine is measured; the other engine of a comparison gets the same settings.

    Args:
        model: as `research-engine` takes it everywhere; dummy:NAME has random weights.
        dtype: of weights and activations.
        max_model_len: tokens of one request.
        max_num_seqs: requests at once.
        max_num_batched_tokens: tokens a step; each engine's own default when left out.
        gpu_memory_utilization: share of the GPU's memory.
        scheduler: of this engine.
        enforce_eager: no CUDA graphs.
        batch_invariant: of this engine, whose bits of a request then do not depend on the batch around it.
        compare: vllm runs the same job with vLLM, in a process of its own, after this engine.
        vllm_python: an interpreter that has vLLM; this one when left out.
        save: a JSON file for job and results.
    """

    model: Annotated[str, tyro.conf.Positional] = "smollm2-135m-instruct"
    dtype: str = "auto"
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    scheduler: str = "chunked_prefill"
    enforce_eager: bool = False
    batch_invariant: bool = False
    compare: Literal["vllm"] | None = None
    vllm_python: str | None = None
    save: Path | None = None

    def __post_init__(self) -> None:
        if self.vllm_python is not None and self.compare is None:
            raise ValueError(f"vllm_python = {self.vllm_python!r}: used by --compare vllm alone")
        if self.save is not None and not self.save.parent.exists():
            raise ValueError(f"save = {str(self.save)!r}: there is no directory {self.save.parent}")


@dataclass(frozen=True)
class ThroughputOptions(EngineChoice):
    """Requests that are all there at once.

    Args:
        lengths: CSV of prompt and output tokens; without it all requests are input_len, output_len.
        num_prompts: requests.
        input_len: prompt tokens, without lengths.
        output_len: output tokens, without lengths.
        max_prompt: of lengths, pairs with longer prompts are left out.
        max_total: of lengths, pairs of more tokens are left out.
    """

    lengths: Path | None = None
    num_prompts: int = 256
    input_len: int = 1024
    output_len: int = 128
    max_prompt: int = 1024
    max_total: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_prompts", "input_len", "output_len", "max_prompt", "max_total"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be an integer >= 1")


@dataclass(frozen=True)
class LatencyOptions(EngineChoice):
    """Fixed batches, one after the other.

    Args:
        batches: requests decoded together.
        input_len: prompt tokens of each.
        output_len: output tokens of each, over which the time per token is taken.
        prompts: prompt lengths of which the time to the first token is taken, alone.
        repeats: calls of each; the fastest counts.
    """

    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    input_len: int = 128
    output_len: int = 128
    prompts: tuple[int, ...] = (2048, 8000)
    repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("input_len", "output_len", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be an integer >= 1")
        for name in ("batches", "prompts"):
            if not all(value >= 1 for value in getattr(self, name)):
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be integers >= 1")
        if max(self.batches, default=0) > self.max_num_seqs:
            raise ValueError(f"batches = {self.batches}: at most max_num_seqs = {self.max_num_seqs} run together")


@dataclass(frozen=True)
class Measured:
    """What came of a job; the table is printed before an error is told, so that nothing measured is lost.

    Attributes:
        results: this engine's, and the other's where it has one.
        error: of the other engine.
        is_saved: where that was asked for.
    """

    results: list[JobResult]
    error: ValueError | None
    is_saved: bool

    def exit_code(self) -> int:
        """0, or 1 where the results could not be saved; raises the other engine's error."""
        if self.error is not None:
            raise self.error
        return 0 if self.is_saved else 1


def throughput(options: Annotated[ThroughputOptions, tyro.conf.arg(name="")]) -> int:
    """Measure how fast a pile of requests is done."""
    if options.lengths is None:
        lengths = [(options.input_len, options.output_len)] * options.num_prompts
        name = f"{options.num_prompts} x ({options.input_len} in, {options.output_len} out)"
    else:
        lengths = lengths_from_csv(
            options.lengths, options.num_prompts, max_prompt=options.max_prompt, max_total=options.max_total
        )
        name = f"{options.num_prompts} of {options.lengths.name}"
    console = Console()
    measured = measure(options, {name: lengths}, {}, console)
    results = measured.results
    table = Table(title=f"{options.model}: {name}", title_justify="left")
    for title in ("engine", "seconds", "requests/s", "output tok/s", "all tok/s", "start-up s"):
        table.add_column(title, justify="left" if title == "engine" else "right")
    for result in results:
        seconds, out = result.seconds[name], result.output_tokens[name]
        total = out + sum(prompt for prompt, _ in lengths)
        rates = (f"{len(lengths) / seconds:.2f}", f"{out / seconds:,.0f}", f"{total / seconds:,.0f}")
        table.add_row(result.engine, f"{seconds:.2f}", *rates, f"{result.startup:.1f}")
    if len(results) == 2:
        ratio = f"{results[1].seconds[name] / results[0].seconds[name]:.3f} x"
        table.add_row("ratio, ours to theirs", "", ratio, ratio, ratio, "")
    console.print(table)
    return measured.exit_code()


def latency(options: Annotated[LatencyOptions, tyro.conf.arg(name="")]) -> int:
    """Measure time per output token at fixed batches and time to the first token."""
    works = latency_works(options)
    console = Console()
    measured = measure(options, works, dict.fromkeys(works, options.repeats), console)
    results = measured.results
    table = Table(title=f"{options.model}, milliseconds", title_justify="left")
    table.add_column("what")
    for result in results:
        table.add_column(result.engine, justify="right")
    if len(results) == 2:
        table.add_column("ours / theirs", justify="right")
    for what, times in latencies(options, results):
        ratio = [f"{times[0] / times[1]:.3f}"] if len(times) == 2 else []
        table.add_row(what, *(f"{1000 * seconds:.3f}" for seconds in times), *ratio)
    console.print(table)
    return measured.exit_code()


def latency_works(options: LatencyOptions) -> dict[str, list[Length]]:
    """The calls that `latencies` takes its differences of."""
    works: dict[str, list[Length]] = {}
    for batch in options.batches:
        works[f"{batch}: one token"] = [(options.input_len, 1)] * batch
        works[f"{batch}: all tokens"] = [(options.input_len, options.output_len + 1)] * batch
    for prompt in options.prompts:
        works[f"prompt of {prompt}"] = [(prompt, 1)]
    return works


def latencies(options: LatencyOptions, results: Sequence[JobResult]) -> list[tuple[str, list[float]]]:
    """(what, seconds of each engine)."""
    rows = []
    for batch in options.batches:
        one, most = f"{batch}: one token", f"{batch}: all tokens"
        times = [(result.seconds[most] - result.seconds[one]) / options.output_len for result in results]
        rows.append((f"per output token, batch {batch}, {options.input_len} in", times))
    for prompt in options.prompts:
        times = [result.seconds[f"prompt of {prompt}"] for result in results]
        rows.append((f"to the first token, {prompt} in", times))
    return rows


def measure(
    options: EngineChoice, works: Mapping[str, list[Length]], repeats: Mapping[str, int], console: Console
) -> Measured:
    """This engine's result, and the other's, saved where that was asked for.

    Args:
        works: name -> lengths of one call.
        repeats: name -> calls, one where it is not named.
    """
    from research_engine import loading
    from research_engine.bench.offline_engine import run_job

    if options.save is not None:
        check_place(options.save, "save")
    if not works:
        raise ValueError("nothing to measure: no batch, no prompt and no pile of requests was given")
    config = loading.load_config(loading.resolve_model(options.model))
    longest = max(prompt + output for lengths in works.values() for prompt, output in lengths)
    if longest > options.max_model_len:
        raise ValueError(f"max_model_len = {options.max_model_len}: the longest request has {longest} tokens")
    shared: dict[str, Any] = {
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "enforce_eager": options.enforce_eager,
        "seed": 0,
    }
    if options.max_num_batched_tokens is not None:
        shared["max_num_batched_tokens"] = options.max_num_batched_tokens
    together = max(map(len, works.values()))
    head = min(64, longest - 1)
    warmup = [(head, min(16, options.max_model_len - head))] * min(64, together)
    ours = {**shared, "scheduler": options.scheduler, "batch_invariant": options.batch_invariant}
    own = Job(options.model, ours, config.vocab_size, warmup, dict(works), dict(repeats))
    results = [run_job(own, on_work=lambda name: console.print(f"research_engine: {name}", highlight=False))]
    error, is_saved = None, True
    try:
        if options.compare == "vllm":
            results.append(_run_vllm(options, config, own, shared))
    except ValueError as its_own:
        error = its_own
    finally:  # Ctrl-C leaves what was measured, too
        if options.save is not None:
            text = json.dumps({"job": asdict(own), "results": [asdict(result) for result in results]}, indent=1)
            is_saved = save(options.save, text + "\n")
    return Measured(results, error, is_saved)


def _run_vllm(options: EngineChoice, config: ModelConfig, own: Job, shared: Mapping[str, Any]) -> JobResult:
    """The job in a process of its own, by an interpreter that has vLLM."""
    with tempfile.TemporaryDirectory() as scratch:
        directory, others = Path(scratch), dict(shared)
        model = options.model
        if model.startswith("dummy:"):
            from research_engine.loading.dummy import hf_config

            (directory / "config.json").write_text(json.dumps(hf_config(model)))
            model, others["load_format"] = str(directory), "dummy"
        job = Job(model, others, config.vocab_size, own.warmup, own.works, own.repeats)
        return JobResult(**run_twin("vllm_twin.py", asdict(job), options.vllm_python, directory))
