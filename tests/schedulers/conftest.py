"""What scheduler tests look at: who computed how many tokens in each step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from research_engine.engine.engine import Engine


@pytest.fixture
def rows() -> Callable[[Engine], list[dict[str, int]]]:
    """Per step: request id -> tokens computed, in batch order."""
    return lambda engine: [dict(zip(s.request_ids, s.num_tokens, strict=True)) for s in engine.records.steps]
