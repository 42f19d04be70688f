"""Finds, fetches and reads models: `resolve_model` a name, then `load_config`, `load_tokenizer`, `load_model`."""

from research_engine.loading.errors import LoadError
from research_engine.loading.load import load_config, load_model, load_tokenizer
from research_engine.loading.source import ModelSource, cache_directory, known_models, resolve_model

__all__ = [
    "LoadError",
    "ModelSource",
    "cache_directory",
    "known_models",
    "load_config",
    "load_model",
    "load_tokenizer",
    "resolve_model",
]
