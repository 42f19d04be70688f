"""The one error of everything that turns a model's name into a loaded model."""

from __future__ import annotations

from pathlib import Path

_POINTER = b"version https://git-lfs"


class LoadError(ValueError):
    """A model could not be found, fetched or read; the message names the file, the tensor or the choices."""


def damaged(path: Path, fault: object) -> LoadError:
    """Why a file of weights cannot be read: it is a pointer that a clone without Git LFS left, or what `fault` says."""
    try:
        with path.open("rb") as file:
            pointer = file.read(len(_POINTER)) == _POINTER
    except OSError:
        pointer = False
    if pointer:
        return LoadError(f"{path}: is a pointer of Git LFS in place of the file: run `git lfs pull` in {path.parent}")
    return LoadError(f"{path}: {fault}")
