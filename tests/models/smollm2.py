"""The real SmolLM2-135M-Instruct for tests: fetched through the resolver's cache, or the test skips and says why."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from research_engine.loading import LoadError, ModelSource, resolve_model


@functools.cache
def _resolved() -> ModelSource | str:
    try:
        return resolve_model("smollm2-135m-instruct", progress=False)
    except LoadError as error:
        return str(error)


def smollm2_source() -> ModelSource:
    """Where the model lies; skips the calling test if it cannot be had."""
    found = _resolved()
    if isinstance(found, str):
        pytest.skip(f"SmolLM2-135M-Instruct cannot be had: {found}")
    return found


@functools.cache
def smollm2_reference() -> Any:
    """transformers' own reading of the GGUF file in float32, kept for the whole session: it takes some 15 seconds.

    Skips the calling test without `accelerate`, which transformers asks for.
    """
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    from transformers import AutoModelForCausalLM

    source = smollm2_source()
    assert source.path is not None
    return AutoModelForCausalLM.from_pretrained(
        str(source.directory), gguf_file=source.path.name, dtype=torch.float32
    ).eval()
