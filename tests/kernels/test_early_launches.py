"""Kernels that may start before their predecessor has ended wait for it before they do anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from research_engine import kernels
from tests.kernels.attention_cases import make_batch

SOURCES = [file for file in (Path(__file__).parents[2] / "csrc" / "cuda").glob("*.cu*") if file.name != "launch.cuh"]
EARLY = re.compile(r"(\w+)\(const __grid_constant__ AfterPredecessor<[^()]*> after\) \{\s*([^;]*);")


def kernels_of(source: Path) -> dict[str, str]:
    """The kernels of a file that may start early, and the first statement of each."""
    return dict(EARLY.findall(source.read_text()))


def test_the_wait_is_the_first_statement_of_every_kernel_that_may_start_early() -> None:
    found = {name: first for source in SOURCES for name, first in kernels_of(source).items()}
    assert {"rms_norm_kernel", "silu_and_mul_kernel", "rotary_kernel", "decode_mma_kernel"} <= found.keys()
    late = [name for name, first in found.items() if not re.fullmatch(r"const [\w<>]+& p = after\.wait\(\)", first)]
    assert not late, f"{late}: blocks that leave or read before after.wait() break the order of the kernels before them"


def test_the_attribute_is_set_in_one_place() -> None:
    """Outside launch.cuh it would reach kernels whose parameters do not make them wait."""
    texts = {source.name: source.read_text() for source in SOURCES}
    assert not [name for name, text in texts.items() if "ProgrammaticStreamSerialization" in text]
    taken = {name: text.count("__grid_constant__ AfterPredecessor<") for name, text in texts.items()}
    unmatched = [source.name for source in SOURCES if taken[source.name] != len(kernels_of(source))]
    assert not unmatched, f"{unmatched}: a kernel that takes AfterPredecessor is not written as the others are"


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_chain_in_a_graph_equals_its_kernels_one_by_one(device: str) -> None:
    """Each reads what the one before it wrote, and torch's own kernels, launched plainly, stand between some."""
    torch.manual_seed(0)
    rows, heads, kv_heads, head_size = 3, 8, 2, 64
    hidden = heads * head_size
    batch = make_batch(
        [(1, 300)] * rows, num_kv_heads=kv_heads, group=4, head_size=head_size, dtype=torch.bfloat16, device=device
    )
    caches, tables, starts, lengths = (batch.key_cache, batch.value_cache), *batch.tensors()[3:]
    slots = tables[:, 299 // 16].long() * 16 + 299 % 16
    positions = lengths.long() - 1
    table = torch.randn(300, head_size, device=device)
    scale = {"dtype": torch.bfloat16, "device": device}
    weight = torch.randn(hidden, **scale)
    start, state = torch.randn(rows, hidden, **scale), torch.randn(rows, hidden, **scale)
    size = kernels.paged_attention_workspace(
        torch.empty(rows, heads, head_size, **scale), caches[0], tables, max_query_len=1, max_seq_len=300
    )
    workspace = torch.zeros(max(size, 1), device=device)

    def chain(after_each: Callable[[], None]) -> torch.Tensor:
        x, residual = start.clone(), state.clone()
        for _ in range(8):
            kernels.fused_add_rms_norm(x, residual, weight, 1e-5)
            after_each()
            qkv = torch.cat([x, x[:, : 2 * kv_heads * head_size]], dim=1).view(rows, -1, head_size)
            query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
            after_each()
            kernels.rotary_and_cache(positions, query, key, value, table, *caches, slots)
            after_each()
            attended = kernels.paged_attention(
                query, *caches, tables, starts, lengths, scale=0.125, workspace=workspace, max_query_len=1,
                max_seq_len=300,
            )  # fmt: skip
            after_each()
            x = kernels.silu_and_mul(torch.cat([attended.reshape(rows, hidden), x], dim=1))
            after_each()
        return x

    expected = chain(torch.cuda.synchronize)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = chain(lambda: None)
    for _ in range(50):
        actual.fill_(float("nan"))
        graph.replay()
        assert torch.equal(actual, expected)
