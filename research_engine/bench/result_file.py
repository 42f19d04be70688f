"""Files of results: their place is tried before anything is measured, and what was measured is never lost."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

_TRIED = bytes(65536)  # a directory can take a name and yet no data


def check_place(path: Path, option: str) -> None:
    """Try to write beside a file that is to be written later; makes the directories that it needs.

    Args:
        option: what the message calls the path.

    Raises:
        ValueError: it is a directory, or nothing can be written there.
    """
    if path.is_dir():
        raise ValueError(f"{option} = {str(path)!r}: is a directory; it must be a file")
    if path.exists() and not path.is_file():  # a device is written into
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(_TRIED)
    except OSError as error:
        raise ValueError(f"{option} = {str(path)!r}: cannot be written: {error}") from None


def save(path: Path, text: str) -> bool:
    """Write a result; says whether that went well.

    If not, it is written to the directory for temporary files, or else printed, and standard error says so.
    """
    try:
        write_text(path, text)
        return True
    except OSError as error:
        rescue(path, text, error)
        return False


def rescue(path: Path, text: str, error: Exception) -> None:
    """What `save` does when it fails."""
    try:
        handle, name = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=path.suffix)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        where = f"it is in {name}"
    except OSError:
        print(text, end="")
        where = "it is printed above"
    print(f"the result is not saved in {path}: {error}; {where}", file=sys.stderr)


def write_text(path: Path, text: str) -> None:
    """Replace a file in one move, so that it is the old one or the new one and never a part."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """As `write_text`, through symbolic links; what is there and is no regular file, a device say, is written into."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(mode)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
