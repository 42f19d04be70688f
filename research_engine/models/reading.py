"""Reads single values out of a model's configuration, each with an error that names the key and the rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from research_engine.models.errors import ConfigError


def need(config: Mapping[str, Any], key: str, kind: type) -> Any:
    """``config[key]``, of the wanted type; an integer passes for a float."""
    if key not in config or config[key] is None:
        raise ConfigError(f"the model's configuration lacks {key!r}")
    value = config[key]
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or isinstance(value, bool) is not (kind is bool):
        raise ConfigError(f"{key} must be of type {kind.__name__}, got {value!r}")
    return value


def take(config: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """``config[key]``, of the wanted type, or the default where it is missing or null."""
    return default if config.get(key) is None else need(config, key, kind)


def refuse_others(config: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any) -> None:
    """Raises unless the key, or its default, has one of the values."""
    value = config.get(key, default)
    if value not in allowed:
        raise ConfigError(f"{key} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A dictionary, empty where it is missing or null."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a mapping, got {value!r}")
    return value


def numbers(config: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """A list of numbers."""
    value = config.get(key)
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(v, (int, float)) and not isinstance(v, bool) for v in value
    ):
        raise ConfigError(f"{key} must be a list of numbers, got {value!r}")
    return tuple(map(float, value))


def ids(value: Any) -> tuple[Any, ...]:
    """One id, a list of them or none; what they are is checked with the rest."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)
