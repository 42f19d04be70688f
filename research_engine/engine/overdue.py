"""Ends a call of a policy that does not come back, so that its run ends with an error instead of never."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine

_SIGNAL = getattr(signal, "SIGRTMIN", None)  # where the system has none, nothing is watched
_LOOKS = 8  # at a call, over the time that it may take


class Overdue(BaseException):
    """Raised in the midst of a policy's call; no Exception, for a policy that catches those would catch it, too."""

    def where(self, module: str) -> str:
        """File, line and function that it ended: the innermost of the policy's module, else the innermost of all."""
        places = _places(self)
        own = [place for name, place in places if name == module]
        others = [place for name, place in places if name != __name__]  # that is the signal's handler
        return (own or others or [""])[-1]


def where_in(error: BaseException, module: str) -> str | None:
    """File, line and function of the innermost frame that an error passed in a module; None where it passed none."""
    own = [place for name, place in _places(error) if name == module]
    return own[-1] if own else None


def _places(error: BaseException) -> list[tuple[str | None, str]]:
    """Module, and file, line and function, of each frame of an error's traceback, innermost last."""
    return [
        (frame.f_globals.get("__name__"), f"{frame.f_code.co_filename}:{line}, {frame.f_code.co_name}")
        for frame, line in walk_tb(error.__traceback__)
    ]


@contextmanager
def overdue_calls_end(engine: Engine) -> Iterator[None]:
    """Within it, a call of the engine's policy that takes longer than its patience gets `Overdue` raised in its midst.

    A thread looks from time to time, and signals the main thread when it sees the same call too often. Looks count, not
    seconds: a machine that slept is not blamed on the policy. The signal also ends a sleep and a wait for a lock, but
    no single operation of C code. A call that catches it and goes on gets it again each time its patience has passed.
    In other threads than the main one, where no signal arrives, nothing is watched.
    """
    policy, main = engine._policy, threading.main_thread()
    if _SIGNAL is None or threading.current_thread() is not main or policy.patience == math.inf:
        yield
        return
    stop, overdue = threading.Event(), 0

    def end_call(signum: int, frame: Any) -> None:
        if policy.is_called and policy.calls == overdue:  # it may have come back since the last look
            raise Overdue

    def watch() -> None:
        nonlocal overdue
        seen = looks = 0
        while not stop.wait(policy.patience / _LOOKS):
            looks = looks + 1 if policy.is_called and policy.calls == seen else 0
            seen = policy.calls
            if looks > _LOOKS:  # the call may have begun just before the first of them
                looks, overdue = 0, seen
                signal.pthread_kill(main.ident or 0, _SIGNAL)

    before = signal.signal(_SIGNAL, end_call)
    watcher = threading.Thread(target=watch, name="overdue calls", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        signal.signal(_SIGNAL, before)
