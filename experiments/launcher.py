"""What runs trials, as the runner sees it, and the one that runs them in this process."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from experiments.backend import Backend
from experiments.plan import Trial
from experiments.trial_runner import TrialRunner
from research_engine.engine.foreign import words_of

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Failure:
    """Why a trial left nothing: in a line, and with all that is known."""

    reason: str
    details: str = ""


class Events(Protocol):
    """What a launcher tells while it runs trials."""

    def progress(self, count: int, text: str) -> None:
        """Requests, or runs of a kernel, that have ended since the last word, and what goes on."""

    def note(self, text: str) -> None:
        """Something the user should know."""

    def finished(self, trial: Trial, summary: dict[str, Any]) -> None:
        """The trial's directory is complete."""

    def failed(self, trial: Trial, failure: Failure) -> None:
        """The trial left nothing."""


class Launcher(Protocol):
    """Runs trials.

    Raises (both):
        OSError: there is no space left; going on would only lose more.
        KeyboardInterrupt: after everything it started has been stopped.
    """

    def check(self, trials: Sequence[Trial], events: Events) -> None:
        """Look for mistakes of the user before anything runs; raises what `TrialRunner.check` raises."""

    def run(self, trials: Sequence[Trial], directory: Path, events: Events) -> None:
        """Every trial into `directory / "trials"`; each ends in `finished` or `failed`."""

    def close(self) -> None:
        """Stop what was started."""


def failure_of(error: BaseException) -> Failure:
    """Of an exception that a trial raised.

    Raises:
        OSError: if it is one that tells of a full disk.
    """
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        raise error
    return Failure(words_of(error).splitlines()[0], "".join(traceback.format_exception(error)))


class InTurn:
    """One trial after the other in this process, where a backend of the caller's is."""

    def __init__(self, backend: Backend | None = None) -> None:
        self._backend = backend
        self._runner: TrialRunner | None = None

    def _prepared(self, events: Events) -> TrialRunner:
        if self._runner is None:
            self._runner = TrialRunner(self._backend, on_progress=events.progress, on_note=events.note)
        return self._runner

    def check(self, trials: Sequence[Trial], events: Events) -> None:
        """See `Launcher`."""
        self._prepared(events).check(trials)

    def run(self, trials: Sequence[Trial], directory: Path, events: Events) -> None:
        """See `Launcher`."""
        runner = self._prepared(events)
        for trial in trials:
            try:
                summary = runner.run(trial, directory / "trials" / trial.directory_name)
            except Exception as error:
                events.failed(trial, failure_of(error))
            else:
                events.finished(trial, summary)

    def close(self) -> None:
        """Nothing was started."""
