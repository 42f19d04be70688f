"""Safetensors directories load whole or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from research_engine.loading import LoadError, load_config, load_model, resolve_model
from tests.models.tiny_llama import make_reference, saved

SINGLE = "model.safetensors"


def load(directory: Path) -> Any:
    return load_model(resolve_model(str(directory)), dtype=torch.float32, device="cpu", progress=False)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return saved(make_reference(num_hidden_layers=2), tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return saved(make_reference(num_hidden_layers=2), tmp_path, max_shard_size="100KB")


def edit(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(directory / SINGLE), **change}
    save_file({name: t for name, t in tensors.items() if t is not None}, directory / SINGLE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.norm.weight": None}, r"missing tensor model\.norm\.weight$"),
        (
            {"model.layers.0.self_attn.q_norm.weight": torch.ones(32)},
            r"unexpected tensor .*0\.self_attn\.q_norm\.weight",
        ),
        ({"model.norm.weight": torch.ones(95)}, r"'model\.norm\.weight' has the shape \[95\], .* \[96\]"),
        (
            {"model.norm.weight": torch.full((96,), float("inf"))},
            r"'model\.norm\.weight' holds values that are not finite",
        ),
        ({"model.norm.weight": torch.ones(96, dtype=torch.int32)}, r"'model\.norm\.weight' has the dtype torch\.int32"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor | None], named: str, single: Path) -> None:
    edit(single, change)
    with pytest.raises(LoadError, match=named):
        load(single)


def test_progress_leaves_nothing_behind_where_there_is_no_terminal(
    single: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_model(resolve_model(str(single)), dtype=torch.float32, device="cpu", progress=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("keep", [0, 5, 100, 2000, -1])
def test_a_truncated_file_is_named(keep: int, single: Path) -> None:
    data = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(data[: keep if keep >= 0 else len(data) - 1])
    with pytest.raises(LoadError, match=r"model\.safetensors: truncated or corrupt"):
        load(single)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(LoadError, match=f"{gone.name}: missing, although"):
        load(sharded)


def test_index_and_shards_must_agree(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    written = json.loads(index.read_text())
    homes = list(written["weight_map"].values())
    moved = next(name for name, file in written["weight_map"].items() if homes.count(file) > 1)
    home = written["weight_map"].pop(moved)
    index.write_text(json.dumps(written))
    with pytest.raises(LoadError, match=rf"{home}: holds tensor '{moved}', which .* places in no file"):
        load(sharded)
    written["weight_map"] |= {moved: home, "extra": home}
    index.write_text(json.dumps(written))
    with pytest.raises(LoadError, match=f"{home}: lacks tensor 'extra'"):
        load(sharded)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}'])
def test_a_corrupt_index_is_named(text: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LoadError, match=r"index\.json: corrupt"):
        load(sharded)


def test_a_stored_copy_of_what_follows_from_the_rest_must_agree(tmp_path: Path) -> None:
    directory = saved(make_reference(num_hidden_layers=1, tie_word_embeddings=True), tmp_path)
    embedding = load_file(directory / SINGLE)["model.embed_tokens.weight"]
    frequencies = 10000.0 ** -(torch.arange(0, 32, 2).float() / 32)
    edit(directory, {"lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": frequencies})
    load(directory)
    edit(directory, {"lm_head.weight": embedding + 1})
    with pytest.raises(LoadError, match=r"'lm_head\.weight' contradicts"):
        load(directory)


def test_a_config_that_is_no_json_or_names_another_model_is_refused(single: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForTalking"]}))
    with pytest.raises(
        LoadError, match=r"'LlamaForTalking' is not supported; .* first: LlamaForCausalLM, .*transformers"
    ):
        load(single)
    (single / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(LoadError, match=r"config\.json: cannot be read"):
        load_config(resolve_model(str(single)))
