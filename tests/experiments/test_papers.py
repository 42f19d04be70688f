"""Reproductions: tables are made of runs, claims judged by figures, and what can be computed is the paper's."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments.analysis.paper_table import FILE, PaperTable, highest_within, match_of, order_of
from experiments.analysis.report import write_report
from experiments.config import ConfigError, available, load_experiment
from experiments.papers import pagedattention_fig_15, pagedattention_fig_19a, sarathi_capacity, vtc_table_2
from experiments.papers.computed import COMPUTED
from experiments.papers.orca_buddy import BuddyAllocator, OrcaBuddy
from experiments.papers.sarathi_chunks_only import ChunksOnly
from experiments.run import main
from experiments.runner import run_experiment
from experiments.simulated_backend import SimulatedBackend
from research_engine import SamplingParams
from research_engine.engine.config import EngineConfig
from research_engine.engine.driver import Arrival, replay
from research_engine.loading.dummy import DUMMY_MODELS
from research_engine.simulation.build import simulated_engine
from research_engine.simulation.gpu_sheet import load_sheet
from research_engine.simulation.roofline import RooflineCost

PAPERS = sorted(name for name in available() if name.startswith("papers/"))
TRACES = os.environ.get("RESEARCH_ENGINE_TRACES")


def paper_of(name: str, tmp_path: Path, *words: str) -> str:
    """Run it in this process, without plots; its paper.md."""
    experiment, cells = load_experiment(name, [*words, "outputs.plots=[]"])
    run_experiment(experiment, cells, tmp_path / "run", backend=SimulatedBackend(), console=Console(quiet=True))
    write_report(tmp_path / "run")
    return (tmp_path / "run" / FILE).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAPERS)
def test_claims_and_the_papers_figures_are_of_rows_that_there_are(name: str) -> None:
    paper = load_experiment(name)[0].paper
    assert paper is not None and paper.left_out == ()


def test_a_small_run_makes_the_papers_table_and_keeps_its_order(tmp_path: Path) -> None:
    text = paper_of(
        "papers/pagedattention_fig_2", tmp_path, "workload.num_requests=40", "workload.arrivals.rate=12", "seeds=[0]"
    )
    assert "| Orca (Max) | 20.4 |" in text
    assert "| the more is known of lengths the more memory holds tokens | holds |" in text
    assert "cannot be told" not in text
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert '<th scope="col">Token states (%): paper</th>' in page
    assert "<td>the more is known of lengths the more memory holds tokens</td><td>holds</td>" in page


def test_figures_of_trials_that_ran_under_other_versions_are_told(tmp_path: Path) -> None:
    words = ["workload.num_requests=10", "workload.arrivals.rate=12", "seeds=[0]"]
    assert "different environments" not in paper_of("papers/pagedattention_fig_2", tmp_path, *words)
    changed = next((tmp_path / "run" / "trials").iterdir()) / "environment.json"
    facts = json.loads(changed.read_text(encoding="utf-8"))
    facts["python"] = "3.9.1"
    changed.write_text(json.dumps(facts), encoding="utf-8")
    write_report(tmp_path / "run")
    told = (tmp_path / "run" / FILE).read_text(encoding="utf-8").partition("What differs: ")[2]
    assert "Trials ran in different environments: python " in told and "3.9.1 (1 trial)" in told


def test_a_claim_of_cells_that_did_not_run_cannot_be_told(tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text(
        """
base: {model: "dummy:tiny", executor: simulated, gpu: h200, num_blocks: 100,
       workload: {num_requests: 4, lengths: {source: fixed, prompt: 8, output: 4}}}
factors: {scheduler: [fcfs, sjf, orca]}
paper:
  source: nobody's
  columns: [{metric: completed, within: 0.1, paper: {fcfs: 7, orca: 4}}]
  claims: [{text: these are alike, metric: completed, rising: [fcfs, sjf]},
           {text: nobody ran it, metric: completed, rising: [fcfs, orca]}]
  differs: all of it
"""
    )
    text = paper_of(str(config), tmp_path, "scheduler=[fcfs, sjf]")
    assert "| fcfs | 7 | 4 |\n| sjf | - | 4 |\n\n" in text
    assert "| these are alike | does not hold | fcfs 4, sjf 4 |" in text
    assert "| nobody ran it | cannot be told |" in text
    (tmp_path / "again").mkdir()
    assert paper_of(str(tmp_path / "run" / "config.yaml"), tmp_path / "again") == text


_SUSTAINED = "sustained: {metric: itl_p99, limit: 1, over: scheduler}"


@pytest.mark.parametrize(
    ("columns", "claim", "told"),
    [
        ("{metric: completed, paper: {fcfs: 7, sfj: 4}}", "[fcfs, sjf]",
         "own.yaml, line 4: paper.columns.0.paper.sfj: no row 'sfj'; valid ones, nearest first: sjf, fcfs"),
        ("{metric: completed}", "[fcfs, sjf, orca]",
         "own.yaml, line 5: paper.claims.0.rising.2: no row 'orca'; valid ones, nearest first: fcfs, sjf"),
        ("{metric: completed, paper: {fcfs: .inf}}", "[fcfs, sjf]",
         "own.yaml, line 4: paper.columns.0.paper.fcfs = inf"),
        ("{metric: sustained}", "[fcfs, sjf]",
         "own.yaml, line 6: paper.sustained.over: scheduler has the level 'fcfs'; each must be a number"),
    ],
)  # fmt: skip
def test_a_figure_that_nothing_can_be_set_beside_is_refused_before_anything_runs(
    columns: str, claim: str, told: str, tmp_path: Path
) -> None:
    config = tmp_path / "own.yaml"
    config.write_text(
        f"factors: {{scheduler: [fcfs, sjf]}}\npaper:\n  source: x\n  columns: [{columns}]\n"
        f"  claims: [{{text: z, metric: completed, rising: {claim}}}]\n"
        f"  {_SUSTAINED if 'sustained' in columns else 'left_out: []'}\n  differs: y\n"
    )
    for words in ((), ("seeds=[1]",)):
        with pytest.raises(ConfigError) as caught:
            load_experiment(str(config), words)
        assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("paper", "message"),
    [
        ("{columns: [{metric: batchsize}]}", "batch_size"),
        ("{columns: [{metric: sustained}]}", "does not say of what"),
        (
            "{sustained: {metric: itl_p99, limit: 1, over: rate}}",
            "no factor 'rate'; valid ones, nearest first: scheduler",
        ),
        ("{columns: [{metric: completed, within: 0.1}]}", "has nothing to match"),
    ],
)
def test_a_mistake_in_a_paper_is_told(paper: str, message: str, tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    rest = "source: x, differs: y, claims: [{text: z, metric: completed, rising: [fcfs, sjf]}]"
    columns = "" if "columns" in paper else ", columns: [{metric: completed}]"
    config.write_text(f"factors: {{scheduler: [fcfs, sjf]}}\npaper: {{{paper[1:-1]}, {rest}{columns}}}\n")
    with pytest.raises(ConfigError, match=message.replace("(", "\\(")):
        load_experiment(str(config))


def test_the_load_within_a_limit_lies_between_those_that_were_run() -> None:
    assert highest_within([(1, 10), (2, 20), (4, 40)], 30) == 3
    assert highest_within([(1, 10), (2, 20)], 10) == 1
    for curve, limit in [([(1, 10), (2, 20)], 30), ([(1, 10), (2, 20)], 5), ([(1, math.nan), (2, 20)], 15)]:
        assert math.isnan(highest_within(curve, limit))


def test_an_order_holds_when_every_step_does() -> None:
    assert order_of("", ["a", "b", "c"], [1, 2, 4], 0, factor=2).holds is True
    assert order_of("", ["a", "b", "c"], [1, 2, 3], 0, factor=2).holds is False
    assert order_of("", ["a", "b"], [1, 1], 0).holds is False
    assert order_of("", ["a", "b"], [1, math.nan], 0).holds is None


def test_figures_match_when_each_is_the_papers_but_for_a_share_of_it() -> None:
    verdict = match_of("waste", {"a": (10.0, 10.5), "b": (20.0, 18.0)}, 0.1)
    assert (verdict.word, verdict.figures) == ("matches", "b differs most, by 10 %")
    assert match_of("waste", {"a": (10.0, 11.1), "b": (20.0, 20.0)}, 0.1).word == "does not match"
    assert match_of("waste", {"a": (10.0, 10.0), "b": (20.0, math.nan)}, 0.1).word == "cannot be told"


def test_what_is_0_in_the_paper_matches_0_alone() -> None:
    verdict = match_of("stalls", {"a": (0.0, 0.0), "b": (2.0, 2.1)}, 0.1)
    assert (verdict.word, verdict.figures) == ("matches", "b differs most, by 5 %")
    verdict = match_of("stalls", {"a": (0.0, 0.25), "b": (2.0, 4.0)}, 0.1)
    assert (verdict.word, verdict.figures) == ("does not match", "a differs most, 0.25 in place of 0")
    assert match_of("stalls", {"a": (0.0, math.nan)}, 0.1).word == "cannot be told"


@pytest.mark.parametrize("samples", [1, 2, 6])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_savings_count_blocks_iteration_by_iteration(samples: int, block_size: int) -> None:
    prompts, outputs = [3, 16, 40], [20, 1, 7]
    saved = whole = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        for iteration in range(output):
            alone = samples * math.ceil((prompt + iteration) / block_size)
            shared = prompt // block_size if iteration else math.ceil(prompt / block_size)
            whole += alone
            saved += alone - (shared + samples * (math.ceil((prompt + iteration) / block_size) - shared))
    assert pagedattention_fig_15.saving(prompts, outputs, samples, block_size) == pytest.approx(saved / whole)


def test_this_engine_shares_the_blocks_before_that_of_the_prompts_last_token() -> None:
    """Prompt of 9 tokens, 3 samples of 4, blocks of 4: always 3 blocks each, of which the first 2 are shared."""
    entries = [3, 9, 9, 9, 6]  # the others begin when the first has computed the prompt, and so end a step later
    held = [3, 5, 5, 5, 4]
    found = pagedattention_fig_15.saving_of_engine([9], [4], 3, block_size=4)
    assert found == pytest.approx(1 - sum(held) / sum(entries))
    assert found < pagedattention_fig_15.saving([9], [4], 3, block_size=4)


def test_lengths_of_fig_15_have_the_papers_means() -> None:
    for name, (prompts, outputs) in pagedattention_fig_15._lengths(20_000):
        prompt, output = {"Alpaca": (19.31, 58.45), "ShareGPT": (161.31, 337.99)}[name]
        assert math.fsum(prompts) / len(prompts) == pytest.approx(prompt, rel=0.03)
        assert math.fsum(outputs) / len(outputs) == pytest.approx(output, rel=0.03)


def test_parallel_samples_save_what_the_paper_measured_of_alpaca(tmp_path: Path) -> None:
    assert main(["papers/pagedattention_fig_15", "--out", str(tmp_path)]) == 0
    text = (tmp_path / FILE).read_text(encoding="utf-8")
    assert text.count("| holds |") == 5
    assert "| Alpaca: ours are the paper's within 10 % | matches |" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| Alpaca |")]
    figures = [float(cell) for cell in row.split("|")[2:-1]]
    assert figures[1::2] == pytest.approx(figures[::2], rel=0.1)


def test_memory_holds_what_the_paper_measured(tmp_path: Path) -> None:
    text = paper_of("papers/pagedattention_fig_2", tmp_path, "seeds=[0]")
    assert text.count("| matches |") == 3 and text.count("| holds |") == 2
    for row, first in {"Orca (Max)": 20.4, "Orca (Pow2)": 26.8, "Orca (Oracle)": 38.2, "vLLM": 96.3}.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
        theirs, ours, *_ = (float(cell) for cell in line.split("|")[2:4])
        assert theirs == first and ours == pytest.approx(theirs, rel=0.1)


def test_as_many_requests_run_at_once_on_pages_as_the_paper_measured(tmp_path: Path) -> None:
    words = ("seeds=[0]", "include=[{system: vLLM}]")
    (line,) = [line for line in paper_of("papers/pagedattention_fig_13a", tmp_path, *words).splitlines()
               if line.startswith("| vLLM |")]  # fmt: skip
    theirs, ours = (float(cell) for cell in line.split("|")[2:4])
    assert theirs == 30.42 and ours == pytest.approx(theirs, rel=0.1)


def test_a_buddy_allocator_splits_the_smallest_chunk_that_will_do_and_joins_halves_again() -> None:
    buddy = BuddyAllocator(13, 8)  # chunks of 8, 4 and 1
    assert buddy.take(2) == (8, 2)
    assert buddy.take(3) == (0, 4)
    assert buddy.take(8) is None  # 10 blocks are free, in chunks of 4, 2 and 1
    buddy.give_back(0, 4)
    assert buddy.take(5) == (0, 8)
    buddy.give_back(8, 2)
    assert buddy.take(4) == (8, 4)
    assert buddy.take(1) == (12, 1) and buddy.take(1) is None
    assert BuddyAllocator(13, 8).take(9) is None


def test_a_request_waits_for_one_chunk_however_many_blocks_are_free() -> None:
    cost = RooflineCost(DUMMY_MODELS["dummy:llama3-8b"].config, load_sheet("h200"))
    config = EngineConfig(num_blocks=8, block_size=4, max_model_len=32, reservation="buddy_oracle",
                          max_num_batched_tokens=64, enable_prefix_caching=False, check_integrity=True)  # fmt: skip
    engine = simulated_engine(config, OrcaBuddy(), cost)

    def arrival(name: str, output: int) -> Arrival:
        return Arrival(0.0, name, range(4), SamplingParams(max_tokens=output, ignore_eos=True))

    # chunks of 2, 2, 2 and 2 blocks; two that lie apart end early, and the last wants 4 in one piece
    replay(engine, [arrival("a", 3), arrival("b", 5), arrival("c", 3), arrival("d", 5), arrival("e", 10)])
    ended = {record.request_id: record.finish_time for record in engine.records.requests}
    begun = {record.request_id: record.first_scheduled_time for record in engine.records.requests}
    assert begun["e"] >= ended["b"] > ended["a"] == ended["c"]
    assert not any(step.preemptions for step in engine.records.steps)


def test_swapping_costs_less_the_larger_the_block_and_recomputing_the_same() -> None:
    costs = [pagedattention_fig_19a.overheads(size) for size in pagedattention_fig_19a.BLOCK_SIZES]
    assert len({round(cost["recompute"], 9) for cost in costs}) == 1
    swaps = [cost["swap in and out"] for cost in costs]
    assert swaps == sorted(swaps, reverse=True)
    # 256 blocks of 800 KiB each way at 25 GB/s, and 80 copies of 5 us a block
    assert swaps[0] == pytest.approx(2e3 * 256 * (800 * 1024 / 25e9 + 80 * 5e-6))
    assert all(verdict.holds for verdict in pagedattention_fig_19a.table().verdicts)


def test_a_tighter_limit_on_gaps_leaves_less_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sarathi_capacity, "LENGTHS", {"source": "fixed", "prompt": 4000, "output": 20})
    monkeypatch.setattr(sarathi_capacity, "TOLERANCE", 0.5)
    chosen = {name: sarathi_capacity.SYSTEMS[name] for name in ("vLLM", "Sarathi 512")}
    monkeypatch.setattr(sarathi_capacity, "SYSTEMS", chosen)
    found = sarathi_capacity.capacities("Mistral-7B", requests=20)
    assert found["vLLM"]["strict"] < found["vLLM"]["relaxed"]
    assert found["vLLM"]["strict"] < found["Sarathi 512"]["strict"]


@pytest.mark.skipif(TRACES is None, reason="RESEARCH_ENGINE_TRACES does not name the directory of public traces")
def test_vtc_table_2_is_the_papers_to_the_last_digit() -> None:
    table = vtc_table_2.table()
    assert all(paper == ours for pairs in table.rows.values() for paper, ours in pairs)
    assert all(verdict.holds for verdict in table.verdicts)


def test_without_its_data_a_computed_table_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RESEARCH_ENGINE_TRACES", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["papers/vtc_table_2", "--out", str(tmp_path / "run")]) == 2
    assert "no file 'vtc_real_FCFS.jsonl'; --traces DIR" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMPUTED))
def test_a_dry_run_of_a_computed_table_tells_plan_and_cost_and_makes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make() -> PaperTable:
        raise AssertionError("the table is made")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(COMPUTED, name, replace(COMPUTED[name], table=make, check=lambda: None))
    for out in ([], ["--out", str(tmp_path / "run")]):
        assert main([name, "--dry-run", *out]) == 0
        plan, cost = capsys.readouterr().out.splitlines()
        assert plan == f"to make   {name}: {COMPUTED[name].plan}" and cost.startswith("1 table to make, ")
    assert not list(tmp_path.iterdir())
    assert main([name, "seeds=[1]", "--dry-run"]) == 2


def test_a_dry_run_of_a_computed_table_finds_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RESEARCH_ENGINE_TRACES", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["papers/vtc_table_2", "--dry-run"]) == 2
    assert "no file 'vtc_real_FCFS.jsonl'; --traces DIR" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for figure in ("18a", "19a_gpu", "19b_gpu"):
        assert main([f"papers/pagedattention_fig_{figure}", "--dry-run"]) == 2
        assert "torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(COMPUTED))
def test_a_computed_table_has_no_settings(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "seeds=[1]", "--out", str(tmp_path)]) == 2
    assert "has no settings" in capsys.readouterr().err


def test_chunks_only_never_mixes_and_lets_decodes_go_after_every_chunk() -> None:
    cost = RooflineCost(DUMMY_MODELS["dummy:llama3-8b"].config, load_sheet("h200"))
    engine = simulated_engine(EngineConfig(num_blocks=1000, max_num_batched_tokens=64), ChunksOnly(), cost)
    forced = SamplingParams(max_tokens=20, ignore_eos=True)
    replay(engine, [Arrival(0.001 * i, str(i), range(200), forced) for i in range(8)])
    assert all(record.output_tokens == 20 for record in engine.records.requests)
    decoding: set[str] = set()
    chunks_before = False
    for step in engine.records.steps:
        is_decode = [start >= 200 for start in step.starts]
        assert all(is_decode) or not any(is_decode)
        assert all(is_decode) or not (chunks_before and decoding)
        chunks_before = not all(is_decode)
        for name, start, drew in zip(step.request_ids, step.starts, step.drew, strict=True):
            if drew and start < 200:
                decoding.add(name)
            elif start + 1 == 200 + 19:
                decoding.discard(name)
