"""The random numbers: published vectors of Philox4x32-10, and that a number depends on seed and position alone."""

from __future__ import annotations

import numpy as np
import pytest

from research_engine.executors.philox import philox4x32, uniform

# counter, key -> output; known answers published with Random123 (Salmon et al., SC 2011)
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(counter, key, words):
    out = philox4x32(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert tuple(int(word) for word in out[:, 0]) == words


def test_a_number_depends_on_seed_and_position_alone():
    seeds, positions = [3, 3, -1, 2**70 + 5, 9], [0, 1, 1, 7, 2**33]
    together = uniform(seeds, positions)
    alone = [uniform([seed], [position])[0] for seed, position in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)


def test_numbers_fill_the_unit_interval_evenly():
    numbers = uniform([7] * 20_000, range(20_000))
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square of 19 degrees of freedom, p = 0.001
