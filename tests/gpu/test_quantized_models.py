"""Quantised weights and caches on a GPU, for few rows and many: layers are the formula, models off by rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from research_engine import LLM, SamplingParams
from research_engine.kernels.quantized import KINDS
from research_engine.layers.quantized import QuantizedProduct, QuantizedTensor
from research_engine.loading import load_model, resolve_model
from tests.gpu.rounding import Twins, assert_engine_within_rounding, assert_no_worse, position_errors
from tests.gpu.test_families import engine
from tests.kernels.test_quantized import random_codes
from tests.loading.gguf_files import metadata_of, tensors_of, write_gguf
from tests.models.paged_run import PagedRun
from tests.models.test_families import NOISE, chunked_logits
from tests.models.test_quantized import CHECKPOINTS, LLAMA, is_packed, make
from tests.models.tiny_models import FAMILIES, make_model, prompts, reference_logits, saved

pytestmark = pytest.mark.gpu
QUANTIZED = {
    **{case: (case, "Llama", None) for case in CHECKPOINTS},
    "awq, biases": ("awq", "Qwen2", LLAMA),
    "awq, fused tensors": ("awq", "Phi3", {**LLAMA, "num_key_value_heads": 4}),
    "gptq, experts": (
        "gptq", "Mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1},
    ),
}  # fmt: skip


def load(directory: Path, device: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return load_model(resolve_model(str(directory)), dtype=dtype, device=device, progress=False, **options)


@pytest.mark.parametrize("case", QUANTIZED)
def test_a_packed_model_in_16_bits_is_as_near_to_float32_as_transformers_with_its_weights(
    gpu: str, case: str, tmp_path: Path
) -> None:
    """Chunks of 110 rows, whose weights become floats first, of a few rows and of one; then as graphs."""
    checkpoint, kind, overrides = QUANTIZED[case]
    twins = Twins(make(checkpoint, tmp_path, kind, overrides), torch.bfloat16, gpu, round_weights=False)
    model = load(tmp_path, gpu)
    assert is_packed(model.layers[0].attention.qkv)
    quantile = 0.75 if kind == "Mixtral" else 1.0
    long, short = prompts([150, 21])
    ours, theirs = [], []
    for given, logits in zip((long, short), chunked_logits(model, long, short), strict=True):
        exact, rounded = twins.logits(given)
        ours.append(position_errors(logits, exact))
        theirs.append(position_errors(rounded, exact))
    assert_no_worse(torch.cat(ours), torch.cat(theirs), quantile=quantile)
    llm = engine(tmp_path, gpu, "bfloat16")
    assert_engine_within_rounding(llm, twins, quantile=quantile)
    llm.shutdown()


@pytest.mark.parametrize("case", ["awq", "gptq, desc_act, v2", "fp8, blocks", "compressed-tensors, packed"])
def test_weights_that_become_floats_are_the_checkpoints(gpu: str, case: str, tmp_path: Path) -> None:
    """In float32 a GPU has no kernel for packed weights."""
    reference = make(case, tmp_path)
    model = load(tmp_path, gpu, torch.float32)
    assert gpu == "cpu" or not is_packed(model.layers[0].attention.qkv)
    (given,) = prompts([60])
    (logits,) = PagedRun(model, 1, 64).step([given])
    torch.testing.assert_close(logits.float().cpu(), reference_logits(reference, given), **NOISE)


@pytest.mark.parametrize("packing", ["packed", "auto"])
def test_a_gguf_packed_and_as_floats(gpu: str, packing: str, tmp_path: Path) -> None:
    kinds = {"attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q8_0", "ffn_up": "Q4_1", "ffn_gate": "Q4_1"}
    reference = make_model(("Llama", LLAMA))
    path = write_gguf(
        tmp_path / "m.gguf",
        tensors_of(reference),
        metadata_of(reference),
        lambda name: kinds.get(name.split(".")[2] if name.startswith("blk.") else "", "F32"),
    )
    exact = load(path, "cpu", torch.float32)
    model, dense = load(path, gpu, weight_packing=packing), load(path, gpu)
    assert is_packed(model.layers[0].mlp.gate_up) == (packing == "packed")
    (given,) = prompts([110])
    expected, *logits = (PagedRun(m, 1, 112).step([given])[0].float().cpu() for m in (exact, model, dense))
    ours, theirs = (position_errors(one, expected) for one in logits)
    assert_no_worse(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_large_layer_is_the_formula_in_float64(gpu: str, kind: str, ordered: bool) -> None:
    """As many rows as one pass takes, one more, and so many that the weight becomes floats; in pieces of 32 MiB."""
    n, k, group = (4224, 8192, 128) if gpu == "cuda" else (300, 512, 128)
    generator = torch.Generator().manual_seed(2)
    scales = (torch.rand(k // group, n, generator=generator) + 0.5) / (1 << KINDS[kind].bits)
    zeros = torch.randint(0, 1 << KINDS[kind].bits, scales.shape, dtype=torch.uint8, generator=generator)
    tensor = QuantizedTensor(
        kind, random_codes(kind, n, k, generator), scales.half(), None if kind == "float8" else zeros,
        order=torch.randperm(k, generator=generator) if ordered else None,
    ).to(torch.device(gpu))  # fmt: skip
    weight = tensor.dequantize().double()
    product = QuantizedProduct([tensor])
    for rows in (1, 8, 9, 16, 17, 64, 65, 300):
        x = torch.randn(rows, k, generator=generator).to(gpu, torch.bfloat16)
        out, expected = product(x).double(), x.double() @ weight.T
        bound = 4e-3 * x.double().norm(dim=1, keepdim=True) * weight.norm(dim=1)[None]
        assert bool(((out - expected).abs() <= bound).all()), f"{rows} rows"


def test_packed_products_share_a_workspace_that_leaves_no_trace(gpu: str) -> None:
    """Weights of other shapes, captured in one graph and replayed: counters are zero again after each."""
    if gpu != "cuda":
        pytest.skip("captures a CUDA graph")
    generator = torch.Generator().manual_seed(3)

    def product(n: int, k: int) -> QuantizedProduct:
        scales = torch.rand(k // 64, n, generator=generator).half() * 0.01
        return QuantizedProduct([QuantizedTensor("int4", random_codes("int4", n, k, generator), scales).to(device)])

    device = torch.device(gpu)
    up, down = product(3000, 512), product(512, 3008)
    x = torch.randn(5, 512, device=device, dtype=torch.bfloat16)
    pad = torch.nn.functional.pad

    def work() -> torch.Tensor:
        return down(pad(up(x), (0, 8)))

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for seed in range(5):
        x.copy_(torch.randn(5, 512, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(captured, work())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache", ["fp8", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "qwen3"])
def test_a_cache_of_one_byte_costs_what_it_costs_on_the_cpu(
    gpu: str, family: str, cache: str, dtype: str, tmp_path: Path
) -> None:
    """By the log-probabilities of a prompt in chunks: what the rounding of keys and values changes there."""
    directory = saved(make_model(FAMILIES[family]), tmp_path)
    (prompt,) = prompts([180])

    def logprobs(device: str, **options: Any) -> torch.Tensor:
        llm = engine(directory, device, dtype, **options)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        llm.shutdown()
        assert output.prompt_logprobs is not None and len(output.outputs[0].token_ids) == 6
        return torch.tensor([e[t].logprob for e, t in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)])

    errors = {
        device: (logprobs(device, kv_cache_dtype=cache) - logprobs(device)).square().mean().sqrt()
        for device in ("cpu", gpu)
    }
    assert 0 < errors[gpu] <= 2 * errors["cpu"]


def test_a_step_of_a_packed_dummy_reads_what_its_config_says(gpu: str) -> None:
    """The memory of its weights is that of 4 bits and a little more, and it generates."""
    llm = LLM("dummy:tiny-awq", device=gpu, num_blocks=64, max_num_seqs=4, max_model_len=128)
    outputs = llm.generate(
        [[5, 6, 7], list(range(100))], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]
    executor: Any = llm.engine.executor
    down = executor._model.layers[0].mlp.down._quantized
    scale = 4 if gpu == "cpu" else 2
    assert down.num_bytes == 128 * 256 // 2 + 256 // 32 * 128 * scale
    llm.shutdown()
