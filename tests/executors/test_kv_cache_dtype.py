"""A quantised KV cache in the engine: a byte an element, scales of the checkpoint or measured, results stay near."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from research_engine import LLM, SamplingParams, kernels
from research_engine.executors.kv_scales import kv_scales, measured_kv_scales
from research_engine.llm import LoadedModel, build_engine, load
from research_engine.loading import LoadError, load_model, resolve_model
from research_engine.options import EngineOptions, OptionError
from tests.loading.quantizers import quantize_model
from tests.models.tiny_models import make_model

FLOAT8 = torch.float8_e4m3fn
PROMPT = [5, *range(40, 99)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(EngineOptions("dummy:tiny", device="cpu"), progress=False)


def prompt_logprobs(**options: Any) -> torch.Tensor:
    """Of a prompt computed in chunks of 16, whose later tokens attend to the cache."""
    llm = LLM("dummy:tiny", device="cpu", num_blocks=20, max_num_batched_tokens=16, **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return torch.tensor([entry[t].logprob for entry, t in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)])


def test_log_probabilities_stay_near_those_of_a_float_cache() -> None:
    exact = prompt_logprobs()
    for name, allowed in (("fp8", 0.1), ("int8", 0.03)):
        error = (prompt_logprobs(kv_cache_dtype=name) - exact).abs().max()
        assert 0 < error < allowed, f"{name}: {error}"


@pytest.mark.parametrize(("name", "dtype"), [("fp8", FLOAT8), ("fp8_e4m3", FLOAT8), ("int8", torch.int8)])
def test_a_block_takes_a_quarter_of_float32s(loaded: LoadedModel, name: str, dtype: torch.dtype) -> None:
    sizes = {}
    for kind in ("auto", name):
        options = EngineOptions("dummy:tiny", kv_cache_dtype=kind, kv_cache_memory=2**-10, max_num_seqs=64)
        engine = build_engine(options, loaded)
        sizes[kind] = engine.executor.kv_cache.shape[2]
        assert engine.executor.kv_cache.dtype == (dtype if kind == name else torch.float32)
        assert engine.executor.host_cache.dtype == engine.executor.kv_cache.dtype
    assert sizes[name] == 4 * sizes["auto"]


def test_scales_of_an_int8_cache_are_measured_for_every_head(loaded: LoadedModel) -> None:
    scales = measured_kv_scales(loaded.model)
    assert scales.shape == (2, 2, 2) and scales.dtype == torch.float32
    assert bool((scales > 0).all()) and scales.flatten().unique().numel() == 8
    assert torch.equal(scales, measured_kv_scales(loaded.model)), "two measurements differ"


def test_k29_measured_scales_cover_every_written_value(loaded: LoadedModel, device: str) -> None:
    """Each head's largest key and value of the measuring run, wherever in it, becomes 127 / 1.5: none is saturated."""
    model = load(EngineOptions("dummy:tiny", device=device), progress=False).model if device == "cuda" else loaded.model
    written = []

    class Watched:
        config, dtype, device, kv_scales = model.config, model.dtype, model.device, None

        def forward(self, token_ids, positions, attention):
            written.append(attention.kv_cache)
            return model.forward(token_ids, positions, attention)

    scales = measured_kv_scales(Watched())
    (kv,) = written  # [L, 2, 1, Hkv, tokens, D]
    codes = torch.zeros(kv.shape, dtype=torch.int8, device=device)
    slots = torch.arange(kv.shape[4], device=device)
    for layer, (keys, values) in enumerate(kv[:, :, 0].transpose(2, 3)):
        names = dict(zip(("key_scale", "value_scale"), scales[layer], strict=True))
        kernels.reshape_and_cache(keys, values, codes[layer, 0], codes[layer, 1], slots, check_values=True, **names)
    assert (codes.int().abs().amax(dim=(2, 4, 5)) == 85).all()


def test_a_float8_cache_without_scales_in_the_checkpoint_has_scales_of_one(loaded: LoadedModel) -> None:
    assert kv_scales(loaded.model, FLOAT8) is None
    assert kv_scales(loaded.model, torch.float32) is None


def fp8_checkpoint(directory: Path, scales: dict[str, torch.Tensor]) -> Any:
    config = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    model = make_model(("Llama", {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}))
    quantize_model(model, directory, "fp8-tensor", config)
    save_file({**load_file(directory / "model.safetensors"), **scales}, directory / "model.safetensors")
    return load_model(resolve_model(str(directory)), dtype=torch.float32, device="cpu", progress=False)


@pytest.mark.parametrize("form", ["self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{}_proj.{}_scale"])
def test_scales_of_the_checkpoint_are_taken(form: str, tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.{form.format(which, which)}" for layer in (0, 1) for which in "kv"]
    model = fp8_checkpoint(tmp_path, {name: torch.tensor([0.5 + i]) for i, name in enumerate(names)})
    scales = kv_scales(model, FLOAT8)
    assert scales is not None and scales[:, :, 0].tolist() == [[0.5, 1.5], [2.5, 3.5]]
    assert scales.shape == (2, 2, 2)


def test_scales_that_make_no_sense_are_named(tmp_path: Path) -> None:
    good = {f"model.layers.{n}.self_attn.{which}_scale": torch.tensor(1.0) for n in (0, 1) for which in "kv"}
    name = "model.layers.1.self_attn.v_scale"
    with pytest.raises(LoadError, match=f"{name}' must be one positive number, got .-1"):
        fp8_checkpoint(tmp_path / "a", {**good, name: torch.tensor(-1.0)})
    del good[name]
    with pytest.raises(LoadError, match="none for layer 1"):
        fp8_checkpoint(tmp_path / "b", good)


def test_an_unknown_cache_dtype_is_named() -> None:
    with pytest.raises(OptionError, match="kv_cache_dtype = 'fp4': must be one of fp8, "):
        EngineOptions("dummy:tiny", kv_cache_dtype="fp4")
    with pytest.raises(OptionError, match="weight_packing = 'pack': must be one of packed, "):
        EngineOptions("dummy:tiny", weight_packing="pack")
