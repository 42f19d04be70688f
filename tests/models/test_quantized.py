"""Quantised models: tiny ones, written as tools write them, give the logits of the model with dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from research_engine import LLM, SamplingParams
from research_engine.layers.linear import Linear
from research_engine.loading import LoadError, load_model, resolve_model
from tests.loading.gguf_files import metadata_of, tensors_of, write_gguf
from tests.loading.quantizers import quantize_model
from tests.models.paged_run import PagedRun
from tests.models.tiny_models import greedy, make_model, prompts, reference_logits

LLAMA: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(stored: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


# method of the test's quantiser, its options, quantization_config as found in the wild
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "awq": ("awq", {}, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "GEMM"}),
    "gptq": (
        "gptq",
        {"sym": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    ),
    "gptq, desc_act, v2": (
        "gptq",
        {"desc_act": True, "v2": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ),
    "gptq, 8 bits, one group": (
        "gptq",
        {"bits": 8, "group_size": -1},
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False},
    ),
    "fp8, a scale a tensor": ("fp8-tensor", {}, {**FP8_CONFIG, "activation_scheme": "static"}),
    "fp8, blocks": ("fp8-block", {}, {**FP8_CONFIG, "weight_block_size": [32, 32]}),
    "compressed-tensors, float": (
        "fp8-channel",
        {},
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "compressed-tensors, packed": (
        "pack-quantized",
        {"sym": True},
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
    ),
}


def make(case: str, directory: Path, kind: str = "Llama", overrides: dict[str, Any] | None = None) -> Any:
    """The checkpoint in a directory; returns the model with dequantised weights."""
    method, options, config = CHECKPOINTS[case]
    model = make_model((kind, LLAMA if overrides is None else overrides))
    return quantize_model(model, directory, method, config, **options)


def load(directory: Path, **options: Any) -> Any:
    options = {"dtype": torch.float32, "device": "cpu", "progress": False, **options}
    return load_model(resolve_model(str(directory)), **options)


def is_packed(linear: Linear) -> bool:
    return linear._quantized is not None


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_logits_and_tokens_equal_those_of_the_dequantised_model(case: str, tmp_path: Path) -> None:
    reference = make(case, tmp_path)
    ids = prompts([45, 9])
    for packing in ("auto", "dequantized"):
        model = load(tmp_path, weight_packing=packing)
        attention, mlp = model.layers[0].attention, model.layers[0].mlp
        packed = [is_packed(linear) for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
        assert packed == [packing == "auto"] * 4
        for given, logits in zip(ids, PagedRun(model, 2, 64).step(ids), strict=True):
            torch.testing.assert_close(logits, reference_logits(reference, given), rtol=1e-4, atol=2e-4)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, num_blocks=20, max_num_batched_tokens=32)
    out = llm.generate(
        [{"prompt_token_ids": given} for given in ids],
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        use_tqdm=False,
    )
    assert [o.outputs[0].token_ids for o in out] == [greedy(reference, given, 8) for given in ids]


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("Qwen2", LLAMA),
        ("Phi3", {**LLAMA, "num_key_value_heads": 4}),
    ],
)
def test_biases_and_fused_tensors(kind: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Qwen2: qkv biases beside quantised matrices; Phi-3: one stored matrix for query, key and value."""
    reference = make("awq", tmp_path, kind, overrides)
    model = load(tmp_path)
    assert is_packed(model.layers[0].attention.qkv)
    (given,) = prompts([30])
    (logits,) = PagedRun(model, 1, 32).step([given])
    torch.testing.assert_close(logits, reference_logits(reference, given), rtol=1e-4, atol=2e-4)


def test_experts_are_packed_one_by_one_and_the_router_is_not(tmp_path: Path) -> None:
    overrides = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
    reference = make("gptq, desc_act, v2", tmp_path, "Mixtral", overrides)
    model = load(tmp_path)
    experts = model.layers[1].mlp
    assert [is_packed(x) for x in (*experts.gate_up, *experts.down, experts.router)] == [True] * 8 + [False]
    (given,) = prompts([30])
    (logits,) = PagedRun(model, 1, 32).step([given])
    torch.testing.assert_close(logits, reference_logits(reference, given), rtol=1e-4, atol=2e-4)


def test_a_packed_model_takes_the_memory_of_its_packed_weights(tmp_path: Path) -> None:
    make("awq", tmp_path)
    layer = load(tmp_path).layers[0]
    assert layer.attention.qkv.weight is None
    product = layer.mlp.down._quantized
    assert product.num_bytes == 64 * 96 // 2 + 3 * 64 * (4 + 1)  # 4 bits an element, a float32 scale and a zero a group


def test_groups_that_no_kernel_takes_become_floats(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
    reference = quantize_model(make_model(("Llama", LLAMA)), tmp_path, "gptq", config, 16)
    model = load(tmp_path)
    assert not is_packed(model.layers[0].attention.qkv)
    (given,) = prompts([20])
    (logits,) = PagedRun(model, 1, 32).step([given])
    torch.testing.assert_close(logits, reference_logits(reference, given), rtol=1e-4, atol=2e-4)


def test_a_gguf_stays_packed_on_request(tmp_path: Path) -> None:
    kinds = {
        "attn_q": "Q4_0",
        "attn_k": "Q4_0",
        "attn_v": "Q8_0",
        "ffn_up": "Q4_1",
        "ffn_gate": "Q4_1",
        "ffn_down": "F16",
    }
    reference = make_model(("Llama", LLAMA))
    path = write_gguf(
        tmp_path / "m.gguf",
        tensors_of(reference),
        metadata_of(reference),
        lambda name: kinds.get(name.split(".")[2] if name.startswith("blk.") else "", "F32"),
    )
    model, dense = load(path, weight_packing="packed"), load(path)
    layer = model.layers[0]
    packed = [is_packed(x) for x in (layer.attention.qkv, layer.mlp.gate_up, layer.attention.output, layer.mlp.down)]
    assert packed == [True, True, False, False] and not is_packed(dense.layers[0].mlp.gate_up)
    (given,) = prompts([30])
    logits = [PagedRun(m, 1, 32).step([given])[0] for m in (model, dense)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=2e-4)


def change(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Puts another tensor into the checkpoint, or takes one out."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {key: value for key, value in tensors.items() if key != name}
    save_file(tensors if tensor is None else {**tensors, name: tensor}, directory / "model.safetensors")


def configure(directory: Path, **changes: Any) -> None:
    """Changes the quantization_config."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "aqw"}, "quant_method 'aqw' is not supported; supported, nearest first: awq, "),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"bits": 3}, "bits must be one of 4, 8, got 3"),
        ({"bits": None}, "bits must be one of 4, 8, got None"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq, gptq_v2, got 'marlin'"),
        ({"group_size": 0}, "group_size must be a positive integer or -1, got 0"),
        ({"group_size": 40}, r"down_proj.qweight has the shape \[12, 64\], so K = 96.* no multiple of group_size = 40"),
        ({"group_size": -1}, r"scales' has the shape \[3, 64\].* ask for \[1, 64\]"),
        ({"bits": 8}, r"so K = 48, which is no multiple of group_size = 32"),
    ],
)
def test_what_a_configuration_cannot_mean_is_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    make("gptq", tmp_path)
    configure(tmp_path, **changes)
    with pytest.raises(LoadError, match=words):
        load(tmp_path)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (f"{Q}.scales", None, f"missing tensor {Q}.scales, which gptq needs"),
        (f"{Q}.qzeros", torch.zeros(2, 7, dtype=torch.int32), r"qzeros' has the shape \[2, 7\].* ask for \[2, 8\]"),
        (f"{Q}.qweight", torch.zeros(8, 64, 1, dtype=torch.int32), r"has the shape \[8, 64, 1\]; a matrix is needed"),
        (f"{Q}.qweight", torch.zeros(8, 72, dtype=torch.int32), r"scales' has the shape \[2, 64\].*\[2, 72\]"),
        (f"{Q}.qweight", torch.zeros(8, 64), "qweight' has the dtype torch.float32; torch.int32 is needed"),
        (f"{Q}.scales", torch.full((2, 64), torch.inf).half(), f"scales of '{Q}' hold values that are not finite"),
        (f"{Q}.g_idx", torch.full((64,), 2, dtype=torch.int32), rf"{Q}.g_idx\[0\] is 2, expected 0 to 1"),
        (f"{Q}.g_idx", -torch.ones(64, dtype=torch.int32), rf"{Q}.g_idx\[0\] is -1, expected 0 to 1"),
        (f"{Q}.g_idx", torch.zeros(64, dtype=torch.int32), "puts 64 inputs into group 0; each has to have 32"),
        (f"{Q}.g_idx", torch.zeros(63, dtype=torch.int32), r"g_idx' has the shape \[63\].* ask for \[64\]"),
        ("model.layers.0.extra.qweight", torch.zeros(8, 64, dtype=torch.int32), "missing tensor model.layers.0.extra"),
    ],
)
def test_tensors_that_make_no_matrix_are_named(
    name: str, tensor: torch.Tensor | None, words: str, tmp_path: Path
) -> None:
    make("gptq", tmp_path)
    change(tmp_path, name, tensor)
    with pytest.raises(LoadError, match=words):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (f"{Q}.weight_scale", torch.ones(3), r"weight_scale' has the shape \[3\]; for a weight of \[64, 64\]"),
        (f"{Q}.weight", torch.zeros(64, 64), "weight' has the dtype torch.float32; torch.float8_e4m3fn is needed"),
        (f"{Q}.weight", torch.full((64, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), "holds NaN"),
        (f"{Q}.weight_scale", None, "weights must be floats, or described by quantization_config"),
        (f"{Q}.weight", None, f"missing tensor {Q}.weight, of which there is a scale"),
    ],
)
def test_fp8_tensors_that_make_no_matrix_are_named(
    name: str, tensor: torch.Tensor | None, words: str, tmp_path: Path
) -> None:
    make("fp8, a scale a tensor", tmp_path)
    change(tmp_path, name, tensor)
    with pytest.raises(LoadError, match=words):
        load(tmp_path)


def test_packing_what_is_not_quantised_is_refused(tmp_path: Path) -> None:
    make_model(("Llama", LLAMA)).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="weight_packing = 'packed', but it holds no matrix that can stay so"):
        load(tmp_path, weight_packing="packed")


def test_another_version_of_awq_is_refused(tmp_path: Path) -> None:
    make("awq", tmp_path)
    configure(tmp_path, version="gemv")
    with pytest.raises(LoadError, match="version must be one of gemm, got 'gemv'"):
        load(tmp_path)
