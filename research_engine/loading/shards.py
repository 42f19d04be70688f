"""Weights in one file or in several with an index, whatever the format: which files there are, and what they hold."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from research_engine.loading.errors import LoadError
from research_engine.loading.pinned import PinnedCopies


class ShardedCheckpoint(ABC):
    """The tensors of a Hugging Face model directory. One file is open at a time, so that reading in the order of
    ``shapes()`` holds no more than one file's pages.

    Raises:
        LoadError: no weights, a shard that the index names is missing, or a file is truncated or corrupt, or index and
            shards disagree.
    """

    SINGLE: str  # name of the file of a model in one piece
    INDEX: str

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._paths: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open: tuple[Path, Any] | None = None
        self._to_device = PinnedCopies()
        index = directory / self.INDEX
        placed = _read_index(index) if index.exists() else None
        names = [self._single().name] if placed is None else sorted(set(placed.values()))
        for path in [directory / name for name in names]:
            if not path.exists():
                raise LoadError(f"{path}: missing, although {self.INDEX} names it; fetch the model again")
            for name, shape in self._shapes_in(self._opened(path)).items():
                if placed is not None and placed.get(name) != path.name:
                    raise LoadError(
                        f"{path}: holds tensor {name!r}, which {self.INDEX} places in {placed.get(name, 'no file')}"
                    )
                self._paths[name], self._shapes[name] = path, shape
        absent = sorted(set(placed or ()) - set(self._paths))
        if absent and placed is not None:
            raise LoadError(
                f"{directory / placed[absent[0]]}: lacks tensor {absent[0]!r}, which {self.INDEX} places there"
            )

    @property
    def location(self) -> str:
        """The directory."""
        return str(self._directory)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of every shard, file by file."""
        return self._shapes

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """One tensor in its stored dtype; on the CPU a view of the file.

        Raises:
            LoadError: it cannot be read, or holds no floats.
        """
        tensor = self.read_raw(name, device)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise LoadError(
                f"{self.location}: tensor {name!r} has the dtype {tensor.dtype}; weights must be floats, or described "
                "by quantization_config"
            )
        return tensor

    def read_raw(self, name: str, device: torch.device) -> torch.Tensor:
        """One tensor of any dtype.

        Raises:
            LoadError: it cannot be read.
        """
        return self._to_device(self._tensor(self._opened(self._paths[name]), name), device)

    def _opened(self, path: Path) -> Any:
        """The file's content; mutates: the file that was open before is closed."""
        if self._open is None or self._open[0] != path:
            self._open = None
            self._open = (path, self._open_file(path))
        return self._open[1]

    def _single(self) -> Path:
        """The one weights file of a directory without an index."""
        if (self._directory / self.SINGLE).exists():
            return self._directory / self.SINGLE
        pattern = f"*{Path(self.SINGLE).suffix}"
        found = sorted(self._directory.glob(pattern))
        if len(found) != 1:
            listed = ", ".join(path.name for path in found) or "none"
            raise LoadError(
                f"{self._directory}: needs {self.SINGLE}, {self.INDEX} or exactly one {pattern} file; "
                f"there are: {listed}"
            )
        return found[0]

    @abstractmethod
    def _open_file(self, path: Path) -> Any:
        """A memory-mapped file; LoadError if it is truncated, corrupt or dangerous."""

    @abstractmethod
    def _shapes_in(self, file: Any) -> Mapping[str, tuple[int, ...]]:
        """What an open file holds."""

    @abstractmethod
    def _tensor(self, file: Any, name: str) -> torch.Tensor:
        """One tensor of an open file."""


def _read_index(path: Path) -> dict[str, str]:
    try:
        placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(name, str) and name == Path(name).name for name in placed.values()):
            raise TypeError("weight_map must map tensor names to file names in the same directory")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path}: corrupt: {error!r}") from error
    return placed
