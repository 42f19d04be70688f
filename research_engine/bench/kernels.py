"""`research-engine bench kernels`: times the ops against the machine's roofline and other libraries, in one run.

Each case is checked before it is timed: sampled rows against the float64 oracle, on the very callable (a CUDA graph's
replay, where there is one) that is timed then. A kernel that is wrong is not timed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from rich.console import Console

from research_engine.bench.cpu import cpu_name
from research_engine.bench.kernel_ops import OPS, Op, Work
from research_engine.bench.kernel_problems import Problem, Setting
from research_engine.bench.kernel_report import (
    OURS,
    Case,
    KernelBenchResult,
    Measurement,
    print_report,
    write_csv,
    write_plot,
)
from research_engine.bench.kernel_timing import CpuTimer, CudaTimer, Run, Timer, measure_ceilings
from research_engine.kernels import build_info
from research_engine.kernels._checks import CPU_DTYPES, CUDA_DTYPES
from research_engine.kernels.jit.variants import is_variant, parse_path, parse_settings, variant_of

DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class KernelBenchOptions:
    """What to measure.

    Args:
        op: which ops; all when none is given.
        shape: which shapes of one op, like 128x4096:32/8/128:16; without, a set of the op's own (small on a CPU).
        path: which kernels of an op that has several, side by side.
        variant: what to change of the attention kernel on tensor cores, like stages=3,warps=8 or source=my_decode.cuh
            (GPU alone): each is compiled at first use and timed beside the built one.
        dtype: bfloat16, float16 (CUDA alone) or float32.
        device: auto takes CUDA where there is a GPU.
        repeats: timed runs of each case.
        in_a_row: calls of a run, each on inputs of its own, one after another in one CUDA graph; the time is a call's.
            One call alone pays for a launch and for dirty cache lines that kernels inside a model do not meet.
        seed: of inputs and of the order of blocks.
        compare: time FlashInfer and vLLM's FlashAttention-3, Marlin and Machete, too, where they can be imported; torch
            is timed always.
        out: directory that kernels.csv and roofline.png are written to.
    """

    op: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    variant: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    device: str = "auto"
    repeats: int = 20
    in_a_row: int = 1
    seed: int = 0
    compare: bool = False
    out: Path | None = None

    def __post_init__(self) -> None:
        for name in self.op:
            choose("op", name, OPS)
        if self.variant and not self.op:
            having = ", ".join(name for name, op in OPS.items() if op.variant_path)
            raise ValueError(f"variant = {' '.join(self.variant)}: needs an op to belong to, out of {having}")
        for name in self.op:
            choose_variants(name, self.variant)
        choose("device", self.device, DEVICES)
        for name in ("repeats", "in_a_row"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be >= 1")
        if self.shape and len(self.op) != 1:
            forms = "; ".join(f"{name} {op.form}" for name, op in OPS.items())
            raise ValueError(f"shape = {' '.join(self.shape)}: needs one op to belong to. Forms: {forms}")


def main(options: Annotated[KernelBenchOptions, tyro.conf.arg(name="")]) -> int:
    """Time kernels: medians, spread, share of the measured roofline, and other libraries beside them.

    Args:
        options: what to measure.
    """
    console = Console()
    if options.out is not None:
        make_directory(options.out)
    with console.status("") as status:
        result = run(options, status.update)
    print_report(result, console)
    if options.out is not None:
        console.print(f"wrote {write_csv(result, options.out / 'kernels.csv')}")
        plot = write_plot(result, options.out / "roofline.png")
        console.print(f"wrote {plot}" if plot else "no roofline plot: nothing that computes was timed")
    return result.exit_code


def make_directory(path: Path) -> None:
    """Make it, unless it is there.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out = {path}: it cannot be made a directory ({error.strerror})") from None


def choose(kind: str, name: str, valid: Iterable[str]) -> str:
    """The name, if it is one of the valid ones.

    Raises:
        ValueError: it is not; the message has them all, nearest first.
    """
    names = list(valid)
    if name not in names:
        names.sort(key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())
        raise ValueError(f"{kind} {name!r}: one of {', '.join(names)}")
    return name


def choose_device(options: KernelBenchOptions) -> torch.device:
    """The device that is asked for.

    Raises:
        ValueError: it is not there, or its kernels do not take the dtype.
    """
    usable = torch.cuda.is_available() and build_info()["built_with_cuda"]
    if options.device == "cuda" and not usable:
        why = "the kernels were built without CUDA" if torch.cuda.is_available() else "torch finds no CUDA device"
        raise ValueError(f"device 'cuda': {why}; `research-engine doctor` shows more")
    device = torch.device("cuda" if usable and options.device != "cpu" else "cpu")
    dtypes = CUDA_DTYPES if device.type == "cuda" else CPU_DTYPES
    choose(f"on {device.type}, dtype", options.dtype, [str(dtype).removeprefix("torch.") for dtype in dtypes])
    return device


def choose_cases(options: KernelBenchOptions, device: torch.device) -> list[Case]:
    """The cases that the options mean on this device.

    Raises:
        ValueError: a path or shape that does not fit its op.
    """
    cases = []
    for name in options.op or tuple(OPS):
        op = OPS[name]
        paths = op.cuda_paths if device.type == "cuda" else op.cpu_paths
        for path in options.path:
            choose(f"path of {name} on {device.type}", parse_path(path).base if is_variant(path) else path, paths)
        variants = choose_variants(name, options.variant)
        if device.type != "cuda" and (variants or any(map(is_variant, options.path))):
            raise ValueError(f"variant {' '.join((*options.variant, *options.path))}: compiled for CUDA devices alone")
        shapes = options.shape or (op.cuda_shapes if device.type == "cuda" else op.cpu_shapes)
        chosen = options.path or (paths if op.all_paths else paths[:1])
        if op.variant_path and variants:
            chosen = (*(options.path or (op.variant_path,)), *variants)
        cases += [Case(name, op.parse(shape), path) for shape in shapes for path in chosen]
    return cases


def choose_variants(name: str, given: Iterable[str]) -> list[str]:
    """The paths of an op's variants, `stages=3,warps=8` each.

    Raises:
        ValueError: the op has none, or not of these parameters.
    """
    base = OPS[name].variant_path
    if given and base is None:
        having = ", ".join(other for other, op in OPS.items() if op.variant_path)
        raise ValueError(f"variant = {' '.join(given)}: op {name} has no variants; {having} have")
    return [variant_of(base or "", parse_settings(text)).path for text in given]


def needed_ceilings(cases: Iterable[Case]) -> set[str]:
    """Names of the ceilings that these cases are measured against."""
    needed = {"launch"}
    for case in cases:
        op = OPS[case.op]
        needed.add(op.work(case.sizes, 1, case.path).bandwidth)
        if op.has_product:
            needed.add("product")
    return needed


def run(options: KernelBenchOptions, on_progress: Callable[[str], None] = lambda text: None) -> KernelBenchResult:
    """Measure the ceilings, then case by case.

    Raises:
        ValueError: options that name no op, path, shape or device that is there.
    """
    device = choose_device(options)
    cases = choose_cases(options, device)
    dtype = getattr(torch, options.dtype)
    timer: Timer = CudaTimer() if device.type == "cuda" else CpuTimer()
    on_progress("ceilings")
    ceilings = measure_ceilings(needed_ceilings(cases), timer, device, dtype, options.repeats)
    measurements: list[Measurement] = []
    not_run = len(cases)
    for case in cases:
        on_progress(f"{case.op} {case.shape} {case.path}")
        measurements += measure_case(case, Setting(device, dtype, case.path, options.seed), options, timer)
        not_run -= 1
        if not timer.clear():
            break
    return KernelBenchResult(
        ceilings, device_name(device), options.dtype, options.repeats, measurements, not_run, options.in_a_row
    )


def measure_case(case: Case, setting: Setting, options: KernelBenchOptions, timer: Timer) -> list[Measurement]:
    """The project's kernel, then, if that is right, its peers on the same inputs."""
    made: list[Problem] = []
    measurements = [time_case(case, setting, options.repeats, timer, made, options.in_a_row)]
    if measurements[0].status == "ok":
        work = measurements[0].work
        for name in made[0].peers:
            if name == "torch" or options.compare:
                makers = [problem.peers[name] for problem in made]
                measurements.append(_measure(case, name, work, makers, made, options.repeats, timer))
    return measurements


def time_case(
    case: Case, setting: Setting, repeats: int, timer: Timer, made: list[Problem] | None = None, in_a_row: int = 1
) -> Measurement:
    """The project's kernel alone: built, checked against the oracle, timed. `made` takes the problems, for peers."""
    made = [] if made is None else made
    op: Op = OPS[case.op]

    def build(index: int) -> Run:
        made.append(op.build(case.sizes, replace(setting, seed=setting.seed + index)))
        return made[-1].run

    work = op.work(case.sizes, setting.dtype.itemsize, case.path)
    makers = [partial(build, index) for index in range(in_a_row)]
    return _measure(case, OURS, work, makers, made, repeats, timer)


def _measure(
    case: Case,
    name: str,
    work: Work,
    makers: Sequence[Callable[[], Run]],
    made: list[Problem],
    repeats: int,
    timer: Timer,
) -> Measurement:
    """Build, check, time. What a library raises is written down, whatever it is: the run goes on.

    Args:
        makers: of the calls that follow one another.
        made: their problems, once they are built.
    """
    error = float("nan")
    try:
        runs = [make() for make in makers]
        prepared = timer.prepare(lambda: tuple(chain.from_iterable(run() for run in runs)), made[0].capturable)
        timer.synchronize()
        for problem in made:
            problem.reset()
        results = prepared()
        timer.synchronize()
        count = len(results) // len(made)  # of one call
        errors = [problem.error(results[i * count : (i + 1) * count]) for i, problem in enumerate(made)]
        error = float(np.max(errors))  # a NaN before all
        if not error <= made[0].tolerance:  # a NaN is wrong, too
            note = f"relative error {error:.3g} against the oracle, at most {made[0].tolerance:g} is right: not timed"
            return Measurement(case, name, work, "wrong", note, error, ())
        seconds = tuple(taken / len(runs) for taken in timer.measure(prepared, repeats))
    except Exception as raised:
        if name == OURS and isinstance(raised, ImportError):
            raise  # there are no kernels at all
        refused = name != OURS or isinstance(raised, (ValueError, torch.OutOfMemoryError))
        note = f"{type(raised).__name__}: {raised}".splitlines()[0]
        return Measurement(case, name, work, "refused" if refused else "failed", note, error, ())
    return Measurement(case, name, work, "ok", "", error, seconds)


def device_name(device: torch.device) -> str:
    """In words, with the version of torch."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"{cpu_name()}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"
