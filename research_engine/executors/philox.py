"""Random numbers that depend on (seed, position) alone: Philox4x32-10, a counter-based generator, vectorised in numpy.

Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. No state is kept, so a draw is the
same whatever was drawn before it, in which batch, after which preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64], rounds: int = 10) -> NDArray[np.uint64]:
    """Encrypt counters.

    Args:
        counter: [4, S], each below 2**32.
        key: [2, S], each below 2**32.

    Returns:
        [4, S] random words, each below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) of 53 random bits for every (seed, position).

    Args:
        seeds: any integers; those that agree modulo 2**64 give the same numbers.
        positions: integers >= 0.
    """
    seed = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(position)
    words = philox4x32(
        np.stack((position & _LOW, position >> _HALF, zero, zero)), np.stack((seed & _LOW, seed >> _HALF))
    )
    bits = ((words[0] << _HALF) | words[1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
