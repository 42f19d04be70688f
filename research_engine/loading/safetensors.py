"""Reads a directory of safetensors files, one or many with an index, memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from research_engine.loading.errors import LoadError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsCheckpoint:
    """The tensors of a Hugging Face model directory.

    Raises:
        LoadError: no weights, a shard that the index names is missing, or a file is truncated or corrupt, or index and
            shards disagree.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        index = directory / INDEX
        placed = _read_index(index) if index.exists() else None
        for path in (
            [_single(directory)] if placed is None else [directory / name for name in sorted(set(placed.values()))]
        ):
            if not path.exists():
                raise LoadError(f"{path}: missing, although {INDEX} names it; fetch the model again")
            try:
                file = safe_open(path, framework="pt")
                names = list(file.keys())
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            except (SafetensorError, OSError) as error:
                raise LoadError(f"{path}: truncated or corrupt: {error}") from error
            for name in names:
                if placed is not None and placed.get(name) != path.name:
                    raise LoadError(
                        f"{path}: holds tensor {name!r}, which {INDEX} places in {placed.get(name, 'no file')}"
                    )
            self._files |= dict.fromkeys(names, file)
            self._shapes |= shapes
        absent = sorted(set(placed or ()) - set(self._files))
        if absent and placed is not None:
            raise LoadError(f"{directory / placed[absent[0]]}: lacks tensor {absent[0]!r}, which {INDEX} places there")

    @property
    def location(self) -> str:
        """The directory."""
        return str(self._directory)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of every shard."""
        return self._shapes

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """One tensor in its stored dtype."""
        try:
            tensor = self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{self.location}: tensor {name!r} cannot be read: {error}") from error
        if not tensor.is_floating_point():
            raise LoadError(f"{self.location}: tensor {name!r} has the dtype {tensor.dtype}; weights must be floats")
        return tensor.to(device)


def _single(directory: Path) -> Path:
    """The one weights file of a directory without an index."""
    if (directory / SINGLE).exists():
        return directory / SINGLE
    found = sorted(directory.glob("*.safetensors"))
    if len(found) != 1:
        listed = ", ".join(path.name for path in found) or "none"
        raise LoadError(f"{directory}: needs {SINGLE}, {INDEX} or exactly one *.safetensors file; there are: {listed}")
    return found[0]


def _read_index(path: Path) -> dict[str, str]:
    try:
        placed = json.loads(path.read_text())["weight_map"]
        if not all(isinstance(name, str) and name == Path(name).name for name in placed.values()):
            raise TypeError("weight_map must map tensor names to file names in the same directory")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path}: corrupt: {error!r}") from error
    return placed
