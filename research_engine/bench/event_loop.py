"""The event loop that load generators run on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_fast(work: Coroutine[Any, Any, Result]) -> Result:
    """Run on libuv's event loop, which reads sockets faster; on Python's own where there is none."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    result: Result = uvloop.run(work)
    return result
