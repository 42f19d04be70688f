"""What a model's configuration accepts, and what its errors name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from research_engine.layers.rotary import cos_sin_table, inverse_frequencies
from research_engine.loading.dummy import DUMMY_MODELS
from research_engine.models.config import ConfigError, ModelConfig, Rope, RopeScaling
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
    assert old.rope == Rope(20000.0, 32, RopeScaling("llama3", 4.0, 1.0, 4.0, 128))
    assert older.rope == Rope(20000.0, 32, RopeScaling("linear", 4.0))


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
        ({"head_dim": 33}, "head_dim (or its rotated part) must be even, got 33"),
        ({"head_dim": 1 << 40}, "head_dim must be an integer from 1 to 8192, got 1099511627776"),
        ({"head_dim": "64"}, "head_dim must be an integer from 1 to 8192, got '64'"),
        ({"hidden_size": 1 << 40}, "hidden_size must be at most 1048576, got 1099511627776"),
        ({"intermediate_size": 1 << 40}, "intermediate_size must be at most 4194304"),
        ({"num_hidden_layers": 1 << 40}, "num_layers must be at most 16384"),
        ({"vocab_size": 1 << 40}, "vocab_size must be at most 16777216"),
        ({"max_position_embeddings": 1 << 40}, "max_position_embeddings must be at most 16777216"),
        ({"num_attention_heads": 1 << 40}, "num_heads must be at most 16384"),
        ({"num_attention_heads": 0, "head_dim": None}, "hidden_size 96 is not a multiple of num_attention_heads 0"),
        ({"hidden_act": "mish"}, "hidden_act must be one of silu, swish, gelu"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be of type bool, got 'no'"),
        ({"rms_norm_eps": 0.0}, "norm_eps must be a positive number"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number, got -1.0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be above 0 and at most 1, got 1.5"),
        (
            {"rope_scaling": {"type": "mrope", "factor": 2.0}},
            "'mrope' is not supported; supported: default, linear, dynamic, llama3, yarn, longrope",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 16}},
            "must number 16, half the rotated elements, got 1",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": "x"}},
            "short_factor must be a list of numbers, got 'x'",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 0.0}},
            "rope scaling factor must be a positive number, got 0.0",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks 'low_freq_factor'"),
        ({"quantization_config": {"quant_method": "exl2"}}, "quant_method 'exl2' is not supported"),
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


def test_an_unknown_architecture_lists_the_known_ones_nearest_first() -> None:
    with pytest.raises(ConfigError, match="'Qwen4ForCausalLM' has no definition .* nearest first: Qwen[23]ForCausalLM"):
        ModelConfig.from_hf({**HF, "architectures": ["Qwen4ForCausalLM"]})


@pytest.mark.parametrize(
    ("architecture", "change", "named"),
    [
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
            "window must be a positive integer",
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["a"]},
            "each of 3 layers",
        ),
        ("MistralForCausalLM", {"sliding_window": "all"}, "sliding_window must be of type int, got 'all'"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1.0}, "attention_softcap must be a positive number"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer"),
        ("MixtralForCausalLM", {}, "lacks 'num_local_experts'"),
        ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 9}, "1 <= experts_per_token <= .* = 4"),
        ("MixtralForCausalLM", {"num_local_experts": 1 << 40, "num_experts_per_tok": 2}, "num_experts must be at most"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
        ("OPTForCausalLM", {"enable_bias": False, "ffn_dim": 8}, "enable_bias must be one of True, got False"),
        ("GPT2LMHeadModel", {"n_embd": 10, "n_head": 4, "n_layer": 2}, "n_embd 10 is not a multiple of n_head 4"),
    ],
)
def test_a_bad_value_of_a_family_is_named(architecture: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf({**HF, "architectures": [architecture], **change})


def test_scaled_configurations_say_how_far_they_reach() -> None:
    def reach(**scaling: Any) -> int:
        return ModelConfig.from_hf({**HF, "rope_scaling": scaling}).max_position_embeddings

    assert reach(type="yarn", factor=4.0, original_max_position_embeddings=512) == 2048
    assert reach(type="dynamic", factor=3.0) == 1536
    assert reach(type="linear", factor=3.0) == 512


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
    ratio = inverse_frequencies(Rope(500000.0, 128)) / inverse_frequencies(Rope(500000.0, 128, scaling))
    assert torch.equal(ratio[:29], torch.ones(29))  # wavelengths below 8192 / 4
    torch.testing.assert_close(ratio[35:], torch.full((29,), 8.0))  # above 8192
    assert torch.all(ratio.diff() >= -1e-6)


def test_factors_divide_the_frequencies_and_must_match_the_head_size() -> None:
    factors = tuple(float(i + 1) for i in range(16))
    plain = inverse_frequencies(Rope(10000.0, 32))
    scaled = inverse_frequencies(Rope(10000.0, 32, RopeScaling("factors", factors=factors)))
    torch.testing.assert_close(scaled, plain / torch.tensor(factors))
    with pytest.raises(ConfigError, match="must number 16, half the rotated elements, got 3"):
        Rope(10000.0, 32, RopeScaling("factors", factors=(1.0, 1.0, 2.0)))


def test_the_rotary_table_holds_cosines_first() -> None:
    table = cos_sin_table(Rope(10000.0, 32), 8192, "cpu")
    assert table.shape == (8192, 32) and table.dtype == torch.float32
    assert torch.equal(table[0], torch.cat((torch.ones(16), torch.zeros(16))))
    torch.testing.assert_close(table[1, [0, 16]], torch.tensor([0.5403023, 0.8414710]))
