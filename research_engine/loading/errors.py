"""The one error of everything that turns a model's name into a loaded model."""

from __future__ import annotations


class LoadError(ValueError):
    """A model could not be found, fetched or read; the message names the file, the tensor or the choices."""
