"""Tables of rotary position embeddings (Su et al. 2021): cosines and sines per position, with context extension."""

from __future__ import annotations

import math

import torch

from research_engine.models.config import ModelConfig, RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> torch.Tensor:
    """Angle per position of each rotated pair: ``theta ** (-2 i / D)``, scaled. float32 ``[D / 2]`` on the CPU."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    # llama3: the share of the unscaled frequency rises from 0 to 1 as turns within the original context go low to high
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    share = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - share) * frequencies / scaling.factor + share * frequencies


def cos_sin_table(config: ModelConfig, device: torch.device | str) -> torch.Tensor:
    """float32 ``[max_position_embeddings, D]``: the first half of a row holds cosines, the second half sines.

    The angle is the float32 product of position and frequency, as in the reference implementations: at position 8000
    its rounding is some 2e-4 rad, and a better product would give other logits than the ones a model is judged by.
    """
    where = "meta" if torch.device(device).type == "meta" else "cpu"  # the CPU's cosines on every device
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=where)
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angles = torch.outer(positions, frequencies.to(where))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
