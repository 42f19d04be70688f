"""From measurements to a profile: planted costs come back from a device that has them, through the whole command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import count

import pytest

from research_engine.calibration.designs import Limits, make_designs
from research_engine.calibration.measure import Bench
from research_engine.calibration.profile import ProfileOptions, error_table, fit, from_run, measure
from research_engine.calibration.recorded import read_steps
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Batch, StepResult
from research_engine.engine.engine import Engine
from research_engine.simulation.attention_cost import AttentionFormula
from research_engine.simulation.cost_model import Work, work_of
from research_engine.simulation.curve import Curve
from research_engine.simulation.fit import Sample
from research_engine.simulation.profiled import Profile, ProfiledCost

CONFIG = EngineConfig(num_blocks=4000, num_host_blocks=64, max_num_seqs=64, max_num_batched_tokens=1024,
                      max_model_len=8192, vocab_size=259, enable_prefix_caching=False)  # fmt: skip
TRUE = Profile(
    "m", {}, Curve([(1, 4e-3), (64, 4e-3), (65, 5e-3), (1024, 40e-3)]), Curve([(0, 0.0), (1, 1e-3), (64, 2e-3)]),
    AttentionFormula(2e-4, 1e-6, 3e-8, 1e-7, {(16, 0): 5e-9, (1024, 0): 1e-9, (16, 4096): 3e-9, (1024, 4096): 1.2e-9}),
    host=(0.0, 0.0), block_move=(2e-4, 1e-5), block_copy=(1e-4, 2e-6),
)  # fmt: skip


class Planted:
    """A device whose times are TRUE's."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.kv_cache = self

    def zero_(self) -> None:
        pass

    def execute(self, batch: Batch) -> StepResult:
        assert not batch.received  # the bench has dealt with them
        self.works.append(work_of(batch))
        return StepResult([0] * len(batch.rows))

    def shutdown(self) -> None:
        pass


def planted_bench() -> tuple[Bench, Planted]:
    device = Planted()
    return Bench(Engine(CONFIG, None, device), lambda: None), device


def test_a_design_runs_as_it_was_drawn_up():
    bench, _ = planted_bench()
    designs = make_designs(Limits(64, 1024, 8192, 4000, 16), steps=7, seed=0)
    for design in designs:
        for step, sample in enumerate(bench.designed(design), 2):
            work = sample.work
            assert (work.tokens, work.sequences) == (design.num_tokens, design.num_rows)
            alone = [(before + 1) for tokens, before, _ in design.chunks if tokens == 1]
            assert work.decodes == len(design.decodes) + len(alone)
            # rows that stay have one token more with every step: one was taken to admit them, one to warm up
            assert work.decode_kv == sum(design.decodes) + step * len(design.decodes) + sum(alone)
            assert work.prefills == tuple((t, k) for t, k, _ in design.chunks if t > 1)
            assert work.draws == len(design.decodes) + sum(draws for _, _, draws in design.chunks)


def test_planted_costs_come_back_part_by_part():
    bench, _ = planted_bench()
    cost = ProfiledCost(TRUE)
    designs = make_designs(Limits(64, 1024, 8192, 4000, 16), steps=7, seed=0)
    measured = {d: [Sample(s.work, cost.price(s.work), 1e-4) for s in bench.designed(d)] for d in designs}
    works = [sample.work for samples in measured.values() for sample in samples]
    moves = [Sample(w, cost.price(w), 0.0) for n in (1, 8, 64) for w in (Work(0, 0, 0, 0, 0, 0, (), n, 0),
                                                                      Work(0, 0, 0, 0, 0, 0, (), 0, n))]  # fmt: skip
    served = [Sample(work, cost.price(work), 1e-4) for work in works]
    profile = fit(measured, moves, served, designs_made=len(designs), model="m", machine={"gpu": "planted"})
    for part in ("dense", "head", "decode", "prefill", "mixed"):
        assert profile.parts[part]["mape"] < 0.03, part
    assert profile.held_out["mape"] < 0.02
    assert profile.block_move == pytest.approx(TRUE.block_move, rel=0.02)
    assert profile.attention.per_token == pytest.approx(3e-8, rel=0.05)
    assert sum(profile.host) * 1e4 == pytest.approx(1.0, rel=0.3)
    assert profile.dense(65) - profile.dense(64) == pytest.approx(1e-3, rel=0.1)  # the tile edge


@pytest.fixture(scope="module")
def measured_profile() -> Profile:
    torch = pytest.importorskip("torch")
    told = []
    options = ProfileOptions("dummy:tiny", device="cpu", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    # a clock that moves by a second whenever it is read: ten minutes are up after 600 readings, on any machine
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny; threads would only wait for one another
    try:
        profile = measure(options, lambda share, text: told.append((share, text)), clock=count(0.0, 1.0).__next__)
    finally:
        torch.set_num_threads(threads)
    assert [text.split(",")[0] for _, text in told][0 :: len(told) - 1] == ["loading dummy:tiny", "fitting"]
    return profile


def test_the_command_measures_a_real_engine(measured_profile):
    """What it measures is the machine's affair; that a profile of it says what it is, is not."""
    assert measured_profile.machine.keys() >= {"gpu", "dtype", "torch", "kernels", "research_engine"}
    assert measured_profile.parts.keys() >= {"dense", "decode", "prefill", "mixed"}
    assert measured_profile.held_out["steps"] > 0
    assert math.isfinite(measured_profile.held_out["mape"])
    assert ProfiledCost(measured_profile).price(Work(4, 4, 4, 4, 100, 40)) > 0
    assert error_table(measured_profile).row_count == len(measured_profile.parts) + 1


def test_it_can_be_refined_on_a_run(measured_profile, tmp_path, capsys):
    from experiments.run import main as run_experiment

    words = "model=dummy:tiny scheduler=[fcfs] seeds=[0] workload.num_requests=12 workload.arrivals.rate=200"
    assert run_experiment([*words.split(), "--out", str(tmp_path / "run")]) == 0
    assert len(read_steps(tmp_path / "run")) > 40
    measured_profile.save(tmp_path / "p.json")
    options = ProfileOptions("dummy:tiny", from_run=tmp_path / "run", base=tmp_path / "p.json")
    refined = from_run(options)
    assert "refined on" in refined.origin.split("; ")[-1]
    assert refined.held_out != measured_profile.held_out
    alone = from_run(replace(options, base=None))
    assert alone.origin.startswith("fitted to")
    with pytest.raises(ValueError, match="model is 'dummy:tiny', wanted 'other'"):
        from_run(replace(options, model="other"))


@pytest.mark.parametrize(
    ("options", "rule"),
    [({"minutes": 0}, "minutes = 0: must be > 0 and <= 60"), ({"base": "p.json"}, "give from_run, too")],
)
def test_wrong_options_are_refused(options, rule):
    with pytest.raises(ValueError, match=rule):
        ProfileOptions("dummy:tiny", **options)


def test_a_directory_that_is_no_real_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run directory"):
        read_steps(tmp_path)
    (tmp_path / "trials" / "a").mkdir(parents=True)
    (tmp_path / "trials" / "a" / "steps.parquet").write_bytes(b"junk")
    with pytest.raises(ValueError, match="no recorded trial"):
        read_steps(tmp_path)
    (tmp_path / "trials" / "a" / "summary.json").write_text(json.dumps({"kind": "simulated"}))
    with pytest.raises(ValueError, match="every trial is simulated"):
        read_steps(tmp_path)
    (tmp_path / "trials" / "a" / "summary.json").write_text(json.dumps({"kind": "real"}))
    with pytest.raises(ValueError, match="no recorded trial"):
        read_steps(tmp_path)


def test_too_little_time_is_told_with_what_to_do():
    pytest.importorskip("torch")
    options = ProfileOptions("dummy:tiny", device="cpu", minutes=1, max_num_seqs=2, max_num_batched_tokens=16)
    with pytest.raises(ValueError, match="0 designed batches and 1 steps.*give more minutes"):
        measure(options, lambda share, text: None, clock=count(0.0, 100.0).__next__)
