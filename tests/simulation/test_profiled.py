"""Profiles: looked up exactly, never off the table, kept in JSON, refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research_engine.loading import load_config, resolve_model
from research_engine.simulation.attention_cost import AttentionFormula, AttentionTable
from research_engine.simulation.build import PROFILES, cost_model_of, profile_path
from research_engine.simulation.cost_model import CostModel, Work, single_prefill, work_of
from research_engine.simulation.curve import Curve
from research_engine.simulation.gpu_sheet import load_sheet
from research_engine.simulation.host_cost import HostCost
from research_engine.simulation.profiled import Profile, ProfiledCost, ProfileMismatch
from research_engine.simulation.step_kind import Ladders, StepKind
from tests.simulation.batches import batch_of, decodes

FORMULA = AttentionFormula(1.0, 0.1, 0.01, 0.001, {(16, 0): 0.5, (16, 100): 0.3, (64, 0): 0.4, (64, 100): 0.2})
TABLE = AttentionTable(
    [(0, 0, n, kv, 0.001 * n * kv) for n in (1, 2, 4) for kv in (16, 32)]
    + [(c, k, n, kv, 0.01 * c * (k + c) + 0.002 * n * kv)
       for c in (16, 32) for k in (0, 16, 32) for n in (0, 1, 4) for kv in ((0,) if n == 0 else (16, 32))]
)  # fmt: skip


def profile(attention=FORMULA, **changes) -> Profile:
    fields = {"model": "m", "machine": {"gpu": "g", "driver": "1"}, "dense": Curve([(1, 2.0), (8, 4.0), (64, 20.0)]),
              "head": Curve([(1, 1.0), (8, 3.0)]), "host": HostCost(schedule=(0.25, 0.125)), "block_move": (7.0, 5.0),
              "block_copy": (0.125, 0.5), "held_out": {"steps": 9, "mape": 0.02, "bias": -0.01},
              "parts": {"dense": {"mape": 0.5}}, "origin": "made up", "conditions": {"cores": 0.05}}  # fmt: skip
    return Profile(**{**fields, "attention": attention, **changes})


def test_it_is_a_cost_model():
    assert isinstance(ProfiledCost(profile()), CostModel)


def test_a_decode_step_is_the_sum_of_its_parts():
    attention = 1.0 + 0.1 * 2 + 0.01 * 300 + 0.001 * 200
    expected = Curve([(1, 2.0), (8, 4.0)])(2) + Curve([(1, 1.0), (8, 3.0)])(2) + attention + 0.25 + 0.125 * 2
    assert ProfiledCost(profile()).seconds(batch_of((1, 99), (1, 199))) == pytest.approx(expected)


def test_prefill_is_pairs_times_the_interpolated_rate():
    work = Work(tokens=40, sequences=1, draws=0, prefills=((40, 50),))
    assert FORMULA.seconds(work) == pytest.approx(40 * (50 + 41 / 2) * (0.5 + 0.3 + 0.4 + 0.2) / 4)


def test_block_moves_and_copies_are_paid_for():
    batch = batch_of()
    batch.swap_in, batch.copies = [(0, 1), (1, 2), (2, 3)], [(0, 1)]
    assert ProfiledCost(profile()).seconds(batch) == pytest.approx(7.0 + 3 * 5.0 + 0.125 + 0.5 + 0.25)


@pytest.mark.parametrize("attention", [FORMULA, TABLE], ids=["formula", "table"])
@given(
    count=st.integers(1, 5000), context=st.integers(1, 10**6), chunk=st.integers(2, 10**5), more=st.integers(0, 9999)
)
def test_no_batch_is_off_the_table_and_more_work_takes_no_less(attention, count, context, chunk, more):
    cost = ProfiledCost(profile(attention))

    def price(rows: int, each: int, tokens: int) -> float:
        return cost.price(Work(rows + tokens, rows + 1, rows, rows, rows * each, each, ((tokens, context),)))

    base = price(count, context, chunk)
    assert 0 < base < float("inf")
    assert price(count + more, context, chunk) >= base - 1e-9 * base
    assert price(count, context + more, chunk) >= base - 1e-9 * base


def test_a_table_gives_what_was_measured():
    assert TABLE.seconds(work_of(decodes(4, context=32))) == pytest.approx(0.001 * 4 * 32)
    mixed = work_of(batch_of((16, 32), *[(1, 15)] * 4))
    assert TABLE.seconds(mixed) == pytest.approx(0.01 * 16 * 48 + 0.002 * 4 * 16)


def test_chunks_of_one_step_count_as_one_with_as_many_pairs():
    chunk, before = single_prefill(((16, 24), (16, 8)))
    assert chunk == 32
    assert chunk * (before + (chunk + 1) / 2) == 16 * (24 + 17 / 2) + 16 * (8 + 17 / 2)
    work = Work(32, 2, 2, prefills=((16, 24), (16, 8)))
    assert TABLE.seconds(work) == pytest.approx(0.01 * 32 * (before + 32))


def test_short_prompts_together_take_less_than_one_long_prompt_and_no_less_than_one_of_them():
    together = TABLE.seconds(Work(32, 2, 2, prefills=((16, 0), (16, 0))))
    assert TABLE.seconds(Work(16, 1, 1, prefills=((16, 0),))) <= together
    assert together < TABLE.seconds(Work(32, 1, 1, prefills=((32, 0),)))


@pytest.mark.parametrize("attention", [FORMULA, TABLE], ids=["formula", "table"])
def test_a_profile_survives_its_file(attention, tmp_path):
    own = profile(attention)
    own.save(tmp_path / "p.json")
    read = Profile.load(tmp_path / "p.json")
    for name in ("model", "machine", "host", "block_move", "block_copy", "held_out", "parts", "origin",
                 "conditions"):  # fmt: skip
        assert getattr(read, name) == getattr(own, name)
    for batch in (decodes(3, 77), batch_of((40, 10), (1, 5)), batch_of((5000, 0))):
        assert ProfiledCost(read).seconds(batch) == ProfiledCost(own).seconds(batch)


@pytest.mark.parametrize(
    ("conditions", "told"),
    [
        ({}, ""),
        ({"cores": 0.1, "gpu": 0.1, "spread": 0.15}, ""),
        ({"cores": 0.43}, "other processes took 43% of the cores"),
        ({"cores": 0.0, "gpu": 0.9, "spread": 0.3}, "the GPU was 90% busy before, repeats of a batch spread by 30%"),
    ],
)
def test_a_profile_of_a_busy_machine_says_so_in_one_line(conditions, told):
    assert profile(conditions=conditions).disturbance == told


def test_a_profile_from_before_conditions_were_kept_is_read(tmp_path):
    path = tmp_path / "p.json"
    profile().save(path)
    data = json.loads(path.read_text())
    del data["conditions"]
    path.write_text(json.dumps(data))
    assert Profile.load(path).conditions == {}


def test_a_profile_of_something_else_is_refused_with_every_difference():
    own = profile()
    own.require(model="m", gpu="g")
    with pytest.raises(ProfileMismatch, match="gpu is 'g', wanted 'h'; kernels is 'not recorded', wanted '2'"):
        own.require(model="m", gpu="h", kernels="2")


def test_a_file_of_another_format_is_refused(tmp_path):
    (tmp_path / "p.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99, this version reads 4"):
        Profile.load(tmp_path / "p.json")
    (tmp_path / "p.json").write_text('{"format": 4, "model": "m"}')
    with pytest.raises(ValueError, match="lacks 'machine'"):
        Profile.load(tmp_path / "p.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"null", b"{}"])
def test_what_is_no_profile_is_refused_with_its_name(content, tmp_path):
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"p\.json is no profile"):
        Profile.load(tmp_path / "p.json")


WRONG = [None, "x", 7, -1.0, float("nan"), [], {}, [[1, -2.0]], [[1]], {"kind": "formula"}, [1, None]]


FIELDS = ("model", "machine", "dense", "head", "attention", "host", "ladders", "overlap", "decode_graph", "token_graph",
          "block_move", "block_copy", "held_out", "parts", "origin", "conditions")  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_corrupt_field_is_refused_or_means_what_it_says(name, wrong, tmp_path):
    path = tmp_path / "p.json"
    profile().save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, name: wrong}))
    texts = isinstance(wrong, dict) and all(isinstance(value, str) for value in wrong.values())
    harmless = {"model": wrong == "x", "origin": wrong == "x", "machine": texts, "held_out": wrong == {},
                "parts": wrong == {}, "conditions": wrong == {}, "decode_graph": wrong is None,
                "token_graph": wrong is None}  # fmt: skip
    if harmless.get(name):
        assert Profile.load(path).host == profile().host  # another text, or nothing recorded: no damage
        return
    with pytest.raises(ValueError, match=r"p\.json: the profile"):
        Profile.load(path)


def test_a_profile_that_ships_is_found_by_its_name_and_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = Profile.load(profile_path("llama3-8b-h200"))
    assert (shipped.model, shipped.machine["gpu"]) == ("dummy:llama3-8b", "NVIDIA H200")
    assert profile_path("nobody-has-it") == Path("nobody-has-it")
    (tmp_path / "llama3-8b-h200").write_text("mine")
    assert profile_path("llama3-8b-h200") == Path("llama3-8b-h200")


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_every_profile_that_ships_prices_a_step_and_is_refused_for_another_model(path):
    name = Profile.load(path).model
    model = load_config(resolve_model(name))
    with pytest.raises(ValueError, match="model"):
        cost_model_of(f"profiled:{path.stem}", model_name="dummy:tiny", model=model, gpu=None)
    cost = cost_model_of(f"profiled:{path.stem}", model_name=name, model=model, gpu=load_sheet("h200"))
    assert 0 < cost.seconds(decodes(8, 100)) < 0.1


GRAPHS = {
    "ladders": Ladders((1, 8, 16), (64,)), "decode_graph": Curve([(1, 100.0), (16, 115.0)]),
    "token_graph": Curve([(64, 200.0)]),
    "host": HostCost((1.0, 0.5), {StepKind.DECODE_GRAPH: (2.0, 0.25, 0.0), StepKind.LAUNCHED: (40.0, 0.0, 0.125)},
                     30.0, (3.0, 0.75)),
}  # fmt: skip


def test_a_decoding_step_takes_the_graph_of_the_next_size():
    time = ProfiledCost(profile(**GRAPHS)).step_time(decodes(3, 50))
    assert time.device == pytest.approx(107.0 + 0.01 * 150 + 0.001 * 50)  # 8 rows of 1 to 16; a and b are in the table
    assert (time.before, time.launch, time.after) == pytest.approx((1 + 1.5 + 2 + 0.75, 0.0, 3 + 2.25))


def test_a_step_with_prompts_takes_a_graph_as_long_as_one_holds_its_tokens():
    cost = ProfiledCost(profile(**GRAPHS))
    small = cost.step_time(batch_of((63, 0), (1, 9)))
    assert small.device == pytest.approx(200.0 + FORMULA.seconds(work_of(batch_of((63, 0), (1, 9)))))
    assert small.launch == 0.0
    large = cost.step_time(batch_of((64, 0), (1, 9)))
    dense = Curve([(1, 2.0), (8, 4.0), (64, 20.0)])(65) + Curve([(1, 1.0), (8, 3.0)])(2)
    assert large.device == pytest.approx(dense + FORMULA.seconds(work_of(batch_of((64, 0), (1, 9)))))
    assert (large.before, large.launch) == pytest.approx((1 + 1.0 + 40 + 0.125 * 65 - 30, 30.0))


def test_launching_beside_the_device_makes_a_step_longer_only_where_it_takes_longer():
    cost = ProfiledCost(profile(**GRAPHS))
    time = cost.step_time(batch_of((64, 0), (1, 9)))
    assert time.total == pytest.approx(time.before + max(30.0, time.device) + time.after)


def test_the_parts_of_a_step_add_up_to_the_devices_time():
    cost = ProfiledCost(profile(**GRAPHS))
    for batch in (decodes(3, 50), batch_of((20, 5), (1, 9)), batch_of((200, 5), (1, 9))):
        batch.swap_in = [(0, 1)]
        parts = cost.parts(work_of(batch))
        assert sum(parts.values()) == pytest.approx(cost.step_time(batch).device)
        assert parts["moves"] == pytest.approx(12.0)
        assert min(parts.values()) >= 0


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [({"decode_graph": None}, "no table of decode_graph"), ({"attention": TABLE}, "no formula for attention"),
     ({"ladders": Ladders((8, 1), (64,))}, "sizes of decode_graph are"), ({"ladders": Ladders((0,))}, "integers >= 1")],
)  # fmt: skip
def test_graphs_that_cannot_be_priced_are_refused(wrong, rule):
    with pytest.raises(ValueError, match=rule):
        profile(**{**GRAPHS, **wrong})


def test_graphs_and_host_time_survive_the_file(tmp_path):
    own = profile(**GRAPHS)
    own.save(tmp_path / "p.json")
    read = Profile.load(tmp_path / "p.json")
    assert (read.ladders, read.host) == (own.ladders, own.host)
    for batch in (decodes(3, 77), batch_of((40, 10), (1, 5)), batch_of((5000, 0))):
        assert ProfiledCost(read).step_time(batch) == ProfiledCost(own).step_time(batch)
