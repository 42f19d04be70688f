"""Routers by name, or from a file."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    path, colon, attribute = name.rpartition(":")
    if colon and path.endswith(".py"):
        make = _from_file(Path(path).expanduser(), attribute)
    elif name in BUILT_IN:
        make = getattr(importlib.import_module(f"{__package__}.{name}"), BUILT_IN[name])
    else:
        raise ValueError(
            f"no router {name!r}; {_nearest(name, available_routers())}; one of your own: path/to/file.py:ClassName"
        )
    if dataclasses.is_dataclass(make):
        valid = [entry.name for entry in dataclasses.fields(make) if entry.init]
        for key in parameters:
            if key not in valid:
                raise ValueError(f"router {name!r} has no parameter {key!r}; {_nearest(key, valid)}")
    try:
        router = make(**parameters)
    except TypeError as error:
        raise ValueError(f"router {name!r} cannot be made with {parameters!r}: {error}") from error
    if not isinstance(router, Router):
        raise ValueError(f"router {name!r} makes {router!r}, which has no method route(arrival, replicas)")
    return router


def _from_file(path: Path, attribute: str) -> Callable[..., Any]:
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r} to take the router {attribute!r} from")
    module_name = f"research_engine_user_router_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ValueError(f"{path} has no class {attribute!r}")
    return found


def _nearest(wrong: str, valid: list[str]) -> str:
    near = sorted(valid, key=lambda name: -difflib.SequenceMatcher(None, wrong, name).ratio())
    return f"valid ones, nearest first: {', '.join(near)}" if near else "it takes none"
