"""The same weights in transformers' own Llama: the baseline of the CPU benchmark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from research_engine.loading.errors import LoadError
from research_engine.loading.load import open_checkpoint

if TYPE_CHECKING:
    from research_engine.loading import ModelSource
    from research_engine.models.config import ModelConfig


@dataclass(frozen=True)
class TimedTokens:
    """Tokens by prompt, and the seconds at which each step's tokens were there, counted from the call."""

    token_ids: list[list[int]]
    times: list[float]


class TransformersTwin:
    """`LlamaForCausalLM` of transformers in float32 on the CPU, with its defaults: sdpa attention and DynamicCache.

    Args:
        source, config: where the project's model came from, and its shape.
        seed: of dummy weights.
    """

    def __init__(self, source: ModelSource, config: ModelConfig, *, seed: int = 0) -> None:
        from transformers import AutoModelForCausalLM, LlamaForCausalLM

        if source.format == "safetensors":
            self._model: Any = AutoModelForCausalLM.from_pretrained(str(source.directory), dtype=torch.float32)
        else:
            self._model = LlamaForCausalLM(_llama_config(config)).to(torch.float32)
            checkpoint, device = open_checkpoint(source, config, seed=seed), torch.device("cpu")
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():  # a tied weight comes once
                    parameter.copy_(checkpoint.read(name, device))
        self._model.eval()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> TimedTokens:
        """Exactly `num_tokens` greedy tokens of each prompt, as one left-padded batch."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        times: list[float] = []

        def note_time(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter() - start)
            return torch.zeros(len(input_ids), dtype=torch.bool)

        limits = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "eos_token_id": None, "pad_token_id": 0}
        start = time.perf_counter()
        out = self._model.generate(ids, attention_mask=mask, do_sample=False, stopping_criteria=[note_time], **limits)
        return TimedTokens(out[:, width:].tolist(), times)


def _llama_config(config: ModelConfig) -> Any:
    from transformers import LlamaConfig

    if config.architecture != "LlamaForCausalLM" or config.rope is None:
        raise LoadError(f"the benchmark's baseline is a Llama, not {config.architecture}; use safetensors")
    if config.attention_bias != config.output_bias:
        raise LoadError("the benchmark's baseline has no Llama with biases on some attention projections only")
    scaling, of_model = None, config.rope.scaling
    if of_model is not None:
        if of_model.kind not in ("linear", "llama3"):
            raise LoadError(f"the benchmark's baseline has no Llama with {of_model.kind} rope scaling; use safetensors")
        kept = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        keys = kept if of_model.kind == "llama3" else kept[:1]
        scaling = {"rope_type": of_model.kind, **{key: getattr(of_model, key) for key in keys}}
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope.theta,
        rope_scaling=scaling,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
