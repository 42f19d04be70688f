"""Reads a directory of torch's pickled weights (`pytorch_model.bin`), one or many with an index, running no code.

torch's restricted unpickler builds tensors and plain containers alone; a file that names anything else is refused
before anything of it runs. Files in torch's zip format are memory-mapped; the format before that (2020) is not, and a
file of it is held in memory while it is read.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from research_engine.loading.errors import LoadError, damaged
from research_engine.loading.shards import ShardedCheckpoint


class TorchBinCheckpoint(ShardedCheckpoint):
    """Tensors of ``*.bin``. Raises as `ShardedCheckpoint` does, and LoadError for a pickle that wants to run code."""

    SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

    def _open_file(self, path: Path) -> Any:
        return open_pickle(path)

    def _shapes_in(self, file: Any) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in file.items()}

    def _tensor(self, file: Any, name: str) -> torch.Tensor:
        tensor: torch.Tensor = file[name]
        return tensor


def open_pickle(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of one file by name, memory-mapped where its format allows.

    Raises:
        LoadError: truncated or corrupt, no table of tensors, or a pickle that wants to run code.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"wants {wanted[1]}, which is not part of any weights" if wanted else "is no plain table of tensors"
        rule = "a pickle can run any code when it is read, so it is not read. Get the model as safetensors"
        raise damaged(path, f"refused: the pickle {what}; {rule}") from error
    except Exception as error:  # torch raises RuntimeError, EOFError, struct's and zip's own errors alike
        raise damaged(path, f"truncated or corrupt: {error}") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise LoadError(f"{path}: holds no table of tensors by name; a checkpoint of a training run is no model")
    return state
