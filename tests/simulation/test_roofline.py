"""The roofline: hand-computed times, laws that hold for every model and GPU, and figures measured on an H200."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from research_engine.loading.dummy import DUMMY_MODELS
from research_engine.simulation.build import kv_blocks_of
from research_engine.simulation.cost_model import CostModel, Work
from research_engine.simulation.gpu_sheet import SHEETS, GpuSheet, available_sheets, load_sheet
from research_engine.simulation.roofline import RooflineCost
from tests.simulation.batches import batch_of, decodes

LLAMA_8B = DUMMY_MODELS["dummy:llama3-8b"].config
SHAPE = SimpleNamespace(
    vocab_size=1000, hidden_size=100, intermediate_size=300, num_layers=2, num_heads=10, num_kv_heads=5, head_dim=10
)
ROUND = GpuSheet(
    name="round numbers", memory_gib=1.0, memory_bandwidth=1e6, flops=1e9, memory_efficiency=0.5,
    gemm_efficiency=((1, 0.5), (100, 1.0)), attention_efficiency=0.5, kernel_seconds=0.0, host_link_bandwidth=1e5,
    host_copy_seconds=0.0, gpu_link_bandwidth=1e4, gpu_link_seconds=0.25, host_seconds=0.0,
    host_seconds_per_sequence=0.0,
    sources=dict.fromkeys((
        "memory_gib", "memory_bandwidth", "flops", "memory_efficiency", "gemm_efficiency", "attention_efficiency",
        "kernel_seconds", "host_link_bandwidth", "host_copy_seconds", "gpu_link_bandwidth", "gpu_link_seconds",
        "host_seconds", "host_seconds_per_sequence"), "made up"),
)  # fmt: skip


def test_it_is_a_cost_model():
    assert isinstance(RooflineCost(SHAPE, ROUND), CostModel)


def test_a_linear_layer_of_one_row_takes_the_time_of_its_weights():
    # 2 x (100 x 300 + 1 x 400) bytes at 1 MB/s, half of which is reached
    assert RooflineCost(SHAPE, ROUND).linear(1, 100, 300) == pytest.approx(2 * 30_400 / 1e6 / 0.5)


def test_a_linear_layer_of_many_rows_takes_the_time_of_its_operations():
    # 10,000 rows: 2 x 10,000 x 100 x 300 operations at 1 GFLOP/s against 2 x (30,000 + 4,000,000) bytes at 1 MB/s
    sheet = dataclasses.replace(ROUND, memory_bandwidth=1e9)
    assert RooflineCost(SHAPE, sheet).linear(10_000, 100, 300) == pytest.approx(0.6)


def test_a_swapped_block_takes_its_bytes_over_the_link_and_two_copies_a_layer():
    # 2 layers x 2 x 5 heads x 10 x 16 slots x 2 bytes at 100 kB/s; 2 x 2 copies of 0.25 s
    plain = RooflineCost(SHAPE, ROUND)
    copied = RooflineCost(SHAPE, dataclasses.replace(ROUND, host_copy_seconds=0.25))
    still, moved = Work(tokens=1, sequences=1, draws=1), Work(tokens=1, sequences=1, draws=1, blocks_moved=3)
    assert plain.price(moved) - plain.price(still) == pytest.approx(3 * 6400 / 1e5)
    assert copied.price(moved) - copied.price(still) == pytest.approx(3 * (6400 / 1e5 + 4 * 0.25))


def test_efficiency_goes_with_the_logarithm_of_the_rows():
    # halfway between 1 and 100 rows on a logarithmic scale, 10 rows reach (0.5 + 1.0) / 2
    sheet = dataclasses.replace(ROUND, memory_bandwidth=1e9)
    assert RooflineCost(SHAPE, sheet).linear(10, 100, 300) == pytest.approx(2 * 10 * 30_000 / 1e9 / 0.75)


def test_a_layer_of_more_rows_takes_no_less_where_efficiency_rises_faster_than_the_work():
    # 10 rows move hardly more bytes than one, and would reach half as much again of the bandwidth
    cost = RooflineCost(SHAPE, ROUND)
    assert cost.linear(10, 100, 300) == cost.linear(1, 100, 300)


def test_decode_attention_reads_keys_and_values_once():
    # 2 layers x 2 (K, V) x 5 heads x 10 x 2 bytes a token of context, at half of 1 MB/s
    work = Work(tokens=3, sequences=3, draws=3, decodes=3, decode_kv=700, decode_kv_max=400)
    assert RooflineCost(SHAPE, ROUND).attention(work) == pytest.approx(700 * 400 / 0.5e6)


def test_prefill_attention_counts_causal_pairs():
    # 4 tokens after 10: 11 + 12 + 13 + 14 = 50 pairs, 4 x 10 x 10 operations each and layer; memory made free
    sheet = dataclasses.replace(ROUND, memory_bandwidth=1e12)
    work = Work(tokens=4, sequences=1, draws=1, prefills=((4, 10),))
    assert RooflineCost(SHAPE, sheet).attention(work) == pytest.approx(2 * 50 * 400 / 0.5e9)


def test_a_swapped_block_crosses_the_host_link():
    batch = batch_of()
    batch.swap_out = [(0, 0), (1, 1)]
    # 2 blocks x 16 tokens x 400 bytes at 100 kB/s
    assert RooflineCost(SHAPE, ROUND).seconds(batch) == pytest.approx(2 * 16 * 400 / 1e5)


def test_a_step_is_the_sum_of_its_parts():
    sheet = dataclasses.replace(ROUND, kernel_seconds=0.01, host_seconds=0.5, host_seconds_per_sequence=0.1)
    cost, batch = RooflineCost(SHAPE, sheet), decodes(3, context=100)
    parts = cost.dense(3) + cost.head(3) + cost.attention(Work(3, 3, 3, 3, 300, 100))
    assert cost.seconds(batch) == pytest.approx(parts + 0.01 * (9 * 2 + 4) + 0.5 + 3 * 0.1)


@pytest.mark.parametrize("sheet", available_sheets())
@given(tokens=st.integers(1, 40_000), more=st.integers(1, 2_000), context=st.integers(1, 200_000))
@example(tokens=189, more=2, context=1)  # an A100 of 40 GB is still bound by memory where its efficiency rises
def test_more_work_never_takes_less_time(sheet, tokens, more, context):
    cost = RooflineCost(LLAMA_8B, load_sheet(sheet))

    def prefill(count: int, before: int) -> float:
        return cost.price(Work(count, 1, 1, prefills=((count, before),)))

    def decode(count: int, total: int) -> float:
        return cost.price(Work(count, count, count, count, total, total // count))

    assert prefill(tokens, context) <= prefill(tokens + more, context)
    assert prefill(tokens, context) <= prefill(tokens, context + more)
    assert decode(tokens, context) <= decode(tokens + more, context)
    assert decode(tokens, context) <= decode(tokens, context + more)


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 4.93), (8, 4.98), (32, 5.55), (128, 7.20), (256, 10.96)])
def test_decode_steps_on_an_h200_are_near_those_of_vllm(batch, milliseconds):
    """vLLM 0.22.1, Llama-3.1-8B shape, 128 prompt and 128 output tokens; another engine, so 10 % is near."""
    cost = RooflineCost(LLAMA_8B, load_sheet("h200"))
    assert cost.seconds(decodes(batch, context=192)) * 1e3 == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(2048, 52.0), (8000, 207.0)])
def test_prefill_on_an_h200_is_near_that_of_vllm(tokens, milliseconds):
    cost = RooflineCost(LLAMA_8B, load_sheet("h200"))
    assert cost.seconds(batch_of((tokens, 0))) * 1e3 == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize("name", ["a100", "a100-40gb", "h100", "h200", "l40s", "rtx4090"])
def test_every_number_of_a_sheet_has_its_source(name):
    assert name in available_sheets()
    load_sheet(name)  # refuses a field without one


def test_a_number_without_a_source_is_refused(tmp_path):
    raw = json.loads((SHEETS / "h200.json").read_text())
    raw["sources"].pop("kernel_seconds")
    (tmp_path / "own.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="no source is given for kernel_seconds"):
        load_sheet(str(tmp_path / "own.json"))


def test_an_unknown_gpu_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match="no GPU sheet 'h20'; there are h200, "):
        load_sheet("h20")


def test_an_h200_holds_the_cache_that_is_left_beside_8b_weights():
    # 0.9 x 139 GiB less 15 GiB of weights and some activations, at 128 KiB a token
    tokens = 16 * kv_blocks_of(LLAMA_8B, load_sheet("h200"))
    assert 100 < tokens * 131_072 / 2**30 < 0.9 * 139 - 15


def test_a_model_too_large_for_a_gpu_is_refused_with_the_numbers():
    huge = dataclasses.replace(LLAMA_8B, num_layers=200)
    with pytest.raises(ValueError, match="hold weights of 83"):
        kv_blocks_of(huge, load_sheet("rtx4090"))


def test_five_gpus_share_what_can_be_divided():
    one, five = RooflineCost(SHAPE, ROUND), RooflineCost(SHAPE, ROUND, tensor_parallel=5)
    work = Work(tokens=3, sequences=3, draws=3, decodes=3, decode_kv=700, decode_kv_max=400)
    assert five.attention(work) == pytest.approx(one.attention(work) / 5)
    # qkv: 100 -> (10 + 2 x 5) x 10 / 5; output: 20 -> 100; gate and up: 100 -> 2 x 60; down: 60 -> 100
    layer = five.linear(1, 100, 40) + five.linear(1, 20, 100) + five.linear(1, 100, 120) + five.linear(1, 60, 100)
    alone = dataclasses.replace(ROUND, gpu_link_seconds=0.0, gpu_link_bandwidth=1e30)
    elements = 8 * 100 + 2 * 40 + 3 * 60 + 2 * 20  # norms whole, the rest in fifths
    assert RooflineCost(SHAPE, alone, tensor_parallel=5).dense(1) == pytest.approx(2 * (layer + elements * 2 / 0.5e6))


def test_an_all_reduce_is_a_ring():
    # every GPU sends 2 x 4/5 of 1,000 bytes at 10 kB/s after a quarter of a second
    assert RooflineCost(SHAPE, ROUND, tensor_parallel=5).all_reduce(1000) == pytest.approx(0.25 + 0.16)
    assert RooflineCost(SHAPE, ROUND).all_reduce(1000) == 0.0


def test_more_gpus_make_a_large_prefill_faster_and_leave_room_for_more_kv():
    sheet = load_sheet("h100")
    times = [RooflineCost(LLAMA_8B, sheet, tensor_parallel=n).seconds(batch_of((8000, 0))) for n in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    blocks = [kv_blocks_of(LLAMA_8B, sheet, tensor_parallel=n) for n in (1, 2, 4)]
    assert blocks == sorted(blocks)
    assert blocks[1] > 2 * blocks[0]


@pytest.mark.parametrize(
    ("gpus", "rule"),
    [(0, "must be an integer >= 1"), (3, "must divide the model's num_heads, 10"), (2, "num_kv_heads, 5, must divide")],
)
def test_a_model_that_cannot_be_divided_is_refused(gpus, rule):
    with pytest.raises(ValueError, match=rule):
        RooflineCost(SHAPE, ROUND, tensor_parallel=gpus)


def test_gpus_beyond_the_kv_heads_hold_copies_of_them():
    shape = SimpleNamespace(**{**vars(SHAPE), "num_kv_heads": 1})
    work = Work(tokens=1, sequences=1, draws=1, decodes=1, decode_kv=700, decode_kv_max=700)
    quick = dataclasses.replace(ROUND, flops=1e12)  # bytes alone count
    assert RooflineCost(shape, quick, tensor_parallel=10).attention(work) == RooflineCost(shape, quick).attention(work)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"name": 3}'])
def test_a_file_that_is_no_sheet_is_refused_with_its_name(content, tmp_path):
    (tmp_path / "own.json").write_text(content)
    with pytest.raises(ValueError, match=r"own\.json"):
        load_sheet(str(tmp_path / "own.json"))


def test_a_text_for_a_number_is_refused(tmp_path):
    raw = json.loads((SHEETS / "h200.json").read_text())
    (tmp_path / "own.json").write_text(json.dumps({**raw, "flops": "many"}))
    with pytest.raises(ValueError, match=r"own\.json"):
        load_sheet(str(tmp_path / "own.json"))
