"""Cache writes and block moves: every byte that should move does, and no other changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from research_engine import kernels
from research_engine.kernels._checks import CPU_DTYPES, CUDA_DTYPES

DTYPES = {"cpu": CPU_DTYPES, "cuda": CUDA_DTYPES}
property_test = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@property_test
@given(data=st.data())
def test_tokens_land_in_their_slots_and_nowhere_else(device: str, data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES[device]))
    heads, head_size = draw(st.integers(1, 5)), draw(st.sampled_from((1, 32, 46, 64, 120, 128)))
    num_blocks, block_size = draw(st.integers(1, 9)), draw(st.sampled_from((1, 8, 16, 32, 256)))
    capacity = num_blocks * block_size
    slots = draw(st.lists(st.integers(0, capacity - 1), unique=True, max_size=min(capacity, 40)))
    skipped = draw(st.lists(st.integers(0, max(0, len(slots) - 1)), max_size=3))
    slots = [-1 if i in skipped else slot for i, slot in enumerate(slots)]
    tokens = len(slots) + draw(st.integers(0, 3))
    fused = torch.randn(tokens, 3 * heads, head_size).to(device, dtype)
    key, value = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    caches = torch.full((2, num_blocks, heads, block_size, head_size), torch.nan, device=device, dtype=dtype)
    expected = caches.clone()
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    kernels.reshape_and_cache(key, value, caches[0], caches[1], slot_mapping, check_values=True)
    kernels.reference.reshape_and_cache(key, value, expected[0], expected[1], slot_mapping)
    assert torch.equal(caches.view(torch.uint8), expected.view(torch.uint8))


@property_test
@given(data=st.data())
def test_block_moves_equal_the_oracle(device: str, data: st.DataObject) -> None:
    draw = data.draw
    layers, heads, block_size, head_size = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from((1, 16))),
        24,
    )
    sources, destinations = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    dtype = draw(st.sampled_from(DTYPES[device]))
    source = torch.randn(layers, 2, sources, heads, block_size, head_size).to(dtype)
    destination = torch.randn(layers, 2, destinations, heads, block_size, head_size).to(dtype)
    targets = draw(st.lists(st.integers(0, destinations - 1), unique=True))
    pairs = torch.tensor([(draw(st.integers(0, sources - 1)), d) for d in targets], dtype=torch.int64).reshape(-1, 2)
    expected = destination.clone()
    kernels.reference.swap_blocks(source, expected, pairs)
    for direction in ("out", "in"):
        moved = destination.clone()
        if device == "cpu":
            kernels.swap_blocks(source, moved, pairs)
        else:
            source, moved = (
                (source.cuda(), moved.pin_memory()) if direction == "out" else (source.cpu().pin_memory(), moved.cuda())
            )
            kernels.swap_blocks(source, moved, pairs)
            torch.cuda.synchronize()
        assert torch.equal(moved.cpu(), expected)


@pytest.mark.parametrize("where", ["host", "device"])
def test_copies_within_a_cache(device: str, where: str) -> None:
    cache = torch.randn(3, 2, 8, 2, 16, 24).to(device)
    pairs = torch.tensor([(1, 0), (1, 7), (4, 2)], device=device if where == "device" else "cpu")
    expected = cache.clone()
    kernels.reference.copy_blocks(expected, pairs)
    kernels.copy_blocks(cache, pairs)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("shape", [(2, 16, 64), (8, 32, 40), (3, 50, 60), (5, 7, 468), (1, 1, 70000)])
@pytest.mark.parametrize("invalid", [False, True])
def test_large_blocks_are_copied_in_chunks(device: str, shape: tuple[int, int, int], invalid: bool) -> None:
    """8 KiB to 280 KB a block, some no multiple of a chunk; a GPU passes over pairs without a place in the cache."""
    cache = torch.randn(3, 2, 40, *shape).to(device)
    blocks = torch.randperm(40)
    pairs = torch.stack((blocks[:19], blocks[20:39]), dim=1)
    expected = cache.clone()
    kernels.reference.copy_blocks(expected, pairs)
    if invalid and device != "cpu":
        outside = torch.tensor([(40, 0), (-1, 3), (2, 40), (5, -7)])
        pairs = torch.cat((outside[:2], pairs[:7], outside, pairs[7:], outside[1:]))
    kernels.copy_blocks(cache, pairs.to(device))
    assert torch.equal(cache, expected)


def test_blocks_of_a_slice_of_the_layers_move_alone(device: str) -> None:
    whole = torch.randn(4, 2, 8, 2, 16, 24).to(device)
    expected = whole.clone()
    pairs = torch.tensor([(1, 0), (3, 2)])
    kernels.reference.copy_blocks(expected[1:3], pairs)
    kernels.copy_blocks(whole[1:3], pairs)
    assert torch.equal(whole, expected)


def test_k11_more_pairs_than_a_small_grid_dimension(device: str) -> None:
    half = 65_537
    cache = torch.randn(1, 2, 2 * half, 1, 1, 4).to(device)
    pairs = torch.stack((torch.arange(half), torch.arange(half, 2 * half)), dim=1)
    kernels.copy_blocks(cache, pairs)
    assert torch.equal(cache[:, :, half:], cache[:, :, :half])


def test_k11_more_tokens_than_a_small_grid_dimension(device: str) -> None:
    key = torch.randn(65_537, 1, 4).to(device)
    cache = torch.zeros(65_537, 1, 1, 4, device=device)
    kernels.reshape_and_cache(key, key, cache, torch.zeros_like(cache), torch.arange(65_537, device=device).flip(0))
    assert torch.equal(cache[:, 0].flip(0), key)


def test_k1_block_moves_past_32_bits(device: str) -> None:
    """Key and value planes of 4 GiB each, whose pages between are never touched on the CPU."""
    cache = torch.empty(1, 2, 2049, 8, 256, 256, device=device)  # 2^19 elements, 2 MiB a block
    cache[0, :, 1] = 1.5
    kernels.copy_blocks(cache, torch.tensor([(1, 2047), (1, 2048)]))
    kernels.copy_blocks(cache, torch.tensor([(2048, 0)]))
    for block in (2047, 2048, 0):
        assert (cache[0, :, block] == 1.5).all()


def test_k14_padded_and_missing_slots_are_skipped(device: str) -> None:
    key, cache = torch.arange(1.0, 6.0, device=device).view(5, 1, 1), torch.zeros(2, 1, 4, 1, device=device)
    slots = torch.tensor([6, -1, 0], device=device)  # of five tokens; the last two have none
    kernels.reshape_and_cache(key, -key, cache, out := torch.zeros_like(cache), slots, check_values=True)
    assert cache.flatten().tolist() == [3, 0, 0, 0, 0, 0, 1, 0]
    assert torch.equal(out, -cache)


def test_k15_keys_and_values_of_different_strides(device: str) -> None:
    wide, tall = torch.randn(5, 3, 8, device=device), torch.randn(10, 7, 20, device=device)
    key, value = wide[:, 1:3], tall[::2, 2:4, 5:13]
    assert key.stride() != value.stride()
    caches = torch.zeros(2, 2, 2, 4, 8, device=device)
    kernels.reshape_and_cache(key, value, caches[0], caches[1], torch.arange(5, device=device))
    for cache, rows in zip(caches, (key, value), strict=True):
        assert torch.equal(cache.transpose(1, 2).reshape(8, 2, 8)[:5], rows)


def test_k14_slot_mapping_longer_than_the_tokens(device: str) -> None:
    key, cache = torch.randn(2, 1, 8, device=device), torch.zeros(2, 1, 4, 8, device=device)
    with pytest.raises(ValueError, match=r"slot_mapping: shape \[3\].*more slots than tokens \(key has 2 rows\)"):
        kernels.reshape_and_cache(key, key, cache, cache, torch.zeros(3, dtype=torch.int64, device=device))


@pytest.mark.parametrize("slot", [-2, 8, 2**40])
def test_k14_slot_outside_of_the_cache(device: str, slot: int) -> None:
    key, cache = torch.randn(2, 1, 8, device=device), torch.zeros(2, 1, 4, 8, device=device)
    slots = torch.tensor([0, slot], device=device)
    with pytest.raises(ValueError, match=rf"slot_mapping\[1\] is {slot}, expected -1 \(skip\) or 0 to 7"):
        kernels.reshape_and_cache(key, key, cache, cache, slots, check_values=True)
    assert (cache == 0).all()


@pytest.mark.gpu
def test_k14_unchecked_wild_slots_are_skipped_on_cuda(device: str) -> None:
    if device == "cpu":
        pytest.skip("the CPU always checks")
    key, cache = torch.randn(3, 1, 8, device=device), torch.zeros(2, 1, 4, 8, device=device)
    kernels.reshape_and_cache(key, key, cache, cache, torch.tensor([-5, 8, 2**40], device=device))
    assert (cache == 0).all()


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([(0, 3), (1, 3)], "block 3 is a destination twice"),
        ([(0, 3), (3, 4)], "block 3 is both a source and a destination"),
        ([(2, 2)], "block 2 is both a source and a destination"),
        ([(0, 6)], r"pairs\[0, 1\] is 6, expected 0 to 5"),
        ([(1, 2), (-1, 3)], r"pairs\[1, 0\] is -1, expected 0 to 5"),
    ],
)
def test_k23_copies_whose_order_would_matter_are_refused(device: str, pairs: list[tuple[int, int]], words: str) -> None:
    cache = torch.zeros(1, 2, 6, 1, 4, 8, device=device)
    for where in ("cpu", device):
        with pytest.raises(ValueError, match=words):
            kernels.copy_blocks(cache, torch.tensor(pairs, device=where), check_values=True)


def test_k23_swap_refuses_one_destination_twice_but_not_one_id_on_both_sides(device: str) -> None:
    source, destination = torch.randn(1, 2, 6, 1, 4, 8), torch.zeros(1, 2, 6, 1, 4, 8, device=device)
    source = source.pin_memory() if device == "cuda" else source
    with pytest.raises(ValueError, match="block 3 is a destination twice"):
        kernels.swap_blocks(source, destination, torch.tensor([(0, 3), (1, 3)]))
    kernels.swap_blocks(source, destination, torch.tensor([(2, 2), (0, 3)]))
    assert torch.equal(destination[:, :, 2:4].cpu(), source[:, :, [2, 0]])


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("key", lambda t: t[0], ValueError, r"key: shape \[2, 16\].*\[T, Hkv, D\]"),
        ("key", lambda t: t.half().double(), TypeError, "key: torch.float64"),
        ("value", lambda t: t[:, :1], ValueError, r"value: shape \[3, 1, 16\].*key's"),
        ("key_cache", lambda t: t[:, :1], ValueError, "key_cache: "),
        ("value_cache", lambda t: t[:1], ValueError, "value_cache: .*key_cache's"),
        ("value_cache", lambda t: t.bfloat16(), TypeError, "value_cache: torch.bfloat16; torch.float32 is needed"),
        ("key_cache", lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), ValueError, "key_cache: .*contiguous"),
        ("slot_mapping", lambda t: t.int(), TypeError, "slot_mapping: torch.int32; torch.int64 is needed"),
    ],
)
def test_wrong_arguments_are_named(device: str, name: str, change: object, error: type[Exception], words: str) -> None:
    arguments = {
        "key": torch.zeros(3, 2, 16, device=device),
        "value": torch.zeros(3, 2, 16, device=device),
        "key_cache": torch.zeros(4, 2, 8, 16, device=device),
        "value_cache": torch.zeros(4, 2, 8, 16, device=device),
        "slot_mapping": torch.zeros(3, dtype=torch.int64, device=device),
    }
    arguments[name] = change(arguments[name])  # type: ignore[operator]
    with pytest.raises(error, match=words):
        kernels.reshape_and_cache(**arguments)


def test_swap_between_caches_of_different_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"destination: .*as in source, \[1, 2, 6, 1, 4, 8\]"):
        kernels.swap_blocks(
            torch.zeros(1, 2, 6, 1, 4, 8), torch.zeros(1, 2, 6, 1, 8, 8), torch.zeros(0, 2, dtype=torch.int64)
        )


@pytest.mark.gpu
def test_k22_pageable_host_memory_is_refused(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a CUDA device")
    with pytest.raises(ValueError, match="destination: .*has to be pinned"):
        kernels.swap_blocks(
            torch.zeros(1, 2, 6, 1, 4, 8, device=device), torch.zeros(1, 2, 6, 1, 4, 8), torch.tensor([(0, 1)])
        )


@pytest.mark.gpu
def test_k21_swap_waits_for_the_kernel_that_writes_the_block(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a CUDA device")
    cache = torch.zeros(1, 2, 64, 8, 256, 128, device=device)
    host = torch.zeros(1, 2, 64, 8, 256, 128).pin_memory()
    pairs = torch.tensor([(i, i) for i in range(64)])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for value in range(1, 20):
            torch.cuda._sleep(1_000_000)
            cache.fill_(value)
            kernels.swap_blocks(cache, host, pairs)
            pairs.flip(0)  # the caller's memory is free again
    stream.synchronize()
    assert (host == 19).all()
