"""GGUF files load exactly or are refused by name: permutation, types, truncation, corruption, wrong tensors."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from research_engine.loading import LoadError, load_config, load_model, resolve_model
from research_engine.loading.gguf import GgufCheckpoint, GgufFile
from research_engine.loading.matching import match_tensors
from research_engine.models.config import RopeScaling
from research_engine.models.decoder import Decoder
from tests.loading.gguf_files import metadata_of, tensors_of, write_gguf
from tests.models.paged_run import PagedRun
from tests.models.tiny_llama import make_reference


def load(path: Path) -> Any:
    return load_model(resolve_model(str(path)), dtype=torch.float32, device="cpu", progress=False)


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_reference(num_hidden_layers=2)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, reference: Any) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", tensors_of(reference), metadata_of(reference))


@pytest.mark.parametrize("tied", [False, True])
def test_a_converted_model_gives_the_logits_of_the_original(tied: bool, tmp_path: Path) -> None:
    original = make_reference(tie_word_embeddings=tied, attention_bias=False)
    path = write_gguf(tmp_path / "m.gguf", tensors_of(original), metadata_of(original))
    assert load_config(resolve_model(str(path))).tie_word_embeddings == tied
    ids = list(range(3, 40))
    logits = PagedRun(load(path), 1, 48).step([ids])[0]
    torch.testing.assert_close(logits, reference_logits(original, ids), rtol=1e-4, atol=1e-4)


def test_mixed_types_load_as_the_gguf_package_reads_them(tmp_path: Path, reference: Any) -> None:
    kinds = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "attn_output": "F16", "token_embd": "BF16"}

    def kind(name: str) -> str:
        return next((kinds[part] for part in name.split(".") if part in kinds), "F32")

    tensors = tensors_of(reference)
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata_of(reference), kind)
    # the same weights, rounded to their formats by the package, put back into transformers' model
    rounded = make_reference(num_hidden_layers=2)
    state = rounded.state_dict()
    checkpoint = GgufCheckpoint(GgufFile(path))
    for name, weight in state.items():
        stored = gguf.GGMLQuantizationType[kind(_gguf(name))]
        package = gguf.dequantize(gguf.quantize(tensors[_gguf(name)], stored), stored).reshape(weight.shape)
        heads = {"q_proj": 6, "k_proj": 2}.get(name.split(".")[-2])
        if heads:  # transformers' own way back
            package = package.reshape(heads, weight.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
        weight.copy_(torch.from_numpy(package.copy()))
        assert torch.equal(checkpoint.read(name, torch.device("cpu")), weight)
    ids = list(range(50, 80))
    logits = PagedRun(load(path), 1, 48).step([ids])[0]
    torch.testing.assert_close(logits, reference_logits(rounded, ids), rtol=1e-4, atol=1e-4)


def _gguf(name: str) -> str:
    from tests.loading.gguf_files import gguf_name

    return gguf_name(name)


def test_rotary_factors_in_the_file_are_used(tmp_path: Path, reference: Any) -> None:
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    tensors = {**tensors_of(reference), "rope_freqs.weight": factors}
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", tensors, metadata_of(reference))))
    rope = load_config(source).rope
    assert rope is not None and rope.scaling == RopeScaling("factors", factors=tuple(factors.tolist()))
    assert load(source.location).config.rope == rope


Change = Callable[[dict[str, np.ndarray], dict[str, Any]], None]


def drop(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    del tensors["blk.1.ffn_up.weight"]


def drop_many(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    for name in [n for n in tensors if n.startswith("blk.1.")]:
        del tensors[name]


def add(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    tensors["blk.0.attn_q_norm.weight"] = np.ones(32, dtype=np.float32)


def add_layer(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    tensors["blk.7.attn_norm.weight"] = np.ones(96, dtype=np.float32)


def add_bias(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    tensors["blk.0.attn_q.bias"] = np.ones(192, dtype=np.float32)


def reshape(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    tensors["blk.0.ffn_down.weight"] = tensors["blk.0.ffn_down.weight"].T.copy()


def poison(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    tensors["blk.1.attn_v.weight"][3, 5] = np.nan


def lose_key(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    del metadata["llama.block_count"]


def wrong_heads(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    metadata["llama.attention.head_count_kv"] = 4


def per_layer_heads(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    metadata["llama.attention.head_count_kv"] = [2, 1]


def unknown_scaling(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    metadata["llama.rope.scaling.type"] = "longer"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop, r"missing tensor model\.layers\.1\.mlp\.up_proj\.weight$"),
        (drop_many, r"missing tensors model\.layers\.1\..* and 4 more"),
        (add, r"unexpected tensor model\.layers\.0\.self_attn\.q_norm\.weight"),
        (add_layer, r"unexpected tensor model\.layers\.7\.input_layernorm\.weight"),
        (add_bias, r"unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
        (reshape, r"'model\.layers\.0\.mlp\.down_proj\.weight' has the shape \[160, 96\], .* \[96, 160\]"),
        (poison, r"'model\.layers\.1\.self_attn\.v_proj\.weight' holds values that are not finite"),
        (lose_key, r"lacks 'llama\.block_count'"),
        (wrong_heads, r"multiple of num_kv_heads, got 6 and 4"),
        (per_layer_heads, r"num_kv_heads must be a positive integer, got \[2, 1\]"),
        (unknown_scaling, r"scaling\.type must be none, linear or yarn, got 'longer'"),
    ],
)
def test_what_does_not_fit_is_named(change: Change, named: str, tmp_path: Path, reference: Any) -> None:
    tensors = {name: weight.copy() for name, weight in tensors_of(reference).items()}
    metadata = metadata_of(reference)
    change(tensors, metadata)
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata)
    with pytest.raises(LoadError, match=named) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_an_unsupported_type_or_architecture_is_named(tmp_path: Path, reference: Any) -> None:
    path = write_gguf(
        tmp_path / "t.gguf", tensors_of(reference), metadata_of(reference), lambda n: "Q5_0" if "ffn_up" in n else "F32"
    )
    with pytest.raises(LoadError, match=r"'blk\.0\.ffn_up\.weight' has the unsupported type Q5_0; supported: .*Q4_K"):
        load(path)
    path = write_gguf(tmp_path / "a.gguf", {}, {}, architecture="mamba")
    with pytest.raises(LoadError, match="'mamba' is not supported; supported: llama, qwen2"):
        load_config(resolve_model(str(path)))


@pytest.mark.parametrize("keep", [0, 3, 4, 10, 23, 24, 60, 400, 1500, 3000, 100_000, -1])
def test_a_file_cut_anywhere_is_refused(keep: int, small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: keep if keep >= 0 else len(data) - 70])
    with pytest.raises(LoadError, match=r"truncated|not a GGUF file|cannot be read"):
        load(cut)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_refused_or_still_means_the_same_kind_of_file(
    data: st.DataObject, small: Path, tmp_path: Path
) -> None:
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 2400))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(raw)
    source = resolve_model(str(damaged))
    with contextlib.suppress(LoadError):  # anything else, or a hang, fails the test
        config, checkpoint = load_config(source), GgufCheckpoint(GgufFile(damaged))
        match_tensors(checkpoint, Decoder(config, dtype=torch.float32, device="meta"))
        for name in checkpoint.shapes():
            checkpoint.read(name, torch.device("cpu"))


def test_overlapping_and_repeated_tensors_are_refused(small: Path, tmp_path: Path) -> None:
    raw = bytearray(small.read_bytes())
    second = raw.index(b"blk.0.attn_k.weight")
    offset_at = second + len("blk.0.attn_k.weight") + 4 + 2 * 8 + 4
    struct.pack_into("<Q", raw, offset_at, 0)
    path = tmp_path / "o.gguf"
    path.write_bytes(raw)
    with pytest.raises(LoadError, match="overlap"):
        load(path)
    raw = bytearray(small.read_bytes())
    raw[second : second + len("blk.0.attn_k.weight")] = b"blk.0.attn_q.weight"
    path.write_bytes(raw)
    with pytest.raises(LoadError, match=r"'blk\.0\.attn_q\.weight' appears twice"):
        load(path)


def test_a_text_file_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<!DOCTYPE html>")
    with pytest.raises(LoadError, match="does not begin with the letters GGUF"):
        load(path)
