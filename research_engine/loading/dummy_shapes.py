"""Shapes of well-known models as their config.json files give them, by the names under which dummies are asked for."""

from __future__ import annotations

from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def _shape(
    architecture: str, vocab: int, hidden: int, inter: int, layers: int, heads: int, kv_heads: int, **rest: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **rest,
    }


def _llama(*sizes: int, **rest: Any) -> dict[str, Any]:
    return _shape("LlamaForCausalLM", *sizes, **{"rms_norm_eps": 1e-5, **rest})


def _llama3(*sizes: int, **rest: Any) -> dict[str, Any]:
    ends = [128001, 128008, 128009]
    same = {"rope_theta": 500000.0, "max_position_embeddings": 131072, "bos_token_id": 128000, "eos_token_id": ends}
    return _llama(128256, *sizes, **{**same, "rope_scaling": _LLAMA3_ROPE, **rest})


def _mistral(*sizes: int, **rest: Any) -> dict[str, Any]:
    same = {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "bos_token_id": 1, "eos_token_id": 2}
    return _shape("MistralForCausalLM", *sizes, **{**same, **rest})


def _qwen(architecture: str, *sizes: int, **rest: Any) -> dict[str, Any]:
    same = {"rope_theta": 1e6, "max_position_embeddings": 32768, "bos_token_id": 151643, "eos_token_id": 151645}
    return _shape(architecture, *sizes, **{**same, **rest})


def _gemma(architecture: str, *sizes: int, **rest: Any) -> dict[str, Any]:
    same = {"max_position_embeddings": 8192, "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256}
    return _shape(architecture, *sizes, **{**same, **rest})


def _opt(hidden: int, inter: int, layers: int, heads: int, **rest: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "ffn_dim": inter, "num_hidden_layers": layers, "num_attention_heads": heads}
    same = {"vocab_size": 50272, "max_position_embeddings": 2048, "bos_token_id": 2, "eos_token_id": 2}
    return {"architectures": ["OPTForCausalLM"], **sizes, **same, **rest}


def _encoder(architecture: str, vocab: int, *sizes: int, **rest: Any) -> dict[str, Any]:
    hidden, inter, layers, heads = sizes
    same = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
    return _shape(architecture, vocab, hidden, inter, layers, heads, heads, **same, **rest)


DUMMY_SHAPES: dict[str, dict[str, Any]] = {
    "dummy:tiny": {  # with the byte tokenizer: ids below 256 are bytes
        **_shape("LlamaForCausalLM", 259, 128, 256, 2, 4, 2),
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 257,
        "eos_token_id": 258,
    },
    "dummy:minilm-l6": _encoder(
        "BertModel", 30522, 384, 1536, 6, 12, max_position_embeddings=512, layer_norm_eps=1e-12, type_vocab_size=2
    ),
    "dummy:bge-m3": _encoder(
        "XLMRobertaModel", 250002, 1024, 4096, 24, 16, max_position_embeddings=8194, layer_norm_eps=1e-5,
        type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    ),
    "dummy:smollm2-135m": _llama(
        49152, 576, 1536, 30, 9, 3, rope_theta=100000.0, max_position_embeddings=8192, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    ),
    "dummy:llama-2-7b": _llama(
        32000, 4096, 11008, 32, 32, 32, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2
    ),
    "dummy:llama-2-13b": _llama(
        32000, 5120, 13824, 40, 40, 40, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2
    ),
    "dummy:yi-34b": _llama(
        64000, 7168, 20480, 60, 56, 8, rope_theta=5e6, max_position_embeddings=200000, bos_token_id=1, eos_token_id=2
    ),
    "dummy:llama3-8b": _llama3(4096, 14336, 32, 32, 8),
    "dummy:llama-3.1-8b": _llama3(4096, 14336, 32, 32, 8),
    "dummy:llama-3.1-8b-awq": _llama3(4096, 14336, 32, 32, 8, quantization_config=_AWQ),
    "dummy:llama-3.1-8b-fp8": _llama3(4096, 14336, 32, 32, 8, quantization_config={"quant_method": "fp8"}),
    "dummy:llama-3.1-70b": _llama3(8192, 28672, 80, 64, 8),
    "dummy:llama-3.2-1b": _llama3(
        2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True, rope_scaling={**_LLAMA3_ROPE, "factor": 32.0}
    ),
    "dummy:llama-3.2-3b": _llama3(
        3072, 8192, 28, 24, 8, head_dim=128, tie_word_embeddings=True, rope_scaling={**_LLAMA3_ROPE, "factor": 32.0}
    ),
    "dummy:mistral-7b": _mistral(32000, 4096, 14336, 32, 32, 8, sliding_window=4096),
    "dummy:qwen2.5-0.5b": _qwen("Qwen2ForCausalLM", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "dummy:qwen2.5-7b": _qwen("Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4),
    "dummy:qwen2.5-7b-awq": _qwen("Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4, quantization_config=_AWQ),
    "dummy:qwen3-0.6b": _qwen(
        "Qwen3ForCausalLM", 151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=40960,
    ),
    "dummy:qwen3-8b": _qwen(
        "Qwen3ForCausalLM", 151936, 4096, 12288, 36, 32, 8, head_dim=128, max_position_embeddings=40960
    ),
    "dummy:gemma-2-2b": _gemma("Gemma2ForCausalLM", 256000, 2304, 9216, 26, 8, 4),
    "dummy:gemma-2-9b": _gemma("Gemma2ForCausalLM", 256000, 3584, 14336, 42, 16, 8),
    "dummy:gemma-3-1b": _gemma(
        "Gemma3ForCausalLM", 262144, 1152, 6912, 26, 4, 1, max_position_embeddings=32768, sliding_window=512
    ),
    "dummy:phi-3-mini": _shape(
        "Phi3ForCausalLM", 32064, 3072, 8192, 32, 32, 32, max_position_embeddings=4096, sliding_window=2047,
        bos_token_id=1, eos_token_id=32000,
    ),
    "dummy:gpt2": {
        "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "n_positions": 1024, "bos_token_id": 50256, "eos_token_id": 50256,
    },
    "dummy:opt-125m": _opt(768, 3072, 12, 12),
    "dummy:opt-1.3b": _opt(2048, 8192, 24, 32),
    "dummy:opt-13b": _opt(5120, 20480, 40, 40),
    "dummy:mixtral-8x7b": _shape(
        "MixtralForCausalLM", 32000, 4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2,
        rope_theta=1e6, rms_norm_eps=1e-5, max_position_embeddings=32768, bos_token_id=1, eos_token_id=2,
    ),
    "dummy:qwen3-30b-a3b": _qwen(
        "Qwen3MoeForCausalLM", 151936, 2048, 6144, 48, 32, 4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, max_position_embeddings=40960,
    ),
}  # fmt: skip
