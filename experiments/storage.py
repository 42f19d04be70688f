"""Files of a run, written so that an interruption leaves the old state or the new one, never half of either."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_UNFINISHED = ".unfinished-"  # before the name of a file that is being written


class InUseError(Exception):
    """Another process writes to the same run directory."""


def write_text(path: Path, text: str) -> None:
    """Replace a file's contents in one move."""
    write_with(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """As JSON, keys as they come; numbers that are not finite become null."""
    write_text(path, json.dumps(_finite(value), indent=2, ensure_ascii=False) + "\n")


def write_with(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file beside `path`, of the same suffix, and move it there when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{_UNFINISHED}{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill; it appears under its name when the block ends without an exception, else not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_summary(directory: Path) -> dict[str, Any] | None:
    """A finished trial's summary; None when there is none, or a file that no trial wrote."""
    path = directory / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(summary, dict) and "kind" in summary and isinstance(summary.get("metrics"), dict)
    return summary if ours else None


def read_timing(directory: Path) -> float | None:
    """Wall seconds that a finished trial took; None where it does not say."""
    try:
        return float(json.loads((directory / "timing.json").read_text(encoding="utf-8"))["wall_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_environment(directory: Path) -> dict[str, Any] | None:
    """Under what a finished trial ran; None where it does not say."""
    try:
        facts = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Holds a run directory, made if need be, for this process alone, and clears what a killed one left unfinished.

    Raises:
        InUseError: another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(f"{directory}: another process runs there; wait for it, or choose another") from None
        except OSError:  # a file system without locks: nobody can tell whether another process is at work
            pass
        else:
            for left in directory.glob("trials/.*-seed*-*-*"):  # as new_directory names them
                shutil.rmtree(left, ignore_errors=True)
            for left in directory.glob(f"{_UNFINISHED}*"):
                left.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)
