"""`research-engine bench step`: where a decode step's time goes, on the host and on the device, as table and picture.

The engine's own phases are marked in torch's profiler, which writes the device's kernels on the same clock: the picture
and the device's part of the table. Profiling costs host time, so the step's and the host's times are taken before, by a
stopwatch around each phase.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table

from research_engine.bench.offline_work import random_prompts
from research_engine.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from research_engine.engine.engine import Engine
    from research_engine.engine.request import Request

PHASES = ("view", "plan", "commit", "execute", "update")
_MARK = "step: "
# Parts of kernels' names -> what they are; the first that fits counts.
_KINDS = (
    ("attention", ("decode_mma", "decode_split", "attention")),
    ("products", ("nvjet", "gemm", "gemv", "cublas", "splitk", "cutlass", "quantized_matmul", "matmul")),
    ("norms", ("rms_norm", "layer_norm")),
    ("activation", ("silu", "gelu")),
    ("rotary and cache", ("rotary", "reshape_and_cache")),
    ("sampling", ("sampling",)),
    ("copies", ("memcpy", "memset")),
)
_COLORS = {  # Okabe and Ito (2008), for all kinds of colour vision
    "view": "#999999", "plan": "#E69F00", "commit": "#56B4E9", "execute": "#009E73", "update": "#CC79A7",
    "wait": "#F0E442", "products": "#0072B2", "attention": "#D55E00", "norms": "#56B4E9", "activation": "#009E73",
    "rotary and cache": "#E69F00", "sampling": "#CC79A7", "copies": "#999999", "other": "#000000",
}  # fmt: skip


class Span(NamedTuple):
    """What ran from `start` for `length`, both in microseconds."""

    what: str
    start: float
    length: float


@dataclass(frozen=True)
class StepOptions:
    """One batch that decodes.

    Args:
        model: as `research-engine` takes it everywhere; dummy:NAME has random weights.
        batch: requests.
        context: prompt tokens of each.
        steps: measured ones.
        dtype: of weights and activations.
        scheduler: the policy.
        gpu_memory_utilization: share of the GPU's memory.
        enforce_eager: no CUDA graphs.
        overlap: schedule a step while the one before runs.
        out: the picture's file, PNG, PDF or SVG; none when left out.
    """

    model: Annotated[str, tyro.conf.Positional] = "smollm2-135m-instruct"
    batch: int = 32
    context: int = 128
    steps: int = 20
    dtype: str = "auto"
    scheduler: str = "chunked_prefill"
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    overlap: bool = True
    out: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 1), ("steps", 3)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be an integer >= {least}")
        if self.out is not None and not self.out.parent.exists():
            raise ValueError(f"out = {str(self.out)!r}: there is no directory {self.out.parent}")
        if self.out is not None and self.out.suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"out = {str(self.out)!r}: .png, .pdf or .svg is drawn")


def main(options: Annotated[StepOptions, tyro.conf.arg(name="")]) -> int:
    """Decode one batch, print the step's parts, draw them; exit code 0."""
    from research_engine.llm import LLM

    longest = options.context + 3 * options.steps + 20
    llm = LLM(
        options.model, dtype=options.dtype, max_model_len=longest, max_num_seqs=options.batch, seed=0,
        gpu_memory_utilization=options.gpu_memory_utilization, enforce_eager=options.enforce_eager,
        overlap=options.overlap, scheduler=options.scheduler, enable_prefix_caching=False, skip_tokenizer_init=True,
    )  # fmt: skip
    try:
        engine = llm.engine
        _fill(engine, options)
        seconds, phases = _time(engine, options.steps)
        host, device = _record(engine, options.steps)
    finally:
        llm.shutdown()
    console = Console()
    title = f"{options.model}, {options.batch} requests of {options.context} tokens"
    console.print(_table(title, options.batch, seconds, phases, device, options.steps))
    if options.out is not None:
        draw(options.out, title, host, device)
        console.print(f"picture: {options.out}", highlight=False)
    return 0


def _fill(engine: Engine, options: StepOptions) -> None:
    """Add the batch and run until all of it decodes and nothing is new to any library."""
    params = SamplingParams(max_tokens=3 * options.steps + 10, ignore_eos=True, temperature=1.0, detokenize=False)
    requests: list[Request] = []
    prompts = random_prompts([(options.context, 1)] * options.batch, engine.config.vocab_size)
    for index, prompt in enumerate(prompts):
        requests += engine.add_request(str(index), prompt, params)
    while any(request.num_output_tokens < 3 for request in requests):
        engine.step()


def _time(engine: Engine, steps: int) -> tuple[float, dict[str, float]]:
    """Median seconds of a step, and mean seconds of each phase in it."""
    times, spent = [], dict.fromkeys((*PHASES, "wait"), 0.0)

    @contextmanager
    def stopwatch(phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        spent[phase] += time.perf_counter() - begin

    with _around_phases(engine, stopwatch):
        for _ in range(steps):
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
    return median(times), {phase: seconds / steps for phase, seconds in spent.items()}


def _record(engine: Engine, steps: int) -> tuple[list[Span], list[Span]]:
    """Phases on the host and kernels on the device of so many steps, by start."""
    import torch
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with (
        _around_phases(engine, lambda phase: record_function(_MARK + phase)),
        profile(activities=activities) as profiler,
    ):
        for _ in range(steps):
            engine.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    host, device = [], []
    for event in profiler.events():
        span = (event.time_range.start, event.time_range.elapsed_us())
        if event.device_type == DeviceType.CPU and event.name.startswith(_MARK):
            host.append(Span(event.name.removeprefix(_MARK), *span))
        elif event.device_type == DeviceType.CUDA and not event.name.startswith(_MARK):
            device.append(Span(kind_of(event.name), *span))
    return sorted(host, key=lambda span: span.start), sorted(device, key=lambda span: span.start)


@contextmanager
def _around_phases(engine: Engine, around: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Every phase of the loop, and the wait for tokens inside of update, runs in a context made for its name."""

    def wrapped(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with around(phase):
                result = call(*args)
            return _WrappedPending(wrapped("wait", result.wait)) if phase == "execute" else result

        return run

    for phase in PHASES:
        setattr(engine, phase, wrapped(phase, getattr(engine, phase)))
    try:
        yield
    finally:
        for phase in PHASES:
            delattr(engine, phase)


class _WrappedPending:
    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait


def kind_of(kernel: str) -> str:
    """What a kernel of that name does, as the table and the picture call it."""
    name = kernel.lower()
    return next((kind for kind, parts in _KINDS if any(part in name for part in parts)), "other")


def _table(
    title: str, batch: int, seconds: float, phases: Mapping[str, float], device: Sequence[Span], steps: int
) -> Table:
    table = Table(title=f"{title}: {1e3 * seconds:.3f} ms a step", title_justify="left")
    for column in ("where", "what", "us a step", "per sequence"):
        table.add_column(column, justify="left" if column in ("where", "what") else "right")
    host = {phase: 1e6 * spent for phase, spent in phases.items()}
    host["update"] -= host["wait"]
    host["all but wait"] = sum(host.values()) - host["wait"]
    for what, spent in host.items():
        table.add_row("host", what, f"{spent:.1f}", f"{spent / batch:.2f}", end_section=what == "all but wait")
    for what, total in sorted(_sums(device).items(), key=lambda part: -part[1]):
        table.add_row("device", what, f"{total / steps:.1f}", f"{total / steps / batch:.2f}")
    if device:
        table.add_row("device", "all", f"{sum(span.length for span in device) / steps:.1f}", "")
    return table


def _sums(spans: Sequence[Span]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for span in spans:
        totals[span.what] += span.length
    return totals


def draw(path: Path, title: str, host: Sequence[Span], device: Sequence[Span], *, steps: int = 2) -> None:
    """Mutates the file: a timeline of `steps` steps from the middle of the recording, host above device.

    Args:
        path: .png, .pdf or .svg.
        title: above the picture.
        host, device: by start, as recorded.
        steps: how many; fewer are drawn when there are fewer.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    views = [span.start for span in host if span.what == "view"]
    first = len(views) // 2
    begin, end = views[first], views[first + steps] if first + steps < len(views) else host[-1].start + host[-1].length
    figure, axes = pyplot.subplots(figsize=(10, 2.6), layout="constrained")
    seen: dict[str, Patch] = {}
    for height, spans in ((1, host), (0, device)):
        for span in spans:
            if span.start + span.length < begin or span.start > end:
                continue
            color = _COLORS[span.what]
            axes.barh(height, span.length / 1e3, left=(span.start - begin) / 1e3, height=0.8, color=color, linewidth=0)
            seen.setdefault(span.what, Patch(color=color, label=span.what))
    axes.set_yticks([1, 0], ["host", "device"])
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(handles=list(seen.values()), loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
