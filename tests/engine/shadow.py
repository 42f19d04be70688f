"""The shadow KV store as the engine's tests name it; it ships with the package, for policies' own tests."""

from research_engine.testing.shadow import (
    VOCABULARY,
    ManualClock,
    ShadowExecutor,
    alone,
    assert_empty,
    drain,
    draw,
    expected,
    extend,
    greedy,
    make_engine,
)

__all__ = [
    "VOCABULARY",
    "ManualClock",
    "ShadowExecutor",
    "alone",
    "assert_empty",
    "drain",
    "draw",
    "expected",
    "extend",
    "greedy",
    "make_engine",
]
