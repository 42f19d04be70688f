"""PagedAttention (SOSP 2023), Fig 18a: what looking blocks up in a table costs the decode kernel, on a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.analysis.paper_table import PaperTable, order_of
from experiments.analysis.statistics import paired_change
from experiments.config import ConfigError

if TYPE_CHECKING:
    import torch

    from research_engine.bench.kernel_peers import AttentionInputs
    from research_engine.bench.kernel_timing import Run

DESCRIPTION = (
    "PagedAttention Fig 18a: decode over paged blocks of 16 against the same kernel without a table (needs a GPU)"
)
BATCHES, CONTEXTS = (8, 32), (64, 128, 256)
HEADS, HEAD_SIZE, BLOCK_SIZE = 40, 128, 16  # OPT-13B's, and the paper's block
ROUNDS, REPEATS = 20, 30
KERNELS = ("contiguous", "paged", "torch")
PLAN = (
    f"compiles two kernels, and times {len(KERNELS)} with {len(BATCHES) * len(CONTEXTS)} shapes in {ROUNDS} rounds of "
    f"{REPEATS} launches"
)

# Each is in the kernel's source once. If the blocks of a request, and the requests, lie one behind the other, what a
# table's entry says is the index of the entry.
LOOK_UP = "p_.block_tables[c.row.request * p_.table_stride + p_.block_size.divide(key)]"
COMPUTED = "static_cast<int>(c.row.request * p_.table_stride + p_.block_size.divide(key))"
PREFETCH = "prefetch_l2(p_.block_tables + at);"


@dataclass(frozen=True)
class Timed:
    """Medians of one batch and context, in microseconds: kernel -> round -> median."""

    batch: int
    context: int
    medians: Mapping[str, Mapping[int, float]]

    def mean(self, kernel: str) -> float:
        values = self.medians[kernel]
        return sum(values.values()) / len(values)


def contiguous_source() -> str:
    """The decode kernel's source for a cache without a table: a block's place is computed and nothing is looked up.

    Raises:
        ValueError: the kernel's source was changed so that the look-up is not found.
    """
    from research_engine.kernels.jit.compilation import CSRC
    from research_engine.kernels.jit.variants import FAMILIES

    text = (CSRC / "cuda" / FAMILIES["decode"].source).read_text(encoding="utf-8")
    for old, new in ((LOOK_UP, COMPUTED), (PREFETCH, "")):
        if text.count(old) != 1:
            raise ValueError(f"{FAMILIES['decode'].source}: {old!r} is there {text.count(old)} times, not once")
        text = text.replace(old, new)
    return text


def table() -> PaperTable:
    """Raises ConfigError: there is no GPU, or its kernels were not built."""
    return paper_table_of(measure())


def device() -> torch.device:
    """The GPU to measure on. Raises ConfigError: there is none, or its kernels were not built."""
    from research_engine.bench.kernels import KernelBenchOptions, choose_device

    try:
        return choose_device(KernelBenchOptions(device="cuda"))
    except ValueError as error:
        raise ConfigError(f"papers/pagedattention_fig_18a: {error}") from error


def measure() -> list[Timed]:
    """Times the three kernels in turn, with cold caches, after their results were seen to agree.

    Raises:
        ConfigError: there is no GPU, or its kernels were not built.
    """
    from research_engine.bench.kernel_timing import CudaTimer

    gpu = device()
    timer, out = CudaTimer(), []
    with tempfile.TemporaryDirectory() as folder:
        paths = _paths(Path(folder))
        for batch in BATCHES:
            for context in CONTEXTS:
                runs = _runs(batch, context, paths, gpu)
                prepared = {name: timer.prepare(run, capturable=True) for name, run in runs.items()}
                medians: dict[str, dict[int, float]] = {name: {} for name in KERNELS}
                for number in range(ROUNDS):
                    for name in KERNELS if number % 2 else reversed(KERNELS):
                        seconds = sorted(timer.measure(prepared[name], REPEATS))
                        medians[name][number] = 1e6 * (seconds[(REPEATS - 1) // 2] + seconds[REPEATS // 2]) / 2
                out.append(Timed(batch, context, medians))
                timer.clear()
    return out


def _paths(folder: Path) -> dict[str, str]:
    """Both kernels through the same compiler, so that the look-up alone differs."""
    from research_engine.kernels.jit.compilation import CSRC
    from research_engine.kernels.jit.variants import FAMILIES, variant_of

    shipped = (CSRC / "cuda" / FAMILIES["decode"].source).read_text(encoding="utf-8")
    out = {}
    for name, text in (("paged", shipped), ("contiguous", contiguous_source())):
        file = folder / f"{name}.cuh"
        file.write_text(text, encoding="utf-8")
        out[name] = variant_of("decode", {"source": str(file)}).path
    return out


def _runs(batch: int, context: int, paths: Mapping[str, str], device: torch.device) -> dict[str, Run]:
    """The three kernels on the same queries, keys and values; a permutation spreads the paged blocks over memory.

    Raises:
        RuntimeError: a kernel's result is not torch's.
    """
    import torch

    from research_engine.bench import kernel_peers
    from research_engine.bench.kernel_problems import TOLERANCES, relative_error

    columns = -(-context // BLOCK_SIZE)
    random = torch.Generator(device).manual_seed(batch * context)
    shape = (batch * columns, HEADS, BLOCK_SIZE, HEAD_SIZE)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=device, generator=random) for _ in range(2))
    query = torch.randn((batch, HEADS, HEAD_SIZE), dtype=torch.bfloat16, device=device, generator=random)
    ordered = torch.arange(batch * columns, dtype=torch.int32, device=device)
    places = torch.randperm(batch * columns, device=device, generator=random)
    shuffled = (torch.empty_like(keys), torch.empty_like(values))
    for target, source in zip(shuffled, (keys, values), strict=True):
        target[places] = source
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)

    def inputs(caches: tuple[torch.Tensor, torch.Tensor], blocks: torch.Tensor) -> AttentionInputs:
        tables = blocks.view(batch, columns)
        return kernel_peers.AttentionInputs(
            query, *caches, tables, starts, lengths, queries=1, keys=context, scale=HEAD_SIZE**-0.5
        )

    contiguous = inputs((keys, values), ordered)
    paged = inputs(shuffled, places.to(torch.int32))
    runs: dict[str, Run] = {
        "contiguous": _attention(contiguous, paths["contiguous"]),
        "paged": _attention(paged, paths["paged"]),
        "torch": kernel_peers.sdpa(contiguous),
    }
    expected = runs["torch"]()[0].reshape(query.shape)
    for name in ("contiguous", "paged"):
        error = relative_error(runs[name]()[0], expected)
        if not error <= 2 * TOLERANCES[torch.bfloat16]:
            raise RuntimeError(f"{name}: relative error {error:.3g} against torch at batch {batch}, context {context}")
    return runs


def _attention(inputs: AttentionInputs, path: str) -> Run:
    import torch

    from research_engine import kernels

    out = torch.empty_like(inputs.query)
    size = kernels.paged_attention_workspace(
        inputs.query, inputs.key_cache, inputs.block_tables, path=path, max_query_len=1, max_seq_len=inputs.keys
    )
    workspace = torch.zeros(size, dtype=torch.float32, device=out.device) if size else None

    def run() -> tuple[torch.Tensor, ...]:
        kernels.paged_attention(
            inputs.query, inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.query_start_loc,
            inputs.seq_lens, scale=inputs.scale, out=out, path=path, workspace=workspace, max_query_len=1,
            max_seq_len=inputs.keys,
        )  # fmt: skip
        return (out,)

    return run


def paper_table_of(timed: list[Timed]) -> PaperTable:
    """Microseconds of each kernel, and the look-up's cost in percent with its 95 % interval over the rounds."""
    rows, claims = {}, []
    for one in timed:
        change = paired_change(one.medians["paged"], one.medians["contiguous"]).percent
        cost = f"{change.mean:+.1f} [{change.low:+.1f}, {change.high:+.1f}]"
        figures = [("", f"{one.mean(name):.2f}") for name in KERNELS]
        rows[f"batch {one.batch}, context {one.context}"] = [*figures, ("20 to 26", cost)]
    names = ("contiguous", "paged")
    for batch in BATCHES:
        own = [one for one in timed if one.batch == batch]
        means = [sum(one.mean(name) for one in own) / len(own) for name in names]
        text = f"batch {batch}: looking blocks up makes the kernel slower, over the contexts"
        claims.append(order_of(text, names, means, 2))
    return PaperTable(
        title="Microseconds of decode attention, OPT-13B's heads, bfloat16, cold caches",
        source="""Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP
        2023, Fig 18a: 20 to 26 % above FasterTransformer's kernel""",
        columns=["contiguous, no table", "paged, blocks of 16", "torch, contiguous", "cost of the table (%)"],
        rows=rows,
        verdicts=claims,
        differs="""The paper compares two libraries' kernels; here both are this engine's decode kernel, compiled alike,
        and one computes the place of a block where the other looks it up, so that the table alone differs. torch's
        kernel on the same contiguous cache is there for scale. Times are medians of 30 launches out of a CUDA graph, in
        20 rounds of turns; the launch itself, some 3 us, is inside each.""",
    )
