"""Pickled weights load like safetensors, and a pickle that wants to run code is refused before anything of it runs."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from research_engine.loading import LoadError, load_model, resolve_model
from tests.models.paged_run import PagedRun
from tests.models.tiny_llama import make_reference, saved


def load(directory: Path) -> Any:
    return load_model(resolve_model(str(directory)), dtype=torch.float32, device="cpu", progress=False)


def as_bin(reference: Any, directory: Path, shards: int = 1, **options: Any) -> Path:
    """What transformers wrote before safetensors."""
    saved(reference, directory)
    (directory / "model.safetensors").unlink()
    state = {name: weight.clone() for name, weight in reference.state_dict().items()}
    if shards == 1:
        torch.save(state, directory / "pytorch_model.bin", **options)
        return directory
    placed = {name: f"pytorch_model-{i % shards:05}.bin" for i, name in enumerate(state)}
    for file in set(placed.values()):
        torch.save({name: state[name] for name in state if placed[name] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    return directory


@pytest.mark.parametrize(
    ("shards", "options"),
    [(1, {}), (3, {}), (1, {"_use_new_zipfile_serialization": False})],
    ids=["one", "many", "old"],
)
def test_pickled_weights_give_the_model_of_the_safetensors(
    shards: int, options: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_reference(num_hidden_layers=2)
    directory = as_bin(reference, tmp_path, shards, **options)
    assert resolve_model(str(directory)).format == "bin"
    ids = list(range(3, 40))
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(PagedRun(load(directory), 1, 48).step([ids])[0], expected, rtol=1e-4, atol=1e-4)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_wants_to_run_code_is_refused_unread(zipped: bool, tmp_path: Path) -> None:
    directory = as_bin(make_reference(num_hidden_layers=1), tmp_path)
    witness, path = tmp_path / "ran", directory / "pytorch_model.bin"
    if zipped:
        torch.save({"model.norm.weight": Evil(witness)}, path)
    else:
        path.write_bytes(pickle.dumps({"model.norm.weight": Evil(witness)}))
    with pytest.raises(LoadError, match=r"pytorch_model\.bin: refused: the pickle .* can run any code"):
        load(directory)
    assert not witness.exists()


@pytest.mark.parametrize("keep", [0, 1, 100, 5000, -100])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    path = as_bin(make_reference(num_hidden_layers=1), tmp_path) / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LoadError, match=r"pytorch_model\.bin: (truncated or corrupt|refused)"):
        load(tmp_path)


def test_what_is_no_table_of_tensors_is_named(tmp_path: Path) -> None:
    directory = as_bin(make_reference(num_hidden_layers=1), tmp_path)
    torch.save({"epoch": 3, "model": {}}, directory / "pytorch_model.bin")
    with pytest.raises(LoadError, match="holds no table of tensors by name"):
        load(directory)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = as_bin(make_reference(num_hidden_layers=1), tmp_path, shards=2)
    (directory / "pytorch_model-00001.bin").unlink()
    with pytest.raises(LoadError, match=r"pytorch_model-00001\.bin: missing, although pytorch_model\.bin\.index\.json"):
        load(directory)
