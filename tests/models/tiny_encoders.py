"""Tiny random encoders as transformers makes and saves them, and what transformers computes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

_COMMON: dict[str, Any] = {
    "vocab_size": 197, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 80,
}  # fmt: skip
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert, another activation and epsilon": ("Bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "roberta, one token type": ("Roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "xlm-roberta, another padding id": ("XLMRoberta", {"pad_token_id": 4}),
}
"""By a name for people: transformers' prefix of the classes, and what differs from the rest."""


def make_encoder(name: str, *, kind: str = "Model", **further: Any) -> Any:
    """A model in float32 whose norms and biases are random too, so that leaving one out shows."""
    prefix, changes = ENCODERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**_COMMON | changes | further)
    model = getattr(transformers, f"{prefix}{kind}")._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                around = 1.0 if "LayerNorm.weight" in parameter_name else 0.0
                parameter.copy_(torch.randn_like(parameter) * 0.2 + around)
            else:
                parameter.mul_(4)
    return model


def hidden_states(model: Any, ids: list[int]) -> torch.Tensor:
    """``[len(ids), H]``."""
    with torch.inference_mode():
        return getattr(model, "base_model", model)(torch.tensor([ids])).last_hidden_state[0]


def write_pooling(directory: Path, mode: str, *, normalize: bool = True, max_seq_length: int | None = None) -> None:
    """The files by which sentence-transformers knows how a model pools."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, mode: True}))
    if max_seq_length is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
