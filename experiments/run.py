"""`python experiments/run.py [NAME or FILE.yaml] [key=value ...]`: from a question to a table (docs/experiments.md)."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.config import Cell
    from experiments.experiment import Experiment
    from experiments.launcher import Launcher

if __name__ == "__main__":  # started as a file: let `experiments` and `schedulers` be found beside it, installed or not
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

DESCRIPTION = """Run a controlled experiment: one thing varies, all else is equal.

Without arguments: three schedulers on SmolLM2-135M, on the CPU, under ShareGPT's texts; about three minutes.
Everything goes to a run directory; running with the same --out again finishes what is missing and repeats nothing."""
EXAMPLES = """examples:
  python experiments/run.py
  python experiments/run.py quickstart model=dummy:tiny
  python experiments/run.py quickstart workload.arrivals.rate=1 seeds=[0,1,2] --out runs/slower
  python experiments/run.py quickstart scheduler=[fcfs,path/to/mine.py:Mine]
  python experiments/run.py my_experiment.yaml --dry-run
  python experiments/run.py papers/pagedattention_fig_2"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0; 1 a trial failed; 2 a user's mistake; 130 Ctrl-C."""
    parser = argparse.ArgumentParser("experiments/run.py", description=DESCRIPTION, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "words", nargs="*", metavar="NAME|FILE.yaml|key=value", help="an experiment, then settings to change"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="run directory (default runs/NAME-TIMESTAMP); resumed if there"
    )
    parser.add_argument("--list", action="store_true", help="list the experiments that ship, and stop")
    parser.add_argument(
        "--dry-run", action="store_true",
        help="check settings, names and devices, print trials and cost, and what was not looked for, and stop",
    )  # fmt: skip
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="folder of public traces (default: $RESEARCH_ENGINE_TRACES)"
    )
    parser.add_argument(
        "--jobs", type=_positive, default=1, metavar="N", help="trials at once, in processes (default 1)"
    )
    parser.add_argument(
        "--ray", nargs="?", const="auto", metavar="ADDRESS", help="run trials on a Ray cluster; `local` starts one here"
    )
    parser.add_argument(
        "--slurm", nargs="?", const="", metavar="key=value,...",
        help="run trials as a Slurm job array, with options of submitit such as slurm_partition=gpu,timeout_min=60",
    )  # fmt: skip
    parser.add_argument(
        "--explain", action="store_true", help="keep every decision with its reasons, for `research-engine explain`"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.explain:
        options.words.append("explain=true")

    try:
        return _answer(options)
    except KeyboardInterrupt:
        print("\nstopped; what had finished is kept", file=sys.stderr)
        return 130


def _answer(options: argparse.Namespace) -> int:
    """What was asked for, mistakes told in words; returns the exit code."""
    from rich.console import Console

    from experiments.config import ConfigError

    console = Console(soft_wrap=False, highlight=False)
    if options.traces is not None and not options.traces.is_dir():
        return _refuse(ConfigError(f"--traces {options.traces}: no such directory"))
    if options.traces is not None:
        os.environ["RESEARCH_ENGINE_TRACES"] = str(options.traces.resolve())  # for this and its worker processes
    try:
        if options.list:
            return _list()
        return _run(options, console)
    except BrokenPipeError:
        raise
    except OSError as error:  # no such place, no permission, no space
        print(f"error: {error}; trials that had finished are kept", file=sys.stderr)
        return 2
    except ConfigError as error:
        return _refuse(error)
    except ValueError as error:  # LoadError, OptionError, WorkloadError; anything else is a fault of ours
        from experiments.workloads.samples import WorkloadError
        from research_engine.loading.errors import LoadError
        from research_engine.options import OptionError

        if not isinstance(error, (LoadError, OptionError, WorkloadError)):
            raise
        _refuse(error)
        if isinstance(error, LoadError):
            print("hint: model=dummy:tiny runs without a download", file=sys.stderr)
        return 2


def _refuse(error: Exception) -> int:
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2


def _list() -> int:
    from experiments.config import RECORDED, available, load_experiment

    for name in available():
        experiment, cells = load_experiment(name)
        trials = len(cells) * len(experiment.seeds) * experiment.repeats
        print(f"{name:<32} {trials:>3} trials  {experiment.description}")
    from experiments.papers.computed import COMPUTED
    from experiments.validation.recorded import DESCRIPTION as RECORDED_DESCRIPTION

    for name, computed in COMPUTED.items():
        print(f"{name:<32}   0 trials  {computed.description}")
    print(f"{RECORDED:<32}   0 trials  {RECORDED_DESCRIPTION}")
    return 0


def _run(options: argparse.Namespace, console: Console) -> int:
    from experiments.analysis.paper_table import FILE as PAPER_FILE
    from experiments.analysis.report import write_report
    from experiments.analysis.table_formats import to_rich
    from experiments.config import RECORDED, load_experiment
    from experiments.papers.computed import COMPUTED, plan_computed, run_computed
    from experiments.preflight import check_names
    from experiments.runner import run_experiment

    given = list(options.words)
    name = given.pop(0) if given and "=" not in given[0] else "quickstart"
    if name == RECORDED:
        from experiments.validation.recorded import plan_recorded, run_recorded

        return plan_recorded(given) if options.dry_run else run_recorded(given, _out(options, name))
    if name in COMPUTED:
        own = name.rpartition("/")[2]
        return plan_computed(name, given) if options.dry_run else run_computed(name, given, _out(options, own))
    experiment, cells = load_experiment(name, given)
    for word in given:
        key, _, value = word.partition("=")
        if key == "seeds" and value.isdecimal() and int(value) > 1:
            print(f"note: {word} is one seed, {int(value)}; several are a list, such as seeds=[0,1,2,3,4,5]")
    check_names(cells)
    out = _out(options, experiment.name)
    if options.dry_run:
        return _dry_run(experiment, cells, options)
    console.print(f"{experiment.name}: {_size(experiment, len(cells))}, into {out}", markup=False, soft_wrap=True)
    report = run_experiment(experiment, cells, out, console=console, jobs=options.jobs, launcher=_launcher(options))
    table = write_report(out)
    if table is not None and report.interrupted is not None:
        table = table.of_results()
    if table is not None:
        console.print(to_rich(table, console.width))
    if table is not None and experiment.paper is not None:
        print((out / PAPER_FILE).read_text(encoding="utf-8"))
    done = report.reused + report.finished
    if report.interrupted is not None:
        where = {"jobs": None if options.jobs == 1 else options.jobs, "ray": options.ray, "slurm": options.slurm,
                 "traces": options.traces}  # fmt: skip
        chosen = [word for name, value in where.items() if value is not None for word in (f"--{name}", str(value))]
        rest = [*options.words, *chosen, "--out", str(out)]
        again = " ".join(["python", "experiments/run.py", *map(_quoted, rest)])
        kept = f"{done} of {report.planned} trials are finished and kept"
        print(f"\nstopped in {report.interrupted}; {kept}. To go on:\n  {again}")
        return 130
    for trial, why in report.failed.items():
        print(f"failed: {trial}: {why}", file=sys.stderr)
    if report.failed:
        print(f"tracebacks are in {out / 'failures.json'}", file=sys.stderr)
    print(f"{done} of {report.planned} trials are in {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    return 1 if report.failed else 0


def _out(options: argparse.Namespace, name: str) -> Path:
    """The run directory."""
    return options.out or Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _size(experiment: Experiment, cells: int) -> str:
    """`3 cells x 2 seeds (0, 1)`."""
    seeds = f"{_count(len(experiment.seeds), 'seed')} ({', '.join(map(str, experiment.seeds))})"
    times = [_count(experiment.repeats, "repeat")] if experiment.repeats > 1 else []
    return " x ".join([_count(cells, "cell"), seeds, *times])


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _launcher(options: argparse.Namespace) -> Launcher | None:
    """Where trials run if not in processes here.

    Raises:
        ConfigError: two places at once, or the package for one is missing.
    """
    from experiments.config import ConfigError

    places = [name for name in ("ray", "slurm") if getattr(options, name) is not None]
    if len(places) + (options.jobs > 1 and "slurm" in places) > 1:
        raise ConfigError(
            f"--{' and --'.join(places)}: give one place to run in (--jobs is for processes and --ray local)"
        )
    if places == ["ray"]:
        from experiments.on_ray import RayCluster

        return RayCluster(options.ray, options.jobs)
    if places == ["slurm"]:
        from experiments.on_slurm import SlurmArray

        return SlurmArray.of(options.slurm)
    return None


def _dry_run(experiment: Experiment, cells: Sequence[Cell], options: argparse.Namespace) -> int:
    """Trials and cost. Devices of a cluster cannot be seen from here."""
    from experiments.plan import trials_of
    from experiments.preflight import check_devices, cost_of, seconds_per_request, unchecked
    from experiments.storage import read_summary

    out, jobs, is_here = options.out, options.jobs, options.ray is None and options.slurm is None
    if is_here:
        check_devices(cells)
    trials = trials_of(experiment, cells)
    scale = seconds_per_request(trials)
    total, unknown, rest = 0.0, 0, 0
    for trial in trials:
        if out is not None and read_summary(out / "trials" / trial.directory_name) is not None:
            print(f"finished  {trial.name}")
            continue
        rest += 1
        cost = cost_of(trial, out, scale)
        about = cost.basis if cost.seconds is None else f"{cost.seconds:.1f} s ({cost.basis})"
        print(f"to run    {trial.name}: {about}")
        total += cost.seconds or 0.0
        unknown += cost.seconds is None
    print(_size(experiment, len(cells)))
    if left := unchecked(cells, devices=is_here):
        print(f"not looked for (a run does, before its first trial): {'; '.join(left)}")
    words = f"{rest} of {len(trials)} trials to run"
    if rest > unknown:
        words += f", {total / jobs:.0f} s or more" + (f" at {jobs} jobs" if jobs > 1 else "")
    if unknown:
        words += f", and {unknown} trials of unknown length" if rest > unknown else ", of unknown length"
    print(words)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _quoted(word: str) -> str:
    import shlex

    return shlex.quote(word)


if __name__ == "__main__":
    from research_engine.closed_pipe import ending_quietly

    raise SystemExit(ending_quietly(main))
