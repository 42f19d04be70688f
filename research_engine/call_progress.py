"""What a long call shows while it runs, and how Ctrl-C ends it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(total: int, *, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields advance(prompts_ended, tokens_drawn)."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[rate]:.0f} tok/s"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), disable=not enabled) as bar:
        task, tokens = bar.add_task("prompts", total=total, rate=0.0), 0

        def advance(ended: int, drawn: int) -> None:
            nonlocal tokens
            tokens += drawn
            bar.update(task, advance=ended, rate=tokens / max(bar.tasks[0].elapsed or 0.0, 1e-9))

        yield advance


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the yielded function is called, so that no step is torn; a second press acts at once.

    Where somebody else handles SIGINT, as asyncio.run does, and in other threads than the main one, it changes nothing.
    """
    pressed = False

    def remember(signum: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check  # someone else looks after signals
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
