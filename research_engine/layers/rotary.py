"""Tables of rotary position embeddings (Su et al. 2021): cosines and sines per position, with context extension."""

from __future__ import annotations

import math

import torch

from research_engine.models.rope import Rope, RopeScaling


def inverse_frequencies(rope: Rope, longest: int = 0) -> torch.Tensor:
    """Angle per position of each rotated pair: ``theta ** (-2 i / D)``, scaled. float32 ``[D / 2]`` on the CPU.

    ``longest`` is the length of the longest sequence to be served: longrope and dynamic scaling depend on it.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    scaling = rope.scaling
    if scaling is None:
        return 1.0 / rope.theta**exponents
    original = scaling.original_max_position_embeddings
    if scaling.kind == "dynamic":
        stretch = scaling.factor * max(longest, original) / original - (scaling.factor - 1)
        return 1.0 / (rope.theta * stretch ** (rope.dim / (rope.dim - 2))) ** exponents
    if scaling.kind in ("factors", "longrope"):
        long = scaling.kind == "longrope" and longest > original
        factors = scaling.long_factors if long else scaling.factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    frequencies = 1.0 / rope.theta**exponents
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    share = _llama3_share(scaling, frequencies) if scaling.kind == "llama3" else _yarn_share(rope, scaling)
    return (1 - share) * frequencies / scaling.factor + share * frequencies


def _llama3_share(scaling: RopeScaling, frequencies: torch.Tensor) -> torch.Tensor:
    """Of the unscaled frequency: from 0 to 1 as the turns within the original context go from low to high."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    return ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)


def _yarn_share(rope: Rope, scaling: RopeScaling) -> torch.Tensor:
    """Of the unscaled frequency: from 1 to 0 over the dimensions that turn beta_fast to beta_slow times."""

    def dimension(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    return 1 - ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def cos_sin_table(rope: Rope, longest: int, device: torch.device | str) -> torch.Tensor:
    """float32 ``[longest, D]``: the first half of a row holds cosines, the second half sines.

    The angle is the float32 product of position and frequency, as in the reference implementations: at position 8000
    its rounding is some 2e-4 rad, and a better product would give other logits than the ones a model is judged by.
    """
    if torch.device(device).type == "meta":  # the shape alone
        return torch.empty((longest, rope.dim), device=device)
    positions = torch.arange(longest, dtype=torch.float32)  # the CPU's cosines on every device
    angles = torch.outer(positions, inverse_frequencies(rope, longest))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    if rope.scaling is not None and rope.scaling.attention_factor != 1.0:
        table *= rope.scaling.attention_factor
    return table.to(device)
