"""Reads rotary positions out of a Hugging Face config.json, in the spellings of all its ages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from research_engine.models.errors import ConfigError
from research_engine.models.reading import mapping, need, numbers, take
from research_engine.models.rope import Rope, RopeScaling

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rope_from_hf(config: Mapping[str, Any], head_dim: int, *, theta: float = 10000.0) -> Rope:
    """From ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (before); ``theta`` without."""
    parameters = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    return _rope(config, parameters, head_dim, take(config, "rope_theta", float, theta))


def gemma3_ropes(config: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope]:
    """Of the layers that see everything, and of those with a window."""
    parameters = mapping(config, "rope_parameters")
    if "full_attention" in parameters or "sliding_attention" in parameters:
        full, local = mapping(parameters, "full_attention"), mapping(parameters, "sliding_attention")
    else:
        full, local = parameters or mapping(config, "rope_scaling"), {}
    return (
        _rope(config, full, head_dim, take(config, "rope_theta", float, 1e6)),
        _rope(config, local, head_dim, take(config, "rope_local_base_freq", float, 10000.0)),
    )


def _rope(config: Mapping[str, Any], parameters: Mapping[str, Any], head_dim: int, theta: float) -> Rope:
    theta = take(parameters, "rope_theta", float, theta)
    share = take(parameters, "partial_rotary_factor", float, take(config, "partial_rotary_factor", float, 1.0))
    if not 0 < share <= 1:
        raise ConfigError(f"partial_rotary_factor must be above 0 and at most 1, got {share}")
    return Rope(theta, int(head_dim * share), _scaling(config, parameters))


def _scaling(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "su" or (kind == "yarn" and config.get("model_type") == "phi3"):
        kind = "longrope"  # as the first Phi-3 releases called it
    if kind == "default":
        return None
    if kind not in _KINDS:
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    positions = need(config, "max_position_embeddings", int)
    if kind == "linear":
        return RopeScaling(kind, need(parameters, "factor", float))
    if kind == "dynamic":
        return RopeScaling(kind, need(parameters, "factor", float), original_max_position_embeddings=positions)
    original = take(config, "original_max_position_embeddings", int, positions)
    original = take(parameters, "original_max_position_embeddings", int, original)
    if original <= 0:
        raise ConfigError(f"original_max_position_embeddings must be a positive integer, got {original}")
    if kind == "llama3":
        return RopeScaling(
            kind,
            need(parameters, "factor", float),
            need(parameters, "low_freq_factor", float),
            need(parameters, "high_freq_factor", float),
            original,
        )
    factor = take(parameters, "factor", float, positions / original)
    if kind == "longrope":
        if original == 1:
            raise ConfigError("longrope needs original_max_position_embeddings above 1, got 1")
        default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return RopeScaling(
            kind,
            original_max_position_embeddings=original,
            factors=numbers(parameters, "short_factor"),
            long_factors=numbers(parameters, "long_factor"),
            attention_factor=take(parameters, "attention_factor", float, default),
        )
    return RopeScaling(
        kind,
        factor,
        original_max_position_embeddings=original,
        attention_factor=take(parameters, "attention_factor", float, _yarn_attention(parameters, factor)),
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=take(parameters, "truncate", bool, True),
    )


def _yarn_attention(parameters: Mapping[str, Any], factor: float) -> float:
    """How much larger cosines and sines become, by YaRN's formula or its variant with two ``mscale``."""

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale, scale_all = take(parameters, "mscale", float, 0.0), take(parameters, "mscale_all_dim", float, 0.0)
    return growth(scale) / growth(scale_all) if scale and scale_all else growth(1.0)


def longest_sequence(positions: int, rope: Rope | None) -> int:
    """How many positions a model reaches whose config.json says ``max_position_embeddings``.

    YaRN's and dynamic scaling's configurations give the length before scaling; the others the one after.
    """
    scaling = None if rope is None else rope.scaling
    if scaling is None or scaling.kind not in ("yarn", "dynamic"):
        return positions
    return max(positions, int(scaling.original_max_position_embeddings * scaling.factor))
