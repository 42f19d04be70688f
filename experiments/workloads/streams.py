"""Independent random streams by name, so that changing how lengths are drawn leaves the arrivals as they were."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """The generator `name` of a seed: a child of SeedSequence(seed), whatever other streams are used."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(zlib.crc32(name.encode()),)))
