"""`python experiments/run.py sim_vs_real`: the validation tables from recorded runs alone, no device needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.config import ConfigError
from experiments.validation.comparison import compare
from experiments.validation.recording import Recording
from experiments.validation.report import write_validation
from research_engine.simulation.profiled import Profile

SHIPPED = Path(__file__).parent / "recordings"
DESCRIPTION = "the simulator against recorded runs of the real engine; recording=DIR takes others"
_SECONDS_A_STEP = 0.0005  # of simulating it again and its share of the plots, on one core of an AMD EPYC


def available_recordings() -> list[Path]:
    """Directories of the recordings that ship."""
    return sorted(path.parent for path in SHIPPED.glob("*/recording.json"))


def run_recorded(words: Sequence[str], out: Path) -> int:
    """Simulate every recording again, print its table, and write tables and plots to a directory of its name.

    Args:
        words: recording=DIR and profile=FILE, both optional; a recording's own profile.json otherwise.
        out: where to.

    Raises:
        ConfigError: another word, or a recording or profile that cannot be read.
    """
    for directory, recording, profile in _read(words):
        own = out / directory.resolve().name
        for line in write_validation(recording, profile, compare(recording, profile), own):
            print(line)
        print(f"\nin {own}: {', '.join(sorted(path.name for path in own.iterdir()))}\n")
    return 0


def plan_recorded(words: Sequence[str]) -> int:
    """Print what `run_recorded` would do and what it costs; simulates and writes nothing. Raises as it does."""
    tables = steps = 0
    for directory, recording, _ in _read(words):
        own = sum(len(run.steps) for run in recording.runs)
        requests = sum(len(run.requests) for run in recording.runs)
        what = f"{len(recording.runs)} recorded runs of {recording.model}, {requests} requests in {own} steps"
        print(f"to make   {directory.resolve().name}: simulates {what}, again")
        tables, steps = tables + 1, steps + own
    seconds = f"about {max(1.0, _SECONDS_A_STEP * steps):.0f} s (one core of an AMD EPYC)"
    print(f"{tables} table{'' if tables == 1 else 's'} to make, {seconds}")
    return 0


def _read(words: Sequence[str]) -> Iterator[tuple[Path, Recording, Profile]]:
    """Recordings that the words name, each with its profile; see `run_recorded`."""
    given = dict(word.partition("=")[::2] for word in words)
    unknown = sorted(set(given) - {"recording", "profile"})
    if unknown:
        raise ConfigError(f"sim_vs_real: unknown setting {unknown[0]!r}; valid ones: recording=DIR, profile=FILE")
    directories = [Path(given["recording"])] if "recording" in given else available_recordings()
    if not directories:
        raise ConfigError(f"no recording ships in {SHIPPED}; give recording=DIR, the directory of a validation")
    for directory in directories:
        file = Path(given.get("profile", directory / "profile.json"))
        try:
            recording, profile = Recording.load(directory), Profile.load(file)
            profile.require(model=recording.model)
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
        yield directory, recording, profile
