"""PagedAttention (SOSP 2023), Fig 19b, on a GPU: swapping against recomputing end to end, by block size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experiments.analysis.paper_table import PaperTable, Verdict, order_of
from experiments.config import ConfigError, TrialSettings
from experiments.papers.pagedattention_fig_19a_gpu import copy_each_block

if TYPE_CHECKING:
    from experiments.backend import Backend
    from research_engine.engine.contract import Batch, Executor, Pending
    from research_engine.executors.torch_executor import TorchExecutor

DESCRIPTION = "PagedAttention Fig 19b on a GPU: recompute against two ways to swap, end to end, by block size"
BLOCK_SIZES = (2, 4, 16)
RECOMPUTE, COPIES, KERNEL = "recompute", "swap, a copy a block", "swap, this engine"
SETTINGS: dict[str, Any] = {
    "model": "dummy:llama3-8b",
    "device": "cuda",
    "dtype": "bfloat16",
    "kv_cache_memory": 1,  # 8,192 slots
    "swap_space": 4,
    "scheduler": "fcfs",
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2560,
    "enable_prefix_caching": False,
    "workload": {
        "num_requests": 80,
        "arrivals": {"process": "at_once"},
        "lengths": {"source": "lognormal", "max_prompt": 512, "max_output": 512},
    },
}
PLAN = (
    f"serves {SETTINGS['workload']['num_requests']} requests with {SETTINGS['model']} in {3 * len(BLOCK_SIZES)} runs: "
    f"{RECOMPUTE}, and two ways to swap, at {len(BLOCK_SIZES)} block sizes"
)


class CopyEachBlock:
    """An executor that moves swapped blocks as the paper's system does, and leaves the rest to another.

    Args:
        inner: computes the batches; its caches are changed.
    """

    def __init__(self, inner: TorchExecutor) -> None:
        self._inner = inner

    def execute(self, batch: Batch) -> Pending:
        """See `Executor`."""
        copy_each_block(self._inner.kv_cache, self._inner.host_cache, batch.swap_out)
        copy_each_block(self._inner.host_cache, self._inner.kv_cache, batch.swap_in)
        return self._inner.execute(replace(batch, swap_out=[], swap_in=[]))

    def shutdown(self) -> None:
        """See `Executor`."""
        self._inner.shutdown()


@dataclass(frozen=True)
class Served:
    """What a run came to: mean seconds from arrival to the last token, output tokens a second, preemptions."""

    e2e: float
    throughput: float
    preemptions: int


def check() -> None:
    """Raises ConfigError: there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("papers/pagedattention_fig_19b_gpu: torch finds no CUDA device; without '_gpu' it needs none")


def table() -> PaperTable:
    """Raises ConfigError: there is no GPU."""
    import torch

    from experiments.backend import RealBackend

    check()
    backend = RealBackend()
    return paper_table_of(measure(backend, SETTINGS), torch.cuda.get_device_name())


def measure(backend: Backend, given: Mapping[str, Any]) -> dict[tuple[str, int], Served]:
    """Every way and block size over the same requests: (way, block size) -> figures."""
    out = {}
    for size in BLOCK_SIZES:
        for way in (RECOMPUTE, COPIES, KERNEL):
            mode = "recompute" if way == RECOMPUTE else "swap"
            settings = TrialSettings.model_validate(
                {**given, "block_size": size, "scheduler_params": {"preemption": mode}}
            )
            out[way, size] = serve(backend, settings, by_copies=way == COPIES)
    return out


def serve(backend: Backend, settings: TrialSettings, *, by_copies: bool) -> Served:
    """One run on a fresh engine."""
    from experiments.workloads import build_workload
    from research_engine import metrics
    from research_engine.engine.driver import replay

    backend.prepare(settings)
    workload = build_workload(settings.workload, 0, vocab_size=backend.vocab_size())
    engine = backend.engine(settings, 0)
    executor: Executor = engine.executor
    if by_copies:
        engine.executor = CopyEachBlock(executor)  # type: ignore[arg-type]
    try:
        report = replay(engine, workload.arrivals)
    finally:
        engine.executor.shutdown()
    found = metrics.summarize(
        engine.records, block_size=settings.block_size, start=report.start, end=report.end,
        bytes_per_block=backend.bytes_per_block(settings),
    )  # fmt: skip
    if found["num_completed"] != len(workload.arrivals):
        raise RuntimeError(f"{found['num_completed']} of {len(workload.arrivals)} requests were completed")
    return Served(found["e2e"]["mean"], found["output_throughput"], found["preemption"]["events"])


def paper_table_of(found: Mapping[tuple[str, int], Served], machine: str) -> PaperTable:
    """The table; the paper has its figures in plots alone."""

    def order(text: str, *cells: tuple[str, int]) -> Verdict:
        return order_of(text, [f"{way}, {size}" for way, size in cells], [found[cell].e2e for cell in cells], 2)

    return PaperTable(
        title=f"Recompute against swap, Llama-3-8B's shape, {machine}",
        source="""Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP
        2023, Fig 19b (OPT-13B on an A100, ShareGPT); plots alone""",
        columns=["E2E mean (s)", "Output tokens/s", "Preemptions"],
        rows={
            f"{way}, {size}": [("", f"{one.e2e:.2f}"), ("", f"{one.throughput:.0f}"), ("", f"{one.preemptions}")]
            for (way, size), one in sorted(found.items())
        },
        verdicts=[
            order("a copy a block: the smaller the blocks the slower", (COPIES, 16), (COPIES, 4), (COPIES, 2)),
            order("blocks of 2: recomputing is faster", (RECOMPUTE, 2), (COPIES, 2)),
            order("(not the paper's) blocks of 2: one kernel for all is faster than a copy for each", (KERNEL, 2),
                  (COPIES, 2)),
        ],
        differs="""Random weights, forced lengths of ShareGPT's statistics, 80 requests that arrive at once in 8,192
        slots. The paper's system copies each block, layer and side; so does the second way here, whose copies are
        queued by torch. The third is this engine's own: one kernel moves all small blocks of a step. The GPU is faster
        against its host link than the paper's.""",
    )  # fmt: skip
