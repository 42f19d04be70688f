"""PagedAttention (SOSP 2023), Fig 19a, on a GPU: what a preempted request costs by block size and way of swapping."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.analysis.paper_table import PaperTable, Verdict, order_of
from experiments.config import ConfigError

if TYPE_CHECKING:
    import torch

    from research_engine.options import EngineOptions

DESCRIPTION = "PagedAttention Fig 19a on a GPU: milliseconds to swap or recompute 256 tokens, by block size"
MODEL, TOKENS = "dummy:opt-13b", 256
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPEATS = 5
COPIES, KERNEL, AGAIN = "swap out and in, a copy a block", "swap out and in, this engine", "recompute"
PLAN = f"times two ways to swap at {len(BLOCK_SIZES)} block sizes, and a recompute on {MODEL}, {REPEATS} times each"
Swap = Callable[["torch.Tensor", "torch.Tensor", Sequence[tuple[int, int]]], None]


def copy_each_block(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """A copy for every block, layer and side (keys, values), as the paper's system moves blocks; `target` is changed.

    Args:
        source: `[L, 2, N, Hkv, B, D]`.
        target: `[L, 2, M, Hkv, B, D]`; of the two the one in host memory is pinned.
        pairs: (block of source, block of target).
    """
    planes, places = source.flatten(0, 1), target.flatten(0, 1)
    for block, place in pairs:
        for there, here in zip(places[:, place].unbind(), planes[:, block].unbind(), strict=True):
            there.copy_(here, non_blocking=True)


def swap_by_kernel(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """As this engine moves blocks: all small ones with one kernel."""
    import torch

    from research_engine import kernels

    kernels.swap_blocks(source, target, torch.tensor(pairs, dtype=torch.int64))


def check() -> None:
    """Raises ConfigError: there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("papers/pagedattention_fig_19a_gpu: torch finds no CUDA device; without '_gpu' it needs none")


def table() -> PaperTable:
    """Raises ConfigError: there is no GPU."""
    import torch

    from research_engine.options import EngineOptions

    check()
    options = EngineOptions(
        model=MODEL, device="cuda", dtype="bfloat16", num_blocks=2 * TOKENS, max_num_seqs=4, max_model_len=2 * TOKENS,
        max_num_batched_tokens=TOKENS, scheduler="fcfs", enable_prefix_caching=False, skip_tokenizer_init=True,
    )  # fmt: skip
    again = recompute_milliseconds(options)
    torch.cuda.empty_cache()
    ours, device = {}, torch.device("cuda")
    for size in BLOCK_SIZES:
        ours[size] = {
            COPIES: swap_milliseconds(copy_each_block, size, device),
            KERNEL: swap_milliseconds(swap_by_kernel, size, device),
            AGAIN: again,
        }
    return paper_table_of(ours, torch.cuda.get_device_name())


def swap_milliseconds(swap: Swap, block_size: int, device: torch.device) -> float:
    """Median of moving the request's blocks out and in again, from the first call to the end of the last copy.

    The blocks lie apart in both caches, as those of a request that grew beside others do.
    """
    import torch

    from research_engine.loading.dummy import DUMMY_MODELS

    shape = DUMMY_MODELS[MODEL].config
    blocks = TOKENS // block_size
    tile = (shape.num_layers, 2, 2 * blocks, shape.num_kv_heads, block_size, shape.head_dim)
    on_device = torch.randn(tile, dtype=torch.bfloat16, device=device)
    on_host = torch.empty(tile, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    out = [(2 * index, 2 * (blocks - 1 - index)) for index in range(blocks)]
    back = [(place, block) for block, place in out]

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    before, taken = on_device.clone(), []
    for _ in range(1 + REPEATS):  # the first one warms up
        wait()
        begin = time.perf_counter()
        swap(on_device, on_host, out)
        swap(on_host, on_device, back)
        wait()
        taken.append(1e3 * (time.perf_counter() - begin))
        if not torch.equal(on_device, before):
            raise RuntimeError("blocks came back changed")
    return sorted(taken[1:])[REPEATS // 2]


def recompute_milliseconds(options: EngineOptions) -> float:
    """Median of the steps that compute 256 tokens of a prompt at once and draw one token, each alone on the engine."""
    from research_engine import SamplingParams
    from research_engine.engine.driver import Arrival, replay
    from research_engine.llm import build_engine, load

    engine = build_engine(options, load(options, progress=False))
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    prompt = [10 + index % 100 for index in range(TOKENS)]
    try:
        for index in range(2 + REPEATS):  # one after the other
            replay(engine, [Arrival(0.0, str(index), prompt, sampling)])
        taken = [1e3 * (s.finished - s.started) for s in engine.records.steps if sum(s.num_tokens) == TOKENS]
    finally:
        engine.executor.shutdown()
    return sorted(taken[2:])[(len(taken) - 2) // 2]


def paper_table_of(ours: Mapping[int, Mapping[str, float]], machine: str) -> PaperTable:
    """The table of figures by block size; the paper has its own in a plot alone."""

    def order(text: str, name: str, *sizes: int) -> Verdict:
        return order_of(text, [f"{size}" for size in sizes], [ours[size][name] for size in sizes], 1)

    def at(text: str, size: int, *names: str) -> Verdict:
        return order_of(text, names, [ours[size][name] for name in names], 1)

    columns = [COPIES, KERNEL, AGAIN]
    return PaperTable(
        title=f"Milliseconds that a preempted request of {TOKENS} tokens costs, OPT-13B's shape, {machine}",
        source="""Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP
        2023, Fig 19a; a plot alone""",
        columns=columns,
        rows={f"blocks of {size}": [("", f"{found[name]:.1f}") for name in columns] for size, found in ours.items()},
        verdicts=[
            order("a copy a block: the smaller the blocks the more swapping costs", COPIES, 64, 16, 4, 1),
            at("blocks of 1: recomputing costs less", 1, AGAIN, COPIES),
            at("blocks of 256: swapping costs less", 256, COPIES, AGAIN),
            at("(not the paper's) blocks of 1: one kernel for all blocks costs less than a copy for each", 1, KERNEL,
               COPIES),
        ],
        differs="""Random weights; the GPU is faster against its host link than the paper's. The first column moves
        blocks as the paper's system does, with a copy for each block, layer and side (queued by torch, some
        microseconds each); the second as this engine does. Recomputing is a step that computes the prompt at once,
        whatever the block size. Wall clock, medians of 5.""",
    )  # fmt: skip
