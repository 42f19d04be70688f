"""Wrong arguments of paged attention get an error that names the argument and the rule, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from research_engine import kernels
from tests.kernels.attention_cases import Batch, make_batch


def call(batch: Batch, **options: object) -> torch.Tensor:
    return kernels.paged_attention(*batch.tensors(), **{"scale": 0.1, "check_values": True, **options})  # type: ignore[arg-type]


@pytest.fixture
def batch(device: str) -> Batch:
    return make_batch([(1, 20), (5, 9)], block_size=8, spare_columns=0, device=device)


def test_the_batch_itself_is_accepted(batch: Batch) -> None:
    assert not call(batch).isnan().any()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda b: {"query": b.query[0]}, ValueError, r"query: shape \[4, 64\].*\[T, Hq, D\]"),
        (lambda b: {"query": b.query[:, :3]}, ValueError, "Hq = 3 has to be a multiple of Hkv = 2"),
        (lambda b: {"query": b.query.double()}, TypeError, "query: torch.float64"),
        (
            lambda b: {"query": b.query.transpose(1, 2).contiguous().transpose(1, 2)},
            ValueError,
            "query: .*last dimension",
        ),
        (lambda b: {"key_cache": b.key_cache[..., :32]}, ValueError, r"key_cache: .*D = 64"),
        (lambda b: {"key_cache": b.key_cache.bfloat16()}, ValueError, "key_cache: .*dtype"),
        (lambda b: {"value_cache": b.value_cache[1:]}, ValueError, "value_cache: .*as key_cache"),
        (
            lambda b: {"value_cache": b.value_cache.transpose(2, 3).contiguous().transpose(2, 3)},
            ValueError,
            "value_cache: .*tile",
        ),
        (lambda b: {"block_tables": b.block_tables.long()}, ValueError, "block_tables: .*int32"),
        (lambda b: {"seq_lens": b.seq_lens[:1]}, ValueError, r"seq_lens: shape \[1\].*\[R\] = \[2\]"),
        (lambda b: {"seq_lens": b.seq_lens.long()}, TypeError, "seq_lens: torch.int64; torch.int32 is needed"),
        (lambda b: {"query_start_loc": b.query_start_loc[:2]}, ValueError, r"query_start_loc: .*\[R \+ 1\] = \[3\]"),
    ],
)
def test_shapes_dtypes_and_strides(batch: Batch, change: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(replace(batch, **change(batch)))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"path": "fast"}, ValueError, "path='fast'.*decode, prefill"),
        ({"sliding_window": 0}, ValueError, "sliding_window=0.*positive"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0.*positive"),
        ({"split_size": 0}, ValueError, "split_size=0.*positive"),
        ({"max_query_len": 4}, ValueError, "request 1 has 5 query rows, above max_query_len = 4"),
        ({"max_seq_len": 19}, ValueError, r"seq_lens\[0\] is 20, above max_seq_len = 19"),
        ({"out": torch.empty(6, 4, 32)}, ValueError, "out: .*query's"),
        ({"lse": torch.empty(6, 3)}, ValueError, r"lse: .*\[T, Hq\] = \[6, 4\]"),
        ({"sinks": torch.empty(3)}, ValueError, r"sinks: .*\[Hq\] = \[4\]"),
        ({"alibi_slopes": torch.empty(4).double()}, TypeError, "alibi_slopes: torch.float64"),
    ],
)
def test_options(batch: Batch, device: str, options: dict[str, object], error: type[Exception], words: str) -> None:
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    with pytest.raises(error, match=words):
        call(batch, **moved)


def test_k13_length_past_the_table(batch: Batch) -> None:
    batch.seq_lens[0] = 25
    with pytest.raises(
        ValueError, match=r"seq_lens\[0\] is 25, expected 0 to 24 \(block_tables has 3 columns of 8 slots\)"
    ):
        call(batch)


@pytest.mark.parametrize("block", [-1, 10**6])
def test_block_outside_of_the_cache(batch: Batch, block: int) -> None:
    batch.block_tables[1, 1] = block
    with pytest.raises(ValueError, match=rf"block_tables\[1, 1\] is {block}, expected 0 to "):
        call(batch)


@pytest.mark.parametrize(
    ("starts", "words"), [([1, 2, 6], "expected 0"), ([0, 6, 5], "at least 6"), ([0, 1, 7], "at most 6")]
)
def test_query_starts_that_do_not_fit(batch: Batch, starts: list[int], words: str) -> None:
    batch.query_start_loc.copy_(torch.tensor(starts))
    with pytest.raises(ValueError, match=words):
        call(batch)


def test_the_cpu_refuses_a_workspace_and_the_simple_path() -> None:
    batch = make_batch([(1, 20)])
    with pytest.raises(ValueError, match="workspace: .*leave it out"):
        call(batch, workspace=torch.empty(10))
    with pytest.raises(ValueError, match="path='simple'; on cpu it is one of auto, decode, prefill"):
        call(batch, path="simple")


def test_float16_on_the_cpu_names_what_is_built() -> None:
    with pytest.raises(TypeError, match=r"torch.float16 on cpu; the kernels there take torch.float32, torch.bfloat16"):
        call(make_batch([(1, 20)], dtype=torch.float16))


@pytest.mark.gpu
def test_devices_may_not_be_mixed(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a CUDA device")
    batch = make_batch([(1, 20)], device=device)
    with pytest.raises(ValueError, match="seq_lens is on cpu, query on cuda:0"):
        kernels.paged_attention(*replace(batch, seq_lens=batch.seq_lens.cpu()).tensors(), scale=0.1)
