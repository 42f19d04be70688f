"""Paged attention equals the float64 oracle, whatever the batch, the layout and the options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from research_engine import kernels
from research_engine.kernels._checks import CPU_DTYPES, CUDA_DTYPES, QUANTIZED_CACHE_DTYPES
from research_engine.kernels.attention import CPU_PATHS, PATHS
from tests.kernels.attention_cases import check, make_batch, run

FORCED = {"cpu": CPU_PATHS, "cuda": tuple(PATHS)}
DTYPES = {"cpu": CPU_DTYPES, "cuda": CUDA_DTYPES}
BLOCK_SIZES = (1, 8, 16, 32, 256)
HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256, 46)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)
property_test = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(q_len, seq_len) of up to six requests: decode rows, prefill chunks, empty ones, and queries without keys."""
    result = []
    for _ in range(draw(st.integers(1, 6))):
        seq_len = draw(st.sampled_from((0, 1, 15, 16, 17)) | st.integers(0, 150))
        q_len = draw(st.sampled_from((0, 1, 1, 2, 3, seq_len, seq_len + 2)) | st.integers(0, 40))
        result.append((min(q_len, 60), seq_len))
    return result


@property_test
@given(data=st.data(), lengths=requests())
def test_mixed_batches_equal_the_oracle(device: str, data: st.DataObject, lengths: list[tuple[int, int]]) -> None:
    draw = data.draw
    group, num_kv_heads = draw(st.sampled_from(GROUPS)), draw(st.integers(1, 3))
    batch = make_batch(
        lengths,
        num_kv_heads=num_kv_heads,
        group=group,
        head_size=draw(st.sampled_from(HEAD_SIZES)),
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        dtype=draw(st.sampled_from(DTYPES[device])),
        device=device,
        seed=draw(st.integers(0, 2**31)),
        padding_rows=draw(st.integers(0, 2)),
    )
    per_head = torch.linspace(-1.0, 2.0, group * num_kv_heads, device=device)
    check(
        batch,
        causal=draw(st.booleans()),
        sliding_window=draw(st.none() | st.integers(1, 60)),
        softcap=draw(st.none() | st.sampled_from((1.0, 30.0))),
        alibi_slopes=draw(st.none() | st.just(per_head)),
        sinks=draw(st.none() | st.just(per_head)),
        path=draw(st.sampled_from(FORCED[device])),
        split_size=draw(st.none() | st.sampled_from((16, 50, 64))),
    )


def per_path(device: str) -> list[tuple[str, torch.dtype]]:
    """Every path with every dtype of the device: 16 bits take the tensor cores where a path has them, 32 do not."""
    return [(path, dtype) for path in FORCED[device] for dtype in DTYPES[device]]


@pytest.mark.parametrize("cache_dtype", [None, *QUANTIZED_CACHE_DTYPES])
def test_k4_what_lies_in_unused_slots_has_no_effect(device: str, cache_dtype: torch.dtype | None) -> None:
    """NaN (float8: 0x7F) past the last key, in blocks that nobody references, and in those of the table's tail."""
    for path, dtype in per_path(device):
        lengths = [(1, 70), (9, 33), (1, 1), (1, 0)]
        batch = make_batch(lengths, head_size=64, dtype=dtype, cache_dtype=cache_dtype, device=device)
        used = torch.zeros(batch.key_cache.shape[0], 16, dtype=torch.bool, device=device)
        for row, (_, length) in enumerate(lengths):
            blocks = batch.block_tables[row, : -(-length // 16)].long()
            used[blocks] = (torch.arange(16 * len(blocks), device=device) < length).view(-1, 16)
        (free, *_) = (~used).all(1).nonzero().flatten().tolist()
        for row, (_, length) in enumerate(lengths):
            batch.block_tables[row, -(-length // 16) :] = free
        results = [run(batch, scale=0.125, path=path)]
        keep = used[:, None, :, None]
        for cache in (batch.key_cache, batch.value_cache):
            raw = cache if cache_dtype is None else cache.view(torch.uint8)
            if cache_dtype != torch.int8:
                unused = torch.where(keep, torch.nan, cache.float())
                assert unused.isnan().all(), "the batch holds no NaN, and nothing is tested"
            raw.copy_(torch.where(keep, raw, torch.zeros_like(raw)))
        results.append(run(batch, scale=0.125, path=path))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), f"{path}, {dtype}: read what is unused"
        assert not results[0][0].isnan().any()


@pytest.mark.parametrize("wild", [-1, -(2**31), 2**31 - 1, 10_000])
def test_k5_ids_after_the_last_needed_block_are_never_followed(device: str, wild: int) -> None:
    for path, dtype in per_path(device):
        lengths = [(1, 64), (9, 33), (1, 0), (20, 20)]
        batch = make_batch(lengths, dtype=dtype, device=device, spare_columns=3)
        results = []
        for tail in (0, wild):
            for row, (_, length) in enumerate(lengths):
                batch.block_tables[row, -(-length // 16) :] = tail
            results.append(check(batch, path=path, check_values=True))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), f"{path}, {dtype}: followed {wild}"


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_k6_lengths_around_a_block_boundary(device: str, block_size: int) -> None:
    lengths = [(1, n) for n in (block_size - 1, block_size, block_size + 1, 1)]
    for path, dtype in per_path(device):
        batch = make_batch(lengths, block_size=block_size, dtype=dtype, device=device, spare_columns=1)
        expected, _ = check(batch, path=path, split_size=64)
        batch.block_tables = batch.block_tables[:, :-1]
        out, _ = check(batch, path=path, split_size=64)
        assert torch.equal(out, expected), f"{path}, {dtype}: a spare column changed the result"


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 9, 16, 32])
def test_k9_every_head_ratio_on_every_path(device: str, group: int) -> None:
    for path, dtype in per_path(device):
        for head_size in (32, 64):
            batch = make_batch([(1, 70), (9, 33)], group=group, head_size=head_size, dtype=dtype, device=device)
            check(batch, path=path)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_k10_every_head_size_on_every_path(device: str, head_size: int) -> None:
    for path, dtype in per_path(device):
        check(make_batch([(1, 70), (9, 33)], head_size=head_size, dtype=dtype, device=device), path=path)


def test_k10_a_head_size_that_is_not_built_is_named(device: str) -> None:
    batch = make_batch([(1, 70), (9, 33)], head_size=257, device=device)
    if device == "cpu":  # takes any
        check(batch)
        return
    with pytest.raises(ValueError, match="head size 257 is not built for CUDA; 1 to 256 are"):
        run(batch, scale=0.1)


@pytest.mark.parametrize("batch_size", [1, 128])
def test_k12_forced_paths_and_splits_agree(device: str, batch_size: int) -> None:
    batch = make_batch([(1, 100 + 3 * i % 90) for i in range(batch_size)], num_kv_heads=1, head_size=32, device=device)
    expected, _ = check(batch)
    for path in FORCED[device]:
        for split_size in (None, 16, 100, 1000):
            out, _ = run(batch, scale=32**-0.5, path=path, split_size=split_size)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 128])
def test_k12_forced_paths_and_splits_equal_the_oracle_in_16_bits(device: str, batch_size: int) -> None:
    """Where there are tensor cores, 16 bits and a head size of 64 take them."""
    batch = make_batch(
        [(1, 100 + 3 * i % 90) for i in range(batch_size)], num_kv_heads=1, dtype=torch.bfloat16, device=device
    )
    for path in FORCED[device]:
        for split_size in (None, 16, 100, 1000):
            check(batch, path=path, split_size=split_size)


def test_k7_rows_that_see_nothing_are_zero(device: str) -> None:
    for path, dtype in per_path(device):
        batch = make_batch([(1, 40), (1, 0), (5, 3), (0, 7), (1, 1)], dtype=dtype, device=device)
        out, lse = check(batch, path=path)
        assert (out[1:4] == 0).all() and (lse[1:4] == -torch.inf).all(), f"{path}, {dtype}"


def test_sink_alone_takes_the_whole_weight_of_an_empty_row(device: str) -> None:
    sinks = torch.tensor([0.5, -3.0, 9.0, 0.0], device=device)
    out, lse = check(make_batch([(1, 0), (1, 20)], device=device), sinks=sinks)
    assert (out[0] == 0).all()
    torch.testing.assert_close(lse[0], sinks)


@pytest.mark.parametrize("shift", [-6e4, -1e30])
def test_k8_very_negative_scores_are_scores(device: str, shift: float) -> None:
    batch = make_batch([(1, 30), (20, 25)], group=1, head_size=32, device=device)
    batch.query[:] = 0
    batch.query[:, :, 0] = 1
    batch.key_cache[..., 0] = torch.where(batch.key_cache[..., 0].isnan(), torch.nan, shift)
    out, _ = check(batch, scale=1.0, sliding_window=9)
    assert out.abs().sum() > 0


@pytest.mark.parametrize("window", [1, 2, 16, 17, 63, 64, 65, 299, 300, 301])
def test_k16_window_edges(device: str, window: int) -> None:
    for path in FORCED[device]:
        check(
            make_batch([(1, 300), (70, 70)], num_kv_heads=1, head_size=32, device=device),
            sliding_window=window,
            path=path,
        )


def test_k16_window_leaves_the_blocks_behind_it_unread(device: str) -> None:
    batch = make_batch([(1, 100), (3, 100)], block_size=16, device=device)
    batch.block_tables[:, :4] = -7
    check(batch, sliding_window=20)


@pytest.mark.parametrize("split_size", [None, 16, 32, 500])
def test_k16_sink_counts_once_across_splits(device: str, split_size: int | None) -> None:
    sinks = torch.tensor([3.0, 1.0, 0.0, -torch.inf], device=device)
    check(make_batch([(1, 200), (1, 1)], device=device), sinks=sinks, split_size=split_size)


@pytest.mark.parametrize("path", ["auto", "decode"])
@pytest.mark.parametrize("window", [1, 16, 17, 40])
def test_k16_the_workspace_made_for_a_call_is_enough_for_its_window(device: str, path: str, window: int) -> None:
    for length in (1, 15, 17, 40):
        batch = make_batch([(1, length)], block_size=1, dtype=DTYPES[device][-1], device=device, spare_columns=0)
        for split_size in (16, 32):
            check(batch, sliding_window=window, path=path, split_size=split_size)


def test_the_workspace_made_for_a_call_is_enough_for_an_out_that_is_not_aligned(device: str) -> None:
    for group in (1, 4, 12):
        batch = make_batch([(1, 200), (1, 30)], group=group, dtype=DTYPES[device][-1], device=device)
        options = {"scale": 0.125, "path": "decode", "split_size": 16}
        expected, _ = check(batch, **options)
        out = torch.full((*batch.query.shape[:2], 72), torch.nan, dtype=batch.query.dtype, device=device)[..., 1:65]
        kernels.paged_attention(*batch.tensors(), out=out, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_k16_softcap_comes_before_the_mask_and_alibi_after_the_softcap(device: str) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], device=device)
    for path in FORCED[device]:
        batch = make_batch([(1, 90), (30, 60)], device=device)
        check(batch, scale=4.0, softcap=2.0, alibi_slopes=slopes, sliding_window=11, path=path)


def test_k17_chunk_of_a_long_prefill(device: str) -> None:
    for path, dtype in per_path(device) if device == "cuda" else [("auto", torch.float32)]:
        check(make_batch([(300, 4096)], num_kv_heads=1, dtype=dtype, device=device), path=path)


def test_k15_strides_of_query_out_and_caches_are_honoured(device: str) -> None:
    batch = make_batch([(1, 40), (20, 30)], device=device)
    expected, _ = check(batch)
    caches = torch.stack((batch.key_cache, batch.value_cache), dim=1)  # [N, 2, Hkv, B, D]
    batch.key_cache, batch.value_cache = caches[:, 0], caches[:, 1]
    wide = torch.full((*batch.query.shape[:2], 100), torch.nan, device=device)
    wide[..., 7:71] = batch.query
    batch.query = wide[..., 7:71]
    out = torch.full((batch.query.shape[0], 9, 64), torch.nan, device=device)
    kernels.paged_attention(*batch.tensors(), scale=0.125, out=out[:, 3:7])
    assert torch.equal(out[:, 3:7], expected)
    assert out[:, :3].isnan().all() and out[:, 7:].isnan().all()


@pytest.mark.parametrize("path", ["decode", "prefill"])
def test_nan_in_a_key_or_value_reaches_the_rows_that_see_it_and_no_other(device: str, path: str) -> None:
    if device == "cuda" and path == "prefill":
        pytest.skip("a tile of value rows is multiplied with the weights of all its queries, and 0 x NaN is NaN")
    for cache_name in ("key_cache", "value_cache"):
        batch = make_batch([(6, 6)], block_size=1, num_kv_heads=1, group=2, head_size=32, device=device)
        getattr(batch, cache_name)[batch.block_tables[0, 3]] = torch.nan
        out, _ = run(batch, scale=1.0, path=path, sliding_window=2)
        assert out.isnan().flatten(1).all(dim=1).tolist() == [False, False, False, True, True, False]
        assert out.isnan().flatten(1).any(dim=1).tolist() == [False, False, False, True, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_k19_partial_results_are_float32(device: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES[device]:
        pytest.skip(f"no {dtype} on {device}")
    batch = make_batch([(1, 900)], dtype=dtype, device=device)
    lse = run(batch, scale=0.125, split_size=16)[1]
    expected = torch.empty_like(lse, dtype=torch.float64)
    kernels.reference.paged_attention(*batch.tensors(), scale=0.125, lse=expected)
    torch.testing.assert_close(lse.double(), expected, rtol=2e-6, atol=2e-6)


def test_k20_same_call_gives_the_same_bits(device: str) -> None:
    for dtype in DTYPES[device]:
        batch = make_batch([(1, 400), (30, 70), (1, 33)], dtype=dtype, device=device)
        first = run(batch, scale=0.125)
        for _ in range(100):
            assert all(torch.equal(a, b) for a, b in zip(first, run(batch, scale=0.125), strict=True))


@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [1000],
        [9000],
        [64, 64],
        [700, 650, 690],
        [1, 0, 3],
        [1500, 2, 0, 90],
        [520] * 17,
        [i * 37 % 200 for i in range(300)],
    ],
    ids=["one key", "one long", "one very long", "two units", "even", "tiny", "uneven", "many", "short"],
)
def test_batches_of_single_queries(device: str, lengths: list[int], group: int) -> None:
    """Clusters of thread blocks share few even rows; others are cut by load, and of short ones a warp has several."""
    batch = make_batch(
        [(1, length) for length in lengths], group=group, head_size=128, dtype=torch.bfloat16, device=device
    )
    first, second = (check(batch, path="decode") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@property_test
@given(neighbours=requests(), split_size=st.sampled_from((16, 64)), q_len=st.sampled_from((1, 2, 33)))
def test_k20_fixed_splits_make_a_row_independent_of_its_batch(
    device: str, neighbours: list[tuple[int, int]], split_size: int, q_len: int
) -> None:
    alone = make_batch([(q_len, 170)], device=device, seed=5)
    together = make_batch([*neighbours, (q_len, 170)], device=device, seed=6)
    rows = slice(together.query.shape[0] - q_len, None)
    together.query[rows] = alone.query
    for column in range(-(-170 // 16)):  # the same keys and values, in other blocks
        here, there = together.block_tables[-1, column], alone.block_tables[0, column]
        together.key_cache[here], together.value_cache[here] = alone.key_cache[there], alone.value_cache[there]
    expected, actual = (run(batch, scale=0.125, split_size=split_size)[0] for batch in (alone, together))
    assert torch.equal(actual[rows], expected)


# Prefill kernels whose rows keep their bits under a window too: their tiles of keys start at multiples from key 0.
WINDOWED = {"cpu": (), "cuda": ("prefill_mma",)}


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("head_size", "group"), [(64, 1), (96, 3), (128, 8), (256, 2)])
def test_k20_prefill_gives_a_row_the_same_bits_in_a_prompt_in_a_chunk_and_beside_others(
    device: str, head_size: int, group: int, cache_dtype: torch.dtype | None
) -> None:
    length, dtype = 150, torch.bfloat16
    prompt = make_batch(
        [(length, length)], num_kv_heads=1, group=group, head_size=head_size, dtype=dtype, cache_dtype=cache_dtype,
        device=device,
    )  # fmt: skip
    for path in (path for path in FORCED[device] if path.startswith("prefill")):
        for window in (None, 50) if path in WINDOWED[device] else (None,):
            expected = run(prompt, scale=0.1, path=path, sliding_window=window)
            for start, end in ((0, 37), (37, 38), (38, 149), (149, 150)):
                pieces = [(0, 5, 9), (start, end, end)]  # rows and keys of two requests over the same blocks
                batch = replace(
                    prompt,
                    query=torch.cat([prompt.query[first:last] for first, last, _ in pieces]),
                    block_tables=prompt.block_tables.expand(2, -1).contiguous(),
                    query_start_loc=torch.tensor([0, 5, 5 + end - start], dtype=torch.int32, device=device),
                    seq_lens=torch.tensor([keys for _, _, keys in pieces], dtype=torch.int32, device=device),
                )
                for whole, part in zip(expected, run(batch, scale=0.1, path=path, sliding_window=window), strict=True):
                    assert torch.equal(part[5:], whole[start:end]), f"path {path}, rows {start} to {end}"


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
def test_k20_a_row_keeps_its_bits_in_batches_of_1_to_512(device: str, cache_dtype: torch.dtype | None) -> None:
    def of_size(size: int) -> torch.Tensor:
        lengths = [(1, 9 + 37 * i % 120) for i in range(size - 1)]
        batch = make_batch(
            [*lengths, (1, 170)], num_kv_heads=1, group=4, dtype=torch.bfloat16, cache_dtype=cache_dtype,
            device=device, seed=size, padding_rows=size % 3,
        )  # fmt: skip
        batch.query[size - 1] = alone.query[0]
        for column in range(-(-170 // 16)):  # the same keys and values, in other blocks
            here, there = batch.block_tables[-1, column], alone.block_tables[0, column]
            batch.key_cache[here], batch.value_cache[here] = alone.key_cache[there], alone.value_cache[there]
        return run(batch, scale=0.125, split_size=64)[0][size - 1]

    alone = make_batch(
        [(1, 170)], num_kv_heads=1, group=4, dtype=torch.bfloat16, cache_dtype=cache_dtype, device=device, seed=5
    )
    expected = run(alone, scale=0.125, split_size=64)[0][0]
    for size in (1, 2, 3, 17, 128, 512):
        assert torch.equal(of_size(size), expected), f"batch of {size}"


@pytest.mark.gpu
def test_k18_a_captured_call_replays_from_1k_to_100k(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a CUDA device")
    lengths = [(1, 100_000), (1, 1_000), (1, 40_000), (1, 1)]
    batch = make_batch(lengths, head_size=128, dtype=torch.bfloat16, device=device)
    bounds = {"max_query_len": 1, "max_seq_len": 100_000}
    size = kernels.paged_attention_workspace(batch.query, batch.key_cache, batch.block_tables, **bounds)
    workspace, out = torch.zeros(size, device=device), torch.empty_like(batch.query)
    whole = batch.seq_lens.clone()
    batch.seq_lens.fill_(1)
    options = {"scale": 128**-0.5, "workspace": workspace, "out": out, **bounds}
    kernels.paged_attention(*batch.tensors(), **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.paged_attention(*batch.tensors(), **options)
    for share, padded in ((0.01, 0), (0.3, 2), (1.0, 0), (0.02, 3)):  # padded rows of a graph have length 0
        batch.seq_lens.copy_((whole * share).ceil())
        batch.seq_lens[len(lengths) - padded :] = 0
        out.fill_(torch.nan)
        graph.replay()
        expected = kernels.reference.paged_attention(*batch.tensors(), scale=128**-0.5)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
        assert (workspace[:1024] == 0).all(), "a counter was left behind"
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    kernels.paged_attention(*batch.tensors(), **options)
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before, "the op allocates"


@pytest.mark.gpu
def test_k24_tensors_on_another_device_than_the_current_one(device: str) -> None:
    if device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.cuda.device(0):
        for path in FORCED["cuda"]:
            check(make_batch([(1, 70), (9, 33)], device="cuda:1"), path=path)
        assert torch.cuda.current_device() == 0


def test_k11_more_rows_than_a_small_grid_dimension(device: str) -> None:
    rows = 65_537
    values = torch.randn(4, 1, 1, 8, device=device)
    tables = (torch.arange(rows, device=device, dtype=torch.int32) % 4)[:, None]
    starts = torch.arange(rows + 1, device=device, dtype=torch.int32)
    query = torch.randn(rows, 1, 8, device=device)
    lengths = torch.ones(rows, device=device, dtype=torch.int32)
    out = kernels.paged_attention(query, values, values, tables, starts, lengths, scale=1.0)
    assert torch.equal(out, values[tables[:, 0].long(), 0])


def test_k2_block_ids_past_16_bits(device: str) -> None:
    cache = torch.zeros(65_538, 1, 1, 8, device=device)
    cache[65_535], cache[65_536] = 1, 2
    tables = torch.tensor([[65_535], [65_536]], device=device, dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], device=device, dtype=torch.int32)
    lengths = torch.ones(2, device=device, dtype=torch.int32)
    query = torch.ones(2, 1, 8, device=device)
    for path in FORCED[device]:
        out = kernels.paged_attention(query, cache, cache, tables, starts, lengths, scale=1.0, path=path)
        assert out[:, 0, 0].tolist() == [1.0, 2.0], path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k1_offsets_past_32_bits(device: str, dtype: torch.dtype) -> None:
    """Blocks on both sides of 2^32 bytes and 2^31 elements; on the CPU the pages between are never touched."""
    heads, block_size, head_size = 8, 256, 256  # 2^19 elements a block
    cache = torch.empty(4098, heads, block_size, head_size, dtype=dtype, device=device)
    key = torch.randn(9, heads, head_size, device=device).to(dtype)
    query = torch.randn(1, heads, head_size, device=device).to(dtype)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    lengths = torch.tensor([9], dtype=torch.int32, device=device)
    results = []
    for block in (0, 2047, 2048, 4095, 4096, 4097):
        kernels.reshape_and_cache(key, key, cache, cache, block * block_size + torch.arange(9, device=device))
        assert torch.equal(cache[block, :, :9], key.transpose(0, 1))
        for path in FORCED[device]:
            table = torch.tensor([[block]], dtype=torch.int32, device=device)
            out = kernels.paged_attention(query, cache, cache, table, starts, lengths, scale=0.0625, path=path)
            results.append((path, out))
    for path, out in results:
        assert torch.equal(out, dict(results)[path]), "a far block differs from block 0"


@pytest.mark.gpu
def test_k18_graph_replays_with_other_lengths() -> None:
    from tests.conftest import cuda_reason

    if reason := cuda_reason():
        pytest.skip(reason)
    long = make_batch([(1, 3000), (1, 900), (1, 20), (1, 1)], dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(long.query)
    options = {"scale": 0.125, "max_query_len": 1, "max_seq_len": 3000}
    workspace = torch.zeros(
        max(
            1,
            kernels.paged_attention_workspace(
                long.query, long.key_cache, long.block_tables, max_query_len=1, max_seq_len=3000
            ),
        ),
        device="cuda",
    )
    saved_lengths, saved_query = long.seq_lens.clone(), long.query.clone()
    long.seq_lens.fill_(1)
    kernels.paged_attention(*long.tensors(), out=out, workspace=workspace, **options)  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.paged_attention(*long.tensors(), out=out, workspace=workspace, **options)  # type: ignore[arg-type]
    for lengths in (saved_lengths, torch.tensor([17, 0, 20, 0]), torch.tensor([2999, 899, 1, 1])):
        long.seq_lens.copy_(lengths)
        long.query.copy_(saved_query)
        out.fill_(torch.nan)
        graph.replay()
        expected = kernels.reference.paged_attention(*long.tensors(), scale=0.125)
        torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
