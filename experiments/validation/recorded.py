"""`python experiments/run.py sim_vs_real`: the validation tables from recorded runs alone, no device needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.config import ConfigError
from experiments.validation.comparison import compare
from experiments.validation.recording import Recording
from experiments.validation.report import write_validation
from research_engine.simulation.profiled import Profile

SHIPPED = Path(__file__).parent / "recordings"
DESCRIPTION = "the simulator against recorded runs of the real engine; recording=DIR takes others"


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
        own = out / directory.resolve().name
        for line in write_validation(recording, profile, compare(recording, profile), own):
            print(line)
        print(f"\nin {own}: {', '.join(sorted(path.name for path in own.iterdir()))}\n")
    return 0
