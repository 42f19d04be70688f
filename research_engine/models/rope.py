"""What a rotary position embedding is made of: base, rotated part of a head, and how a longer context changes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from research_engine.models.errors import ConfigError

ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope", "factors")


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a longer context differ from those of the original one.

    - ``linear``: every frequency divided by ``factor`` (Chen et al. 2023, position interpolation).
    - ``dynamic``: the base grows with the longest sequence n beyond the original length n0, to
      ``theta * (factor * n / n0 - (factor - 1)) ** (d / (d - 2))`` ("NTK-aware" scaling).
    - ``llama3``: frequencies of wavelengths above ``original_max_position_embeddings / low_freq_factor`` divided by
      ``factor``, those below ``.../high_freq_factor`` kept, a linear blend between (the Llama 3.1 release).
    - ``yarn``: a linear blend over the dimensions between those that turn ``beta_fast`` and ``beta_slow`` times within
      the original length (Peng et al. 2023, 2309.00071).
    - ``longrope``: frequency ``i`` divided by ``factors[i]``, or by ``long_factors[i]`` where sequences may be longer
      than the original length (Ding et al. 2024, 2402.13753).
    - ``factors``: frequency ``i`` divided by ``factors[i]`` (what GGUF files store as ``rope_freqs.weight``).

    ``attention_factor`` multiplies cosines and sines.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(f"rope scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        for name in ("factor", "attention_factor", "beta_fast", "beta_slow"):
            if not _positive(getattr(self, name)):
                raise ConfigError(f"rope scaling {name} must be a positive number, got {getattr(self, name)!r}")
        original = self.original_max_position_embeddings
        needs_original = self.kind in ("dynamic", "llama3", "yarn", "longrope")
        if needs_original and not (isinstance(original, int) and original > 0):
            raise ConfigError(
                f"{self.kind} rope scaling needs original_max_position_embeddings, an integer > 0, got {original!r}"
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )
        for factors in (self.factors, self.long_factors):
            if not all(_positive(f) for f in factors):
                raise ConfigError(f"rope frequency factors must be positive numbers, got {factors}")

    def factor_counts(self) -> tuple[int, ...]:
        """How many factors each list has that the kind uses."""
        if self.kind == "longrope":
            return len(self.factors), len(self.long_factors)
        return (len(self.factors),) if self.kind == "factors" else ()


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021): ``theta`` the base, ``dim`` how many elements of a head turn."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not _positive(self.theta):
            raise ConfigError(f"rope_theta must be a positive number, got {self.theta!r}")
        if self.dim <= 0 or self.dim % 2:
            raise ConfigError(
                f"rotary embeddings turn pairs: head_dim (or its rotated part) must be even, got {self.dim}"
            )
        if self.scaling is not None:
            if self.scaling.kind == "dynamic" and self.dim <= 2:
                raise ConfigError(f"dynamic rope scaling needs more than 2 rotated elements a head, got {self.dim}")
            for count in self.scaling.factor_counts():
                if count != self.dim // 2:
                    raise ConfigError(
                        f"rope frequency factors must number {self.dim // 2}, half the rotated elements, got {count}"
                    )


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value)
