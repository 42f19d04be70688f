"""Reads how a model pools, as sentence-transformers keeps it: modules.json, 1_Pooling/config.json and their like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from research_engine.loading.errors import LoadError
from research_engine.loading.source import ModelSource
from research_engine.models.config import ModelConfig
from research_engine.models.pooling import Pooling

_KINDS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


def load_pooling(source: ModelSource, config: ModelConfig) -> Pooling:
    """A model's own pooling; where it says nothing, a decoder's last token or an encoder's mean, at length 1.

    Raises:
        LoadError: a file is corrupt, or asks for a pooling or a module that is not supported.
    """
    default = Pooling("last" if config.causal else "mean")
    if source.directory is None or not source.file("modules.json").exists():
        return default
    kind, normalize = default.kind, False
    for module in _modules(source):
        name, folder = module["type"].rpartition(".")[2], module.get("path") or ""
        if name == "Pooling":
            kind = _kind(source, f"{folder}/config.json")
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer" or folder:
            raise LoadError(
                f"{source.file('modules.json')}: the module {name} in {folder or '.'!r} is not supported; supported: "
                "Transformer beside the weights, Pooling, Normalize"
            )
    return Pooling(kind, normalize, _max_tokens(source, config))


def _modules(source: ModelSource) -> list[Mapping[str, Any]]:
    path = source.file("modules.json")
    try:
        modules: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(module["type"], str) for module in modules):
            raise TypeError("it must be a list of modules with type and path")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{path}: cannot be read: {error!r}") from error
    return modules


def _kind(source: ModelSource, name: str) -> str:
    from research_engine.loading.load import read_json

    settings = read_json(source.file(name))
    chosen = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
    if isinstance(settings.get("pooling_mode"), str):  # as newer releases write it
        chosen = [f"pooling_mode_{settings['pooling_mode']}"]
    short = {"pooling_mode_mean": "mean", "pooling_mode_cls": "cls", **_KINDS}
    if len(chosen) != 1 or chosen[0] not in short:
        raise LoadError(
            f"{source.file(name)}: pooling {', '.join(chosen) or 'none'} is not supported; supported is one of "
            f"{', '.join(_KINDS)}"
        )
    return short[chosen[0]]


def _max_tokens(source: ModelSource, config: ModelConfig) -> int | None:
    from research_engine.loading.load import read_json

    path = source.file("sentence_bert_config.json")
    most = read_json(path).get("max_seq_length") if path.exists() else None
    if most is not None and not (isinstance(most, int) and most > 0):
        raise LoadError(f"{path}: max_seq_length must be a positive integer, got {most!r}")
    return None if most is None else min(most, config.max_position_embeddings)
