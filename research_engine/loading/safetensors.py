"""Reads a directory of safetensors files, one or many with an index, memory-mapped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from research_engine.loading.errors import LoadError, damaged
from research_engine.loading.shards import ShardedCheckpoint


class SafetensorsCheckpoint(ShardedCheckpoint):
    """Tensors of ``*.safetensors``. Raises as `ShardedCheckpoint` does."""

    SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

    def _open_file(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise damaged(path, f"truncated or corrupt: {error}") from error

    def _shapes_in(self, file: Any) -> Mapping[str, tuple[int, ...]]:
        names: list[str] = file.keys()
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}

    def _tensor(self, file: Any, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{self.location}: tensor {name!r} cannot be read: {error}") from error
        return tensor
