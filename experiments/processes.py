"""Trials in processes of their own, one or several at once: a trial that kills its process is a hole and no more."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from experiments.launcher import NO_SPACE, Events, Failure, failure_of
from experiments.plan import Trial
from experiments.trial_runner import TrialRunner
from research_engine.other_load import usable_cores

_GRACE = 5.0  # seconds that a process has to end after it was asked to


class Processes:
    """See `Launcher`. A process runs trials until one of them kills it; then another one takes its place.

    Args:
        jobs: processes at once.
    """

    def __init__(self, jobs: int = 1) -> None:
        self._jobs = jobs
        self._workers: list[_Worker] = []

    def check(self, trials: Sequence[Trial], events: Events) -> None:
        """See `Launcher`. In the first process, which keeps the model that it loads."""
        worker = self._worker(0)
        worker.connection.send(("check", list(trials)))
        while True:
            kind, *content = worker.receive()
            if kind == "checked":
                return
            if kind == "died":
                raise ChildProcessError(f"the process that checks the trials {worker.end()}")
            if kind == "refused":
                raise content[0]
            _pass_on(kind, content, events)

    def run(self, trials: Sequence[Trial], directory: Path, events: Events) -> None:
        """See `Launcher`."""
        waiting = deque(trials)
        for index in range(min(self._jobs, len(waiting))):
            self._worker(index).start(waiting.popleft(), directory)
        while busy := [worker for worker in self._workers if worker.trial is not None]:
            ready = wait([worker.connection for worker in busy])
            for worker in (worker for worker in busy if worker.connection in ready):
                kind, *content = worker.receive()
                trial = worker.trial
                assert trial is not None
                if kind == "finished":
                    events.finished(trial, content[0])
                elif kind == "failed":
                    events.failed(trial, content[0])
                elif kind == "no space":
                    raise content[0]
                elif kind == "died":
                    events.failed(trial, Failure(f"its process {worker.end()}"))
                else:
                    _pass_on(kind, content, events)
                    continue
                worker.trial = None
                if waiting:
                    self._worker(self._workers.index(worker)).start(waiting.popleft(), directory)

    def close(self) -> None:
        """Ends the processes, in the middle of a trial if need be."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def _worker(self, index: int) -> _Worker:
        """A living one at this place."""
        if index == len(self._workers):
            self._workers.append(_Worker.spawn(self._jobs))
        elif not self._workers[index].process.is_alive():
            self._workers[index].stop()
            self._workers[index] = _Worker.spawn(self._jobs)
        return self._workers[index]


@dataclass
class _Worker:
    """A process and the line to it; `trial` is what it runs."""

    process: BaseProcess
    connection: Connection
    trial: Trial | None = None

    @classmethod
    def spawn(cls, jobs: int) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        threads = max(1, usable_cores() // jobs) if jobs > 1 else None
        process = context.Process(target=_work, args=(theirs, threads), daemon=True)
        # Ctrl-C is the parent's affair from the process's first moment on; one that comes meanwhile waits here
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that the line breaks when the process dies
        return cls(process, ours)

    def start(self, trial: Trial, directory: Path) -> None:
        self.trial = trial
        with suppress(BrokenPipeError, ConnectionResetError):  # it has just died; the broken line will tell
            self.connection.send(("run", trial, directory))

    def receive(self) -> tuple[Any, ...]:
        try:
            message: tuple[Any, ...] = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return ("died",)
        return message

    def end(self) -> str:
        """How the process died, in words."""
        self.process.join(_GRACE)
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"ended with code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        why = " (memory may have run out)" if name == "SIGKILL" else ""
        return f"was killed by {name}{why}"

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(_GRACE)
            if self.process.is_alive():
                self.process.kill()
        self.process.join()
        self.connection.close()


def _pass_on(kind: str, content: list[Any], events: Events) -> None:
    if kind == "progress":
        events.progress(*content)
    elif kind == "note":
        events.note(*content)


def _work(connection: Connection, threads: int | None) -> None:
    """The process: answers until the line breaks. Ctrl-C is the parent's affair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if threads is not None:  # before torch and the kernels read it
        os.environ["OMP_NUM_THREADS"] = str(threads)

    def tell(kind: str) -> Callable[..., None]:
        return lambda *content: connection.send((kind, *content))

    runner = TrialRunner(on_progress=tell("progress"), on_note=tell("note"))
    while True:
        try:
            kind, *content = connection.recv()
        except (EOFError, ConnectionResetError):  # the parent has ended, perhaps in the middle of a message
            return
        try:
            if kind == "check":
                connection.send(_checked(runner, content[0]))
            else:
                connection.send(_run(runner, *content))
        except (BrokenPipeError, ConnectionResetError):
            return


def _checked(runner: TrialRunner, trials: list[Trial]) -> tuple[Any, ...]:
    try:
        runner.check(trials)
    except Exception as error:
        return ("refused", _sendable(error))
    return ("checked",)


def _run(runner: TrialRunner, trial: Trial, directory: Path) -> tuple[Any, ...]:
    try:
        return ("finished", runner.run(trial, directory / "trials" / trial.directory_name))
    except OSError as error:
        return ("no space", error) if error.errno in NO_SPACE else ("failed", failure_of(error))
    except Exception as error:
        return ("failed", failure_of(error))


def _sendable(error: Exception) -> Exception:
    """The exception, if it comes out of a pickle as it went in; its text in a RuntimeError otherwise."""
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # whatever its constructor makes of what pickle gives it
        pass
    return RuntimeError("".join(traceback.format_exception(error)))
