"""The real SmolLM2-135M-Instruct for tests: fetched through the resolver's cache, or the test is skipped and says why."""

from __future__ import annotations

import functools

import pytest

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
