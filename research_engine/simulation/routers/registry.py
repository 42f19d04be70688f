"""Routers by name, or from a file."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from research_engine.plugins import callable_from_file, file_and_attribute, nearest_first

from .router import Router

BUILT_IN = {
    "least_tokens": "LeastTokens",
    "prefix_affinity": "PrefixAffinity",
    "round_robin": "RoundRobin",
}


def available_routers() -> list[str]:
    """Names that `create_router` knows, sorted."""
    return sorted(BUILT_IN)


def create_router(name: str, **parameters: Any) -> Router:
    """Make a router.

    Args:
        name: a name out of `available_routers()`, or `path/to/file.py:ClassName`.
        parameters: of its dataclass.

    Raises:
        ValueError: no such router, file, class or parameter; lists the valid ones, nearest first.
    """
    if (own := file_and_attribute(name)) is not None:
        make = callable_from_file(*own, kind="router", method="route")
    elif name in BUILT_IN:
        make = getattr(importlib.import_module(f"{__package__}.{name}"), BUILT_IN[name])
    else:
        raise ValueError(
            f"no router {name!r}; {nearest_first(name, available_routers())}; "
            "one of your own: path/to/file.py:ClassName"
        )
    if dataclasses.is_dataclass(make):
        valid = [entry.name for entry in dataclasses.fields(make) if entry.init]
        for key in parameters:
            if key not in valid:
                raise ValueError(f"router {name!r} has no parameter {key!r}; {nearest_first(key, valid)}")
    try:
        router = make(**parameters)
    except TypeError as error:
        raise ValueError(f"router {name!r} cannot be made with {parameters!r}: {error}") from error
    if not isinstance(router, Router):
        raise ValueError(f"router {name!r} makes {router!r}, which has no method route(arrival, replicas)")
    return router
