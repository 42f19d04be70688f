"""Dummies have the shapes of the models they are named after, and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from research_engine.loading.dummy import DUMMY_MODELS, DummyCheckpoint, hf_config
from research_engine.loading.dummy_shapes import DUMMY_SHAPES
from research_engine.models.config import ModelConfig
from research_engine.models.decoder import Decoder
from tests.models.paged_run import PagedRun

SAID = {  # parameters in millions, as the models' makers give them
    "dummy:smollm2-135m": 135, "dummy:llama-2-7b": 6738, "dummy:llama-2-13b": 13016, "dummy:llama-3.1-8b": 8030,
    "dummy:llama-3.1-70b": 70554, "dummy:llama-3.2-1b": 1236, "dummy:llama-3.2-3b": 3213, "dummy:mistral-7b": 7242,
    "dummy:qwen2.5-0.5b": 494, "dummy:qwen2.5-7b": 7616, "dummy:qwen3-0.6b": 596, "dummy:qwen3-8b": 8191,
    "dummy:gemma-2-2b": 2614, "dummy:gemma-2-9b": 9242, "dummy:gemma-3-1b": 1000, "dummy:phi-3-mini": 3821,
    "dummy:gpt2": 124, "dummy:opt-125m": 125, "dummy:opt-1.3b": 1316, "dummy:opt-13b": 12853,
    "dummy:mixtral-8x7b": 46703, "dummy:qwen3-30b-a3b": 30532,
}  # fmt: skip


@pytest.mark.parametrize("name", DUMMY_SHAPES)
def test_the_file_that_other_engines_read_leads_to_the_models_own_class(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(name)))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    (architecture,) = read.architectures
    assert type(read) is getattr(transformers, architecture).config_class
    assert ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text())) == DUMMY_MODELS[name].config


@pytest.mark.parametrize("name", SAID)
def test_a_dummy_has_as_many_parameters_as_its_model(name: str) -> None:
    assert round(DUMMY_MODELS[name].config.num_parameters / 1e6) == SAID[name]


@pytest.mark.parametrize(
    "name",
    ["dummy:gpt2", "dummy:opt-125m", "dummy:gemma-3-1b", "dummy:qwen3-0.6b", "dummy:minilm-l6", "dummy:bge-m3"],
)
def test_tensors_are_those_of_transformers_own_class(name: str) -> None:
    shape: dict[str, Any] = dict(DUMMY_SHAPES[name])
    (architecture,) = shape.pop("architectures")
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        theirs = model_class(model_class.config_class(**shape)).state_dict()
    ours = DummyCheckpoint(name, DUMMY_MODELS[name].config, 0).shapes()
    theirs.pop("lm_head.weight", None)  # tied in all of these that have one
    theirs = {tensor: weight for tensor, weight in theirs.items() if not tensor.startswith("pooler.")}
    assert dict(ours) == {tensor: tuple(weight.shape) for tensor, weight in theirs.items()}


@pytest.mark.parametrize(
    "architecture", sorted({model.config.architecture for model in DUMMY_MODELS.values() if model.config.head})
)
def test_random_weights_keep_every_family_alive(architecture: str) -> None:
    """Logits are numbers of moderate size, and differ between prompts."""
    shape = next(dict(s) for s in DUMMY_SHAPES.values() if s["architectures"] == [architecture])
    small = {
        "vocab_size": 97, "hidden_size": 64, "n_embd": 64, "ffn_dim": 96, "intermediate_size": 96, "head_dim": 16,
        "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "n_positions": 64, "moe_intermediate_size": 32, "num_experts": 8,
        "num_local_experts": 4, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = ModelConfig.from_hf({**shape, **{key: value for key, value in small.items() if key in shape}})
    model = Decoder(config, dtype=torch.float32, device="cpu")
    checkpoint = DummyCheckpoint("dummy:small", config, 0)
    for name, view in model.parameters().items():
        view.copy_(checkpoint.read(name, torch.device("cpu")))
    model.prepare()
    one, two = PagedRun(model, 2, 32).step([[5, 6, 7], [8, 9, 10]])
    assert 0.05 < one.std() < 20
    assert (one - two).abs().max() > 0.1
