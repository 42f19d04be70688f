"""How a checkpoint's matrices are quantised, from `quantization_config` of its config.json, checked; no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from research_engine.models.errors import ConfigError

METHODS = ("awq", "gptq", "fp8", "compressed-tensors")


@dataclass(frozen=True)
class Quantization:
    """What the tensors of quantised matrices mean.

    Args:
        method: "awq" (gemm packing), "gptq", "fp8" (float8_e4m3fn matrices with scales) or "pack-quantized" (4-bit
            integers of compressed-tensors).
        bits: of an element: 4 or 8.
        group_size: elements along K that share a scale; -1 for all, and 0 where the scales' shape says it (fp8).
        zero_offset: what is added to stored zero points: 1 in GPTQ's first format, else 0.
    """

    method: str
    bits: int
    group_size: int = -1
    zero_offset: int = 0


def quantization_from_hf(config: Mapping[str, Any]) -> Quantization:
    """Read the dictionary under ``quantization_config``.

    Raises:
        ConfigError: a method, width or format that there is no implementation of; names it and those there are.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"quantization_config must be a mapping, got {config!r}")
    method = config.get("quant_method")
    if method not in METHODS:
        ordered = sorted(METHODS, key=lambda name: -difflib.SequenceMatcher(None, str(method).lower(), name).ratio())
        raise ConfigError(
            f"quant_method {method!r} is not supported; supported, nearest first: {', '.join(ordered)}; or use float "
            "safetensors or a GGUF file"
        )
    reader = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed_tensors}[method]
    return reader(config)


def _choice(config: Mapping[str, Any], key: str, valid: tuple[Any, ...], default: Any) -> Any:
    value = config.get(key, default)
    if isinstance(value, str):
        value = value.lower()
    if value not in valid or isinstance(value, bool):
        raise ConfigError(
            f"quantization_config: {key} must be one of {', '.join(map(str, valid))}, got {config.get(key, default)!r}"
        )
    return value


def _group_size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or value > 0):
        raise ConfigError(f"quantization_config: group_size must be a positive integer or -1, got {value!r}")
    return value


def _awq(config: Mapping[str, Any]) -> Quantization:
    bits = _choice(config, "bits", (4,), config.get("w_bit"))
    _choice(config, "version", ("gemm",), "gemm")
    return Quantization("awq", bits, _group_size(config.get("group_size", config.get("q_group_size", 128))))


def _gptq(config: Mapping[str, Any]) -> Quantization:
    bits = _choice(config, "bits", (4, 8), None)
    stored = _choice(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return Quantization("gptq", bits, _group_size(config.get("group_size", -1)), 0 if stored == "gptq_v2" else 1)


def _fp8(config: Mapping[str, Any]) -> Quantization:
    _choice(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    return Quantization("fp8", 8, 0)


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    stored = _choice(config, "format", ("float-quantized", "naive-quantized", "pack-quantized"), "float-quantized")
    groups = config.get("config_groups")
    schemes = [] if not isinstance(groups, Mapping) else [group.get("weights") for group in groups.values()]
    if not schemes or any(not isinstance(scheme, Mapping) or scheme != schemes[0] for scheme in schemes):
        raise ConfigError(f"quantization_config: config_groups must hold one scheme of weights, got {groups!r}")
    scheme = schemes[0]
    if stored != "pack-quantized":
        _choice(scheme, "type", ("float",), None)
        return Quantization("fp8", _choice(scheme, "num_bits", (8,), None), 0)
    _choice(scheme, "type", ("int",), "int")
    bits = _choice(scheme, "num_bits", (4, 8), None)
    strategy = _choice(scheme, "strategy", ("group", "channel"), None)
    return Quantization("pack-quantized", bits, _group_size(scheme.get("group_size")) if strategy == "group" else -1)
