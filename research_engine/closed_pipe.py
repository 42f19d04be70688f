"""A program whose output nobody reads any more, as under `| head`, ends quietly with the status SIGPIPE would give.

SIGPIPE itself stays ignored, as Python's documentation asks: a server must outlive a client that hangs up.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

CODE = 128 + 13  # what a shell reports of a program that SIGPIPE (13) ended


def ending_quietly(main: Callable[[], int]) -> int:
    """The exit code of `main`, or 141 when the reader of standard output or standard error has gone away.

    A pipe that breaks elsewhere, such as one to a worker process, is raised as ever.
    """
    try:
        try:
            code = main()
        finally:  # here rather than at the interpreter's end, where it could not be caught; --help leaves by SystemExit
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        by_rich = isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
        left = [stream for stream in (sys.stdout, sys.stderr) if _reader_left(stream)]
        if not by_rich and not (left and isinstance(error, BrokenPipeError)):
            raise
        for stream in left:
            _silence(stream)
        return CODE
    return code


def _reader_left(stream: TextIO) -> bool:
    try:
        number = stream.fileno()
    except (io.UnsupportedOperation, ValueError):  # no file behind it, or closed
        return False
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _silence(stream: TextIO) -> None:
    """What is still buffered goes nowhere, without an error at the interpreter's end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
