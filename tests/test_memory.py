"""What a GPU's memory goes to, from config.json alone: the arithmetic, the refusals, and no weights needed."""

from __future__ import annotations

import json

import pytest
import torch

from research_engine import cli
from research_engine.executors.memory_plan import GIB, MemoryPlan, NoRoomError, plan_from_config
from research_engine.memory import MemoryOptions, config_alone, main

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path):
    """A directory with nothing in it but a configuration."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def plan(**changes):
    sizes = {"total": 24 * GIB, "utilization": 0.9, "weights": 16 * GIB, "activations": GIB, "other": GIB,
             "kv_bytes_per_token": 131072, "block_size": 16, "max_model_len": 8192}  # fmt: skip
    return MemoryPlan(**{**sizes, **changes})


def test_the_cache_gets_what_the_rest_leaves_of_the_allowed_share():
    made = plan()
    assert made.room == int(24 * GIB * 0.9) - 18 * GIB
    assert made.num_blocks == made.room // (131072 * 16) and made.num_tokens == 16 * made.num_blocks
    assert made.concurrency(8192) == made.num_blocks / 512
    assert sum(made.parts().values()) == made.total


def test_a_request_takes_whole_blocks():
    assert plan().request_bytes(17) == 2 * 16 * 131072
    assert plan(max_model_len=17).concurrency(17) == plan().num_blocks / 2


def test_llama_8b_takes_131072_bytes_a_token_and_16_gb_of_weights(llama):
    config = config_alone(str(llama))
    made = plan_from_config(
        config, torch.bfloat16, total=24 * GIB, utilization=0.9, kv_element_bytes=2, block_size=16, max_model_len=8192,
        max_num_seqs=256, max_num_batched_tokens=2048,
    )  # fmt: skip
    assert made.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131072
    assert made.weights == 2 * 8_030_261_248


def test_what_does_not_fit_is_refused_with_the_length_that_does_and_the_remedies_in_order():
    with pytest.raises(NoRoomError, match=r"max_model_len = 100000 takes 12\.21 GiB") as caught:
        plan(max_model_len=100_000).check()
    message = str(caught.value)
    assert f"at most {plan().num_tokens} tokens" in message
    assert message.index("other processes") < message.index("utilization;") < message.index("lower max_model_len")
    with pytest.raises(NoRoomError, match="no block fits") as caught:
        plan(weights=30 * GIB).check()
    assert str(caught.value).endswith("alone are too large: take quantised ones, a smaller model or a larger GPU")
    assert "Try" not in str(caught.value)  # no other remedy would help
    assert plan(weights=30 * GIB).room == 0


def test_the_command_needs_no_weights_and_prints_what_fits(llama, capsys):
    assert cli.main(["memory", str(llama), "--gpu-memory-gib", "80", "--kv-cache-dtype", "fp8"]) == 0
    out = capsys.readouterr().out
    assert "65,536" in out and "largest max_model_len" in out and "14.96" in out
    assert cli.main(["memory", str(llama / "config.json"), "--gpu-memory-gib", "80"]) == 0


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--gpu-memory-gib", "0"], "gpu_memory_gib = 0.0: must be GiB > 0"),
        (["--gpu-memory-utilization", "1.2"], "gpu_memory_utilization = 1.2: must be > 0 and <= 1"),
        (["--max-model-len", "200000"], "max_model_len = 200000: .* has 131072 positions at most"),
        (["--max-model-len", "100000"], "at most 37904 tokens fit"),
        (["--gpu-memory-gib", "8"], "no block fits"),
    ],
)
def test_a_wrong_wish_is_named_with_its_rule(llama, capsys, arguments, rule):
    import re

    assert cli.main(["memory", str(llama), *arguments]) == 2
    assert re.search(rule, capsys.readouterr().err)


def test_an_encoder_has_no_cache_to_plan_for() -> None:
    with pytest.raises(ValueError, match=r"BertModel embeds, and has no KV cache"):
        main(MemoryOptions("dummy:minilm-l6"))
