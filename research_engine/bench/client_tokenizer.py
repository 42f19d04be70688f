"""The tokenizer that a client counts and makes prompts with, found by a model's name; weights are not needed for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from research_engine.loading.tokenizer import Tokenizer

_FILES = ["tokenizer*", "*vocab*", "merges.txt", "special_tokens_map.json", "chat_template.jinja", "config.json"]


def load_client_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a directory, a .gguf file, a repository of the Hugging Face hub or any model that is known.

    Raises:
        ValueError: there is none; says what else can be done.
    """
    from research_engine.loading import LoadError, load_tokenizer, resolve_model
    from research_engine.loading.source import known_models
    from research_engine.loading.tokenizer import tokenizer_from_directory

    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return tokenizer_from_directory(path)
        if not path.exists() and name not in known_models() and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            return tokenizer_from_directory(_from_hub(name))
        return load_tokenizer(resolve_model(name))
    except LoadError as error:
        raise ValueError(
            f"no tokenizer for {name!r} ({error}); give one with --tokenizer, or do without: --skip-tokenizer-init"
        ) from None


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    from research_engine.loading import LoadError, cache_directory

    try:
        return Path(snapshot_download(repository, cache_dir=cache_directory() / "hub", allow_patterns=_FILES))
    except Exception as error:  # the hub's own errors, and those of the network below it
        reason = str(error).strip().splitlines()
        raise LoadError(f"{repository}: {reason[0] if reason else type(error).__name__}") from error
