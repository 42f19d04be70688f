"""What a model's configuration accepts, and what its errors name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from research_engine.layers.rotary import cos_sin_table, inverse_frequencies
from research_engine.loading.dummy import DUMMY_MODELS
from research_engine.models.config import ConfigError, ModelConfig, RopeScaling
from research_engine.models.registry import model_class
from tests.models.tiny_llama import BASE, make_reference

HF: dict[str, Any] = {**BASE, "architectures": ["LlamaForCausalLM"], "rope_theta": 20000.0}


def test_keys_of_older_and_newer_config_files_mean_the_same() -> None:
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    old = ModelConfig.from_hf({**HF, "rope_scaling": {"rope_type": "llama3", **scaling}})
    older = ModelConfig.from_hf({**HF, "rope_scaling": {"type": "linear", "factor": 4.0}})
    new = ModelConfig.from_hf(
        {k: v for k, v in HF.items() if k != "rope_theta"}
        | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 20000.0, **scaling}}
    )
    assert old == new
    assert old.rope_scaling == RopeScaling("llama3", 4.0, 1.0, 4.0, 128)
    assert older.rope_scaling == RopeScaling("linear", 4.0)
    assert new.rope_theta == 20000.0


def test_head_counts_default_as_in_transformers() -> None:
    bare = {k: v for k, v in HF.items() if k not in ("num_key_value_heads", "head_dim")}
    config = ModelConfig.from_hf(bare)
    assert (config.num_kv_heads, config.head_dim) == (6, 16)


def test_end_tokens_of_the_generation_config_win() -> None:
    assert ModelConfig.from_hf(HF).eos_token_ids == (2,)
    assert ModelConfig.from_hf(HF, {"eos_token_id": [5, 7]}).eos_token_ids == (5, 7)
    assert ModelConfig.from_hf(HF, {"temperature": 1.0}).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
        ({"num_key_value_heads": 4}, "multiple of num_kv_heads, got 6 and 4"),
        ({"head_dim": None, "hidden_size": 100}, "100 is not a multiple of num_attention_heads 6"),
        ({"head_dim": 33}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of silu, swish, got 'gelu'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a positive number"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "'yarn' is not supported; supported: default, linear, llama3",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks 'low_freq_factor'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized with awq"),
        ({"eos_token_id": 199}, "id 199 lies outside the vocabulary of 199"),
        ({"architectures": []}, "architectures"),
        ({"architectures": {"a": 1}}, "architectures"),
        ({"eos_token_id": [None]}, "special token id None must be an integer"),
        ({"eos_token_id": 1.5}, "special token id 1.5 must be an integer"),
        ({"rope_parameters": "linear"}, "rope_parameters must be a mapping, got 'linear'"),
        ({"quantization_config": "awq"}, "quantization_config must be a mapping, got 'awq'"),
        ({"pretraining_tp": 2}, "pretraining_tp must be 1, got 2"),
    ],
)
def test_a_bad_value_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + ".*".join(map(__import__("re").escape, named.split("...")))):
        ModelConfig.from_hf({**HF, **change})


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'BertModel' is not supported; supported: LlamaForCausalLM"):
        model_class("BertModel")


def test_parameters_are_counted_as_transformers_counts_them() -> None:
    for change in ({}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}):
        reference = make_reference(**change)
        counted = sum(p.numel() for p in reference.parameters())
        assert ModelConfig.from_hf({**HF, **change}).num_parameters == counted
    assert (
        DUMMY_MODELS["dummy:llama3-8b"].config.num_parameters == 8_030_261_248
    )  # as Meta's model card rounds to 8.03B


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    ratio = inverse_frequencies(128, 500000.0) / inverse_frequencies(128, 500000.0, scaling)
    assert torch.equal(ratio[:29], torch.ones(29))  # wavelengths below 8192 / 4
    torch.testing.assert_close(ratio[35:], torch.full((29,), 8.0))  # above 8192
    assert torch.all(ratio.diff() >= -1e-6)


def test_factors_divide_the_frequencies_and_must_match_the_head_size() -> None:
    factors = tuple(float(i + 1) for i in range(16))
    plain = inverse_frequencies(32, 10000.0)
    torch.testing.assert_close(
        inverse_frequencies(32, 10000.0, RopeScaling("factors", factors=factors)), plain / torch.tensor(factors)
    )
    with pytest.raises(ConfigError, match="number head_dim / 2 = 16, got 3"):
        ModelConfig(
            **{
                **vars(DUMMY_MODELS["dummy:tiny"].config),
                "rope_scaling": RopeScaling("factors", factors=(1.0, 1.0, 2.0)),
            }
        )


def test_the_rotary_table_holds_cosines_first() -> None:
    table = cos_sin_table(DUMMY_MODELS["dummy:tiny"].config, "cpu")
    assert table.shape == (8192, 32) and table.dtype == torch.float32
    assert torch.equal(table[0], torch.cat((torch.ones(16), torch.zeros(16))))
    torch.testing.assert_close(table[1, [0, 16]], torch.tensor([0.5403023, 0.8414710]))
