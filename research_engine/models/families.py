"""The families of decoders and encoders: what each calls its tensors. What else tells them apart is in `hf_config`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from research_engine.models.errors import ConfigError

# Parts of a layer by the names of the shared definition -> those of a Llama checkpoint
_LLAMA_PARTS = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the tensors of a model.

    Args:
        prefix: of every name but the head's; other_prefixes: what stands there in other checkpoints of the family,
            such as nothing in one saved from the bare model.
        embedding, positions, token_types, embedding_norm, final_norm, project_in, project_out: modules outside the
            layers, after the prefix.
        layer: begin of a layer's names, after the prefix, with its number for ``{}``.
        parts: modules of a layer. ``qkv`` instead of ``q``, ``k``, ``v``, and ``gate_up`` instead of ``gate`` and
            ``up``, where the checkpoint holds them as one tensor. Names of experts have ``{}`` for the expert's number.
        transposed: whether matrices of layers are stored as [in, out].
        unused: regular expression of tensors that carry nothing the model needs, by their full names; empty for none.
    """

    prefix: str = "model."
    other_prefixes: tuple[str, ...] = ("",)
    embedding: str = "embed_tokens"
    positions: str = ""
    token_types: str = ""
    embedding_norm: str = ""
    final_norm: str = "norm"
    project_in: str = ""
    project_out: str = ""
    head: str = "lm_head"
    layer: str = "layers.{}."
    parts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_LLAMA_PARTS))
    transposed: bool = False
    unused: str = ""

    def part(self, layer: int, part: str, expert: int | None = None) -> str:
        """Full name of a layer's module."""
        return f"{self.prefix}{self.layer.format(layer)}{self.parts[part].format(expert)}"


_GEMMA_PARTS = {
    **_LLAMA_PARTS,
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_BERT: dict[str, Any] = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "layer": "encoder.layer.{}.",
    "parts": {
        "attention_norm": "attention.output.LayerNorm",
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "output": "attention.output.dense",
        "mlp_norm": "output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
    },
}
_LLAMA = Names()
_GEMMA = Names(parts=_GEMMA_PARTS)

BARE_DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Decoders that are also published without an output projection, as embedders."""


def _encoder(prefix: str, heads: str) -> Names:
    """BERT's names, which checkpoints with a head put after a prefix; what is for that head alone goes unused."""
    unused = rf"({re.escape(prefix)})?(embeddings\.(position_ids|token_type_ids)|pooler\..*)|{heads}\..*"
    return Names(prefix="", other_prefixes=(prefix,), unused=unused, **_BERT)


FAMILIES: Mapping[str, Names] = MappingProxyType(
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": _LLAMA,
        "Qwen2ForCausalLM": _LLAMA,
        "Qwen3ForCausalLM": _LLAMA,
        "Gemma2ForCausalLM": _GEMMA,
        "Gemma3ForCausalLM": _GEMMA,
        "Gemma3ForConditionalGeneration": Names(
            prefix="language_model.model.",
            other_prefixes=("model.language_model.",),
            head="language_model.lm_head",
            parts=_GEMMA_PARTS,
            unused=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
        ),
        "Phi3ForCausalLM": Names(
            parts={**_LLAMA_PARTS, "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
        ),
        "GPT2LMHeadModel": Names(
            prefix="transformer.",
            embedding="wte",
            positions="wpe",
            final_norm="ln_f",
            layer="h.{}.",
            parts={
                "attention_norm": "ln_1",
                "qkv": "attn.c_attn",
                "output": "attn.c_proj",
                "mlp_norm": "ln_2",
                "up": "mlp.c_fc",
                "down": "mlp.c_proj",
            },
            transposed=True,
            unused=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
        ),
        "OPTForCausalLM": Names(
            prefix="model.decoder.",
            other_prefixes=("decoder.",),
            positions="embed_positions",
            final_norm="final_layer_norm",
            project_in="project_in",
            project_out="project_out",
            parts={
                "attention_norm": "self_attn_layer_norm",
                "q": "self_attn.q_proj",
                "k": "self_attn.k_proj",
                "v": "self_attn.v_proj",
                "output": "self_attn.out_proj",
                "mlp_norm": "final_layer_norm",
                "up": "fc1",
                "down": "fc2",
            },
        ),
        "MixtralForCausalLM": Names(
            parts={
                **_LLAMA_PARTS,
                "router": "block_sparse_moe.gate",
                "expert_gate": "block_sparse_moe.experts.{}.w1",
                "expert_up": "block_sparse_moe.experts.{}.w3",
                "expert_down": "block_sparse_moe.experts.{}.w2",
            }
        ),
        "Qwen3MoeForCausalLM": Names(
            parts={
                **_LLAMA_PARTS,
                "router": "mlp.gate",
                "expert_gate": "mlp.experts.{}.gate_proj",
                "expert_up": "mlp.experts.{}.up_proj",
                "expert_down": "mlp.experts.{}.down_proj",
            }
        ),
        **{f"{name}Model": Names(unused=r"lm_head\..*") for name in BARE_DECODERS},
        "BertModel": _encoder("bert.", "cls"),
        "BertForMaskedLM": _encoder("bert.", "cls"),
        "RobertaModel": _encoder("roberta.", "lm_head"),
        "RobertaForMaskedLM": _encoder("roberta.", "lm_head"),
        "XLMRobertaModel": _encoder("roberta.", "lm_head"),
        "XLMRobertaForMaskedLM": _encoder("roberta.", "lm_head"),
    }
)
"""By the name that config.json gives under ``architectures``."""


def names_of(architecture: str) -> Names:
    """The tensor names of a family.

    Raises:
        ConfigError: there is none of that name; lists those there are, nearest first.
    """
    if architecture not in FAMILIES:
        raise ConfigError(
            f"architecture {architecture!r} has no definition of its own here; there are, nearest first: "
            + ", ".join(nearest_families(architecture))
        )
    return FAMILIES[architecture]


def nearest_families(architecture: str) -> list[str]:
    """Every family, the one spelled most alike first."""
    return sorted(FAMILIES, key=lambda name: -difflib.SequenceMatcher(None, architecture.lower(), name.lower()).ratio())
