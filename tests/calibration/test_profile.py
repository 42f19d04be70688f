"""From measurements to a profile: planted costs come back from a device that has them, through the whole command."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from types import SimpleNamespace

import pytest

import schedulers
from research_engine.calibration.designs import Design, Limits, make_designs
from research_engine.calibration.device_timer import FIRST_HOLD, HostTimer
from research_engine.calibration.measure import Bench, _Timed
from research_engine.calibration.measurement import Measurement
from research_engine.calibration.profile import (
    ProfileOptions,
    error_table,
    fit,
    from_run,
    main,
    measure,
    read_measurement,
)
from research_engine.calibration.recorded import read_steps
from research_engine.calibration.serving import serve, with_launched
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Batch, StepResult
from research_engine.engine.engine import Engine
from research_engine.executors.simulated import SimulatedExecutor
from research_engine.simulation.attention_cost import AttentionFormula
from research_engine.simulation.clock import VirtualClock
from research_engine.simulation.cost_model import Work, work_of
from research_engine.simulation.curve import Curve
from research_engine.simulation.fit import Sample
from research_engine.simulation.host_cost import HostCost
from research_engine.simulation.power import PowerLimit, PowerState
from research_engine.simulation.profiled import Profile, ProfiledCost
from research_engine.simulation.step_kind import NO_GRAPHS, Ladders, StepKind

CONFIG = EngineConfig(num_blocks=4000, num_host_blocks=64, max_num_seqs=64, max_num_batched_tokens=1024,
                      max_model_len=8192, vocab_size=259, enable_prefix_caching=False)  # fmt: skip
TRUE = Profile(
    "m", {}, Curve([(1, 4e-3), (64, 4e-3), (65, 5e-3), (1024, 40e-3)]), Curve([(0, 0.0), (1, 1e-3), (64, 2e-3)]),
    AttentionFormula(2e-4, 1e-6, 3e-8, 1e-7, {(16, 0): 5e-9, (1024, 0): 1e-9, (16, 4096): 3e-9, (1024, 4096): 1.2e-9}),
    host=HostCost((1e-4, 1e-7)), block_move=(2e-4, 1e-5), block_copy=(1e-4, 2e-6),
)  # fmt: skip
ON_GPU = replace(
    TRUE, ladders=Ladders((1, 8, 16, 32, 64), (64, 128, 192, 256)),
    decode_graph=Curve([(1, 3e-3), (16, 3.2e-3), (64, 4e-3)]),
    token_graph=Curve([(64, 5e-3), (128, 5.5e-3), (192, 7e-3), (256, 9e-3)]),
    host=HostCost((1e-4, 0.0), {StepKind.DECODE_GRAPH: (3e-4, 1e-6, 0.0), StepKind.TOKEN_GRAPH: (5e-4, 0.0, 0.0),
                                StepKind.LAUNCHED: (6e-3, 0.0, 0.0)}, 5.5e-3, (1e-4, 1e-6)),
)  # fmt: skip


class Planted:
    """A device whose times are TRUE's; its cache is a list of no layers."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.kv_cache = self

    def is_floating_point(self) -> bool:
        return True

    def element_size(self) -> int:
        return 2

    def __iter__(self) -> Iterator[None]:
        return iter(())

    def execute(self, batch: Batch) -> StepResult:
        assert not batch.received  # the bench has dealt with them
        self.works.append(work_of(batch))
        return StepResult([0] * len(batch.rows))

    def shutdown(self) -> None:
        pass


def planted_bench() -> tuple[Bench, Planted]:
    device = Planted()
    return Bench(Engine(CONFIG, None, device), HostTimer(), lambda: None), device


def planted(profile: Profile, overlap: bool, steps: int = 1200, loaded: Profile | None = None) -> Measurement:
    """What the bench and the serving would have measured on a machine with these very costs, or others under load."""
    bench, _ = planted_bench()
    cost = ProfiledCost(profile)
    in_serving = cost if loaded is None else ProfiledCost(loaded)
    apart = bool(profile.ladders.decode)

    def sample(work: Work) -> Sample:
        time = cost.time_of(work)
        handover = profile.host.seconds(profile.ladders.kind(work), work)
        device = time.device
        if in_serving.power_limit is not None:  # it finds the device rested, and tires it
            device = PowerState(in_serving.power_limit).seconds(in_serving.time_of(work), 0.0)
        return Sample(work, device, handover=sum(handover[:2]) - profile.host.schedule[0])

    designs = make_designs(Limits(64, 1024, 8192, 4000, 16), profile.ladders, steps=7, seed=0)
    designed = {design: [sample(own.work) for own in bench.designed(design)] for design in designs}
    moved = [(n, 0) for n in (1, 8, 64)] + [(0, n) for n in (1, 8, 64)]
    moves = [sample(Work(0, 0, 0, blocks_moved=swapped, blocks_copied=copied)) for swapped, copied in moved]
    clock = VirtualClock()
    config = replace(CONFIG, overlap=overlap)
    scheduler = schedulers.create("chunked_prefill")
    source = serve(
        config, SimulatedExecutor(in_serving, clock), scheduler, apart=apart, ladders=profile.ladders, clock=clock
    )
    served = list(islice(source, steps))
    return Measurement("m", {"gpu": "planted"}, profile.ladders, overlap, len(designs), designed, moves, served)


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
            later = step * len(design.decodes), step * bool(design.decodes)
            assert work == design.work._replace(decode_kv=design.work.decode_kv + later[0],
                                                decode_kv_max=design.work.decode_kv_max + later[1])  # fmt: skip


def test_planted_costs_come_back_part_by_part():
    profile = fit(planted(TRUE, overlap=False))
    for part in ("dense", "head", "decode", "prefill", "mixed"):
        assert profile.parts[part]["mape"] < 0.03, part
    assert profile.held_out["mape"] < 0.02
    assert profile.block_move == pytest.approx(TRUE.block_move, rel=0.02)
    assert profile.attention.per_token == pytest.approx(3e-8, rel=0.05)
    assert profile.dense(65) - profile.dense(64) == pytest.approx(1e-3, rel=0.1)  # the tile edge


def test_graphs_and_host_time_of_a_device_that_works_by_itself_come_back():
    """Steps in graphs end with the device, launched ones of few tokens with the host; both are told apart."""
    found = planted(ON_GPU, overlap=True)
    seen = [step.sample for step in found.served if not math.isnan(step.sample.device)]
    assert len(seen) > len(found.served) / 2
    cost = ProfiledCost(ON_GPU)
    for sample in seen:
        assert sample.device == pytest.approx(cost.time_of(sample.work).device, rel=0.03)
    profile = fit(found)
    for part in ("decode graph", "token graph", "dense", "decode", "prefill", "mixed"):
        assert profile.parts[part]["mape"] < 0.04, part
    assert profile.held_out["mape"] < 0.02
    for size in ON_GPU.ladders.decode:
        assert profile.decode_graph(size) == pytest.approx(ON_GPU.decode_graph(size), rel=0.02)
    assert profile.host.handover[StepKind.LAUNCHED] == pytest.approx((6e-3, 0.0, 0.0), rel=0.1, abs=3e-6)
    assert profile.host.launch == pytest.approx(5.5e-3, rel=0.1)
    assert profile.host.after == pytest.approx((1e-4, 1e-6), rel=0.2)


def test_a_table_follows_what_was_served_where_a_device_under_load_is_slower_in_some_of_its_work():
    """Large graphs take a tenth longer when the device is short of power, small ones do not."""
    table = Curve((size, seconds * (1.1 if size > 16 else 1.0)) for size, seconds in ON_GPU.decode_graph.points)
    profile = fit(planted(ON_GPU, overlap=True, loaded=replace(ON_GPU, decode_graph=table)))
    assert profile.parts["served steps, from the designed ones alone"]["mape"] > 0.02
    assert profile.held_out["mape"] < 0.015
    for size in (1, 8, 32, 64):  # too few steps were served with 9 to 16 rows to tell them apart from larger ones
        assert profile.decode_graph(size) == pytest.approx(table(size), rel=0.01)


def test_a_power_limit_comes_back_with_the_times_of_a_rested_device():
    slopes = {StepKind.DECODE_GRAPH: 0.06, StepKind.TOKEN_GRAPH: 0.12, StepKind.LAUNCHED: 0.12}
    limit = PowerLimit(0.04, 9000.0, slopes)
    found = planted(ON_GPU, overlap=True, loaded=replace(ON_GPU, power=limit))
    profile = fit(found)
    assert profile.parts["served steps, from the designed ones alone"]["mape"] > 0.02
    assert profile.held_out["mape"] < 0.01
    assert profile.power is not None
    assert profile.power.window == pytest.approx(limit.window, rel=0.5)
    assert profile.power.threshold == pytest.approx(limit.threshold, rel=0.2)
    for size in ON_GPU.ladders.tokens:
        assert profile.token_graph(size) == pytest.approx(ON_GPU.token_graph(size), rel=0.02)
    for kind, slope in slopes.items():  # by which steps take longer at thrice the threshold
        share = [own.slopes[kind] * (3 * 9000.0 / own.threshold - 1) ** 2 for own in (profile.power, limit)]
        assert share[0] == pytest.approx(share[1], rel=0.2), (kind, slope)


def test_without_a_power_limit_none_is_found():
    assert fit(planted(ON_GPU, overlap=True)).power is None
    assert fit(planted(TRUE, overlap=False)).power is None


def test_a_graph_may_take_longer_than_a_larger_one():
    table = Curve([(64, 5e-3), (128, 9e-3), (192, 7e-3), (256, 9e-3)])
    profile = fit(planted(replace(ON_GPU, token_graph=table), overlap=True))
    for size, seconds in table.points:
        assert profile.token_graph(size) == pytest.approx(seconds, rel=0.02)


def test_launched_steps_whose_beginning_nobody_saw_are_timed_with_the_help_of_the_others():
    dense = Curve((tokens, 1.1 * seconds) for tokens, seconds in ON_GPU.dense.points)
    loaded = replace(ON_GPU, dense=dense)
    found = planted(ON_GPU, overlap=True, loaded=loaded)
    own = [step.sample for step in with_launched(found.served, loaded) if math.isfinite(step.sample.device)]
    assert len(own) > 20 + sum(math.isfinite(step.sample.device) for step in found.served)
    errors = [sample.device / ProfiledCost(loaded).time_of(sample.work).device - 1 for sample in own]
    assert max(map(abs, errors)) < 0.03
    fitted = ProfiledCost(fit(found))
    launched = [sample.work for sample in own if loaded.ladders.kind(sample.work) is StepKind.LAUNCHED]
    errors = [fitted.time_of(work).device / ProfiledCost(loaded).time_of(work).device - 1 for work in launched]
    assert sum(map(abs, errors)) / len(errors) < 0.01


def test_where_graphs_hold_every_step_a_longer_one_goes_on_with_their_table():
    sizes = tuple(range(64, 1025, 64))
    table = Curve((size, 4e-3 + 2e-5 * size) for size in sizes)
    all_graphs = replace(ON_GPU, ladders=Ladders(ON_GPU.ladders.decode, sizes), token_graph=table)
    profile = fit(planted(all_graphs, overlap=True))
    assert "dense" not in profile.parts
    assert profile.held_out["mape"] < 0.02
    prices = [ProfiledCost(profile).price(Work(n, 1, 1, prefills=((n, 0),))) for n in (1024, 2048, 4096)]
    assert prices[1] > 1.5 * prices[0]
    assert prices[2] > 1.5 * prices[1]


def test_a_fit_can_be_made_again_from_the_file_of_a_measurement(tmp_path):
    found = planted(ON_GPU, overlap=True, steps=200)
    found.save(tmp_path / "m.gz")
    assert fit(Measurement.load(tmp_path / "m.gz")).as_json() == fit(found).as_json()


@pytest.mark.parametrize("share", [0.02, 0.43])
def test_the_command_warns_of_a_busy_machine_and_the_profile_keeps_it(share, tmp_path, capsys):
    replace(planted(ON_GPU, overlap=True, steps=200), conditions={"cores": share}).save(tmp_path / "m.gz")
    out = tmp_path / "p.json"
    assert main(ProfileOptions("m", from_measurement=tmp_path / "m.gz", out=out)) == 0
    assert ("WARNING: a busy machine: other processes took 43% of" in capsys.readouterr().out) == (share > 0.1)
    assert Profile.load(out).conditions["cores"] == share


def test_the_spread_of_a_profile_is_that_of_the_repeats_of_its_batches():
    found = planted(TRUE, overlap=False, steps=200)
    steady = {design: [own[0]] * 4 for design, own in found.designed.items()}
    shaken = {design: [own[0]._replace(device=own[0].device * times) for times in (1.0, 0.8, 1.2, 1.0)]
              for design, own in steady.items()}  # fmt: skip
    spreads = [fit(replace(found, designed=designed)).conditions["spread"] for designed in (steady, shaken)]
    assert spreads == pytest.approx([0.0, 0.1])


@pytest.mark.parametrize("content", [b"", b"junk", gzip.compress(b"{}"), gzip.compress(b'{"format": 7}'),
                                     gzip.compress(b"[]"), gzip.compress(b"\xff")])  # fmt: skip
def test_what_is_no_measurement_is_refused_by_name(content, tmp_path):
    (tmp_path / "m.gz").write_bytes(content)
    options = ProfileOptions("m", from_measurement=tmp_path / "m.gz")
    with pytest.raises(ValueError, match=r"m\.gz holds no measurement"):
        read_measurement(options)
    with pytest.raises(ValueError, match="from_measurement = .*none.gz: No such file"):
        read_measurement(replace(options, from_measurement=tmp_path / "none.gz"))


def test_a_measurement_of_another_model_is_refused(tmp_path):
    Measurement("m", {}, NO_GRAPHS, False, 0, {}, [], []).save(tmp_path / "m.gz")
    with pytest.raises(ValueError, match="is of m, wanted other"):
        read_measurement(ProfileOptions("other", from_measurement=tmp_path / "m.gz"))


class Apart:
    """A device by itself that takes 3 s for everything; `held` are the seconds that it was kept waiting."""

    apart = True

    def __init__(self) -> None:
        self.held: list[float] = []

    def begin(self, hold: float) -> None:
        self.held.append(hold)

    def end(self) -> None:
        pass

    def seconds(self) -> float:
        return 3.0


def test_a_device_by_itself_is_held_until_it_has_all_of_a_step_and_the_host_is_timed_apart():
    timer = Apart()
    bench = Bench(Engine(CONFIG, None, Planted()), timer, lambda: None, always_warm=True)
    samples = bench.designed(Design("decode", decodes=(20,) * 4))
    assert [sample.device for sample in samples] == [3.0]  # a step as long as that is measured once
    assert 0 < samples[0].handover < 3.0
    assert timer.held[0] == FIRST_HOLD


def test_the_next_step_is_held_for_twice_the_last_handover_and_one_not_held_long_enough_has_no_time(monkeypatch):
    now, takes = 0.0, iter([0.01, 0.03, 0.03, 9.0, 0.05])

    class Slow:
        def execute(self, batch):
            nonlocal now
            now += next(takes)
            return SimpleNamespace(wait=lambda: StepResult({}))

    monkeypatch.setattr("research_engine.calibration.measure.time", SimpleNamespace(perf_counter=lambda: now))
    timer = Apart()
    timed = _Timed(Slow(), timer)
    batch = SimpleNamespace(received=[])
    devices = []
    for _ in range(5):
        timed.execute(batch)
        devices.append(timed.device)
    assert timer.held == pytest.approx([FIRST_HOLD, 0.021, 0.061, 0.061, 0.1])
    assert devices == pytest.approx([3.0, math.nan, 3.0, math.nan, 3.0], nan_ok=True)


@pytest.fixture(scope="module")
def measured_profile() -> Profile:
    torch = pytest.importorskip("torch")
    told = []
    options = ProfileOptions("dummy:tiny", device="cpu", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256,
                             kv_cache_memory=0.03)  # fmt: skip
    # a clock that moves by a second whenever it is read: ten minutes are up after 600 readings, on any machine
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny; threads would only wait for one another
    try:
        found = measure(
            options,
            lambda share, text: told.append((share, text)),
            clock=count(0.0, 1.0).__next__,
            watch=lambda: SimpleNamespace(others=lambda: 0.43),
        )
    finally:
        torch.set_num_threads(threads)
    assert [text.split(",")[0] for _, text in told][0 :: len(told) - 1] == ["loading dummy:tiny", "ordinary serving"]
    return fit(found)


def test_the_command_measures_a_real_engine(measured_profile):
    """What it measures is the machine's affair; that a profile of it says what it is, is not."""
    assert measured_profile.machine.keys() >= {"gpu", "dtype", "torch", "kernels", "research_engine"}
    assert measured_profile.parts.keys() >= {"dense", "decode", "prefill", "mixed"}
    assert measured_profile.held_out["steps"] > 0
    assert math.isfinite(measured_profile.held_out["mape"])
    assert ProfiledCost(measured_profile).price(Work(4, 4, 4, 4, 100, 40)) > 0
    assert measured_profile.conditions["cores"] == 0.43
    assert measured_profile.conditions["spread"] >= 0
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
    [
        ({"minutes": 0}, "minutes = 0: must be > 0 and <= 60"),
        ({"base": "p.json"}, "give from_run, too"),
        ({"measurement": "a", "from_run": "b"}, "measurement and from_run are both given"),
    ],
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
