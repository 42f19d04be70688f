"""Tiny random Llama models as transformers makes and saves them, the reference for loading and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_reference(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A model in float32 whose norms and biases are random too, so that leaving one out shows."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**BASE, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
            else:
                parameter.mul_(4)  # transformers starts at a spread of 0.02, at which attention is nearly uniform
    return model


def saved(model: LlamaForCausalLM, directory: Path, max_shard_size: str = "5GB") -> Path:
    """Write safetensors and config.json; small shards make an index."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory
