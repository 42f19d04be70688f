"""The device of the tests of models on a GPU."""

from __future__ import annotations

import os

import pytest

from tests.conftest import cuda_reason


@pytest.fixture(scope="session")
def gpu() -> str:
    """ "cuda"; where RESEARCH_ENGINE_GPU_TESTS_ON names another device, that one, to try the tests themselves."""
    named = os.environ.get("RESEARCH_ENGINE_GPU_TESTS_ON", "cuda")
    if named == "cuda" and (reason := cuda_reason()):
        pytest.skip(reason)
    return named
