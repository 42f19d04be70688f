"""Fetches a model repository of ModelScope into the cache, with ModelScope's own package, which is optional."""

from __future__ import annotations

import re
from pathlib import Path

from research_engine.loading.errors import LoadError
from research_engine.loading.hub import BESIDE_WEIGHTS, EMBEDDER_PARTS, UNWANTED, with_any_weights


def fetch_from_modelscope(repository: str, cache: Path) -> Path:
    """The local snapshot of ``OWNER/NAME``; the package shows the download in its own way.

    Raises:
        LoadError: not such a name, the package is not installed, or the repository cannot be had.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise LoadError(f"modelscope:{repository}: must read modelscope:OWNER/NAME")
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise LoadError(
            f"modelscope:{repository}: needs the package modelscope, which is not installed: "
            "pip install 'research_engine[modelscope]'"
        ) from error

    def fetch(weights: str) -> Path:
        wanted = [weights, *BESIDE_WEIGHTS, *EMBEDDER_PARTS]
        kept = snapshot_download(
            repository,
            cache_dir=str(cache / "modelscope"),
            allow_patterns=wanted,
            ignore_patterns=list(UNWANTED),
        )
        return Path(kept)

    try:
        return with_any_weights(fetch)
    except Exception as error:  # the package's own errors, and those of what it stands on
        raise LoadError(
            f"modelscope:{repository}: cannot be fetched from ModelScope: {error}; give a local directory or .gguf "
            "file, OWNER/NAME of the Hugging Face hub, or dummy:tiny, which needs no download"
        ) from error
