"""Reproductions that need a GPU: what of them can be seen without one, on small shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.backend import RealBackend
from experiments.config import TrialSettings, load_experiment
from experiments.kernel_settings import KernelSettings
from experiments.papers import pagedattention_fig_18a, pagedattention_fig_19a_gpu, pagedattention_fig_19b_gpu
from experiments.papers.pagedattention_fig_18a import KERNELS, Timed, contiguous_source
from experiments.papers.pagedattention_fig_19a_gpu import AGAIN, BLOCK_SIZES, COPIES, KERNEL, copy_each_block
from experiments.papers.pagedattention_fig_19b_gpu import CopyEachBlock, Served
from experiments.run import main
from experiments.workloads import build_workload
from research_engine.engine.driver import replay
from research_engine.kernels import jit, reference
from research_engine.kernels.jit import nvrtc
from research_engine.options import EngineOptions

needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")


@needs_none
@pytest.mark.parametrize("name", ["18a", "18b_gpu", "19a_gpu", "19b_gpu"])
def test_without_a_gpu_they_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"papers/pagedattention_fig_{name}", "--out", str(tmp_path / "run")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_kernel_without_a_table_is_the_shipped_one_but_for_the_look_up() -> None:
    source = contiguous_source()
    assert pagedattention_fig_18a.LOOK_UP not in source and source.count(pagedattention_fig_18a.COMPUTED) == 1
    assert source.count("p_.block_tables") == 0


def needs_nvrtc() -> None:
    try:
        nvrtc.load()
    except ImportError as error:
        pytest.skip(str(error))
    if nvrtc.cuda_include() is None:
        pytest.skip("CUDA's headers are not on this machine")


def test_the_kernel_without_a_table_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_nvrtc()
    monkeypatch.setenv("RESEARCH_ENGINE_CACHE", str(tmp_path / "cache"))
    path = pagedattention_fig_18a._paths(tmp_path)["contiguous"]
    made = jit.compile_variant(
        jit.parse_path(path), cache_dtype=torch.bfloat16, head_size=128, group_size=1, arch="sm_90a"
    )
    assert made.spilled == 0 and made.log == ""


def test_paged_and_contiguous_caches_hold_the_same_keys_and_values() -> None:
    paths = {"paged": "auto", "contiguous": "auto"}
    runs = pagedattention_fig_18a._runs(2, 40, paths, torch.device("cpu"))
    assert torch.equal(runs["paged"]()[0], runs["contiguous"]()[0])


@pytest.mark.parametrize(("paged", "word"), [(11.0, "holds"), (9.0, "does not hold")])
def test_the_tables_cost_is_judged_by_the_rounds(paged: float, word: str) -> None:
    medians = {name: {n: (paged if name == "paged" else 10.0) + n / 100 for n in range(6)} for name in KERNELS}
    batches, contexts = pagedattention_fig_18a.BATCHES, pagedattention_fig_18a.CONTEXTS
    text = pagedattention_fig_18a.paper_table_of([Timed(b, c, medians) for b in batches for c in contexts]).markdown()
    assert text.count(f"| {word} |") == len(batches)
    assert f"| 20 to 26 | {100 * (paged - 10) / 10.025:+.1f} [" in text


def test_a_copy_a_block_moves_what_the_oracle_moves() -> None:
    source = torch.randn(3, 2, 5, 2, 4, 8)
    target, expected = torch.zeros(3, 2, 6, 2, 4, 8), torch.zeros(3, 2, 6, 2, 4, 8)
    pairs = [(0, 5), (4, 0), (2, 3)]
    copy_each_block(source, target, pairs)
    reference.swap_blocks(source, expected, torch.tensor(pairs))
    assert torch.equal(target, expected)


def test_a_swap_that_loses_a_block_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagedattention_fig_19a_gpu, "MODEL", "dummy:tiny")
    cpu = torch.device("cpu")
    assert pagedattention_fig_19a_gpu.swap_milliseconds(copy_each_block, 64, cpu) > 0
    with pytest.raises(RuntimeError, match="changed"):
        pagedattention_fig_19a_gpu.swap_milliseconds(
            lambda source, target, pairs: copy_each_block(source, target, pairs[:-1]) or target.zero_(), 64, cpu
        )


def test_recomputing_is_a_step_of_the_whole_prompt() -> None:
    options = EngineOptions(
        model="dummy:tiny", device="cpu", dtype="float32", num_blocks=64, max_num_seqs=2, max_model_len=512,
        max_num_batched_tokens=256, scheduler="fcfs", enable_prefix_caching=False, skip_tokenizer_init=True,
    )  # fmt: skip
    assert pagedattention_fig_19a_gpu.recompute_milliseconds(options) > 0


def test_the_swaps_cost_is_judged_by_block_size() -> None:
    ours = {size: {COPIES: 64 / size, KERNEL: 0.5, AGAIN: 10.0} for size in BLOCK_SIZES}
    text = pagedattention_fig_19a_gpu.paper_table_of(ours, "no GPU").markdown()
    assert "does not hold" not in text and text.count("| holds |") == 4
    ours[1][COPIES] = 1.0
    assert pagedattention_fig_19a_gpu.paper_table_of(ours, "no GPU").markdown().count("| does not hold |") == 2


SMALL: dict[str, Any] = {
    "model": "dummy:tiny", "device": "cpu", "dtype": "float32", "max_num_seqs": 8, "num_blocks": 64, "block_size": 4,
    "max_model_len": 256, "num_host_blocks": 256, "scheduler": "fcfs", "scheduler_params": {"preemption": "swap"},
    "enable_prefix_caching": False,
    "workload": {"num_requests": 12, "arrivals": {"process": "at_once"},
                 "lengths": {"source": "lognormal", "max_prompt": 64, "max_output": 64}},
}  # fmt: skip


def test_requests_get_the_same_tokens_whichever_way_they_are_swapped() -> None:
    settings = TrialSettings.model_validate(SMALL)
    backend = RealBackend(progress=False)
    backend.prepare(settings)
    tokens = []
    for by_copies in (False, True):
        engine = backend.engine(settings, 0)
        if by_copies:
            engine.executor = CopyEachBlock(engine.executor)  # type: ignore[arg-type]
        workload = build_workload(settings.workload, 0, vocab_size=backend.vocab_size())
        found: dict[str, list[int]] = {}
        replay(engine, workload.arrivals, on_outputs=lambda outputs, found=found: found.update(
            {output.request.id: list(output.request.output_token_ids) for output in outputs}))  # fmt: skip
        assert any(record.blocks_swapped for step in engine.records.steps for record in step.preemptions)
        engine.executor.shutdown()
        tokens.append(found)
    assert tokens[0] == tokens[1] and len(tokens[0]) == 12


def test_every_way_serves_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagedattention_fig_19b_gpu, "BLOCK_SIZES", (4,))
    found = pagedattention_fig_19b_gpu.measure(RealBackend(progress=False), SMALL)
    assert len(found) == 3 and len({one.preemptions > 0 for one in found.values()}) == 1


def test_the_end_to_end_cost_is_judged_by_way_and_block_size() -> None:
    seconds = {COPIES: {16: 2.0, 4: 3.0, 2: 4.0}, KERNEL: {16: 1.0, 4: 1.0, 2: 1.0}, AGAIN: {16: 1.1, 4: 1.1, 2: 1.1}}
    names = {COPIES: pagedattention_fig_19b_gpu.COPIES, KERNEL: pagedattention_fig_19b_gpu.KERNEL,
             AGAIN: pagedattention_fig_19b_gpu.RECOMPUTE}  # fmt: skip
    found = {(names[way], size): Served(e2e, 1.0, 1) for way, by in seconds.items() for size, e2e in by.items()}
    assert pagedattention_fig_19b_gpu.paper_table_of(found, "no GPU").markdown().count("| holds |") == 3


def test_the_kernel_whose_warps_take_a_block_each_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_nvrtc()
    monkeypatch.setenv("RESEARCH_ENGINE_CACHE", str(tmp_path / "cache"))
    _, cells = load_experiment("papers/pagedattention_fig_18b_gpu")
    (path,) = {cell.settings.kernel_path for cell in cells if cell.levels["kernel"] == "a warp a block"}
    made = jit.compile_variant(
        jit.parse_path(path), cache_dtype=torch.bfloat16, head_size=128, group_size=1, arch="sm_90a"
    )
    assert made.log == "" and made.constants["keys"] == 64


def test_a_variants_source_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = KernelSettings(
        op="decode", sizes={"B": 1, "L": 16}, variant={"source": "papers/warp_per_block.cuh", "warps": 2}
    )
    assert settings.source is not None and settings.source.is_absolute() and settings.source.is_file()
    own = tmp_path / "papers" / "warp_per_block.cuh"
    own.parent.mkdir()
    own.write_text("")
    assert settings.source == Path("papers/warp_per_block.cuh")
