"""Decisions are taken down as they were made, survive a file, and replay to the same run."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from research_engine.engine.contract import Preemption
from research_engine.engine.decision_log import Decision, DecisionLog, ReplayScheduler
from research_engine.engine.errors import PlanError
from research_engine.engine.reservation import RESERVATIONS
from schedulers.fcfs import FCFS
from schedulers.priority import Priority

from .random_policies import RandomPolicy
from .random_runs import RandomRun
from .shadow import drain, greedy, make_engine


@pytest.mark.parametrize("reservation", RESERVATIONS)
def test_a_run_replayed_from_its_file_takes_the_same_decisions(reservation, tmp_path: Path):
    """Random decisions over random runs: chunks, preemptions of both kinds, aborts, ids used again."""
    facts: Counter[str] = Counter()
    for seed in range(60):
        log, again = DecisionLog(), DecisionLog()
        first = RandomRun(
            seed, lambda rng: RandomPolicy(random.Random(rng.random()), 0.1, 0.2, 0.5),
            reservation=reservation, decisions=log,
        )  # fmt: skip
        first.finish()
        path = tmp_path / "decisions.jsonl"
        log.write(path)
        kept = DecisionLog.read(path)
        assert kept == log

        def replayed(rng, decisions=kept.decisions):
            rng.random()  # as the recorded run did for its policy
            return ReplayScheduler(decisions)

        second = RandomRun(seed, replayed, reservation=reservation, decisions=again)
        second.finish()
        assert again.decisions == log.decisions
        assert second.engine.records == first.engine.records
        facts.update(first.facts())
    assert min(facts[kind] for kind in ("recomputes", "swaps", "aborts", "chunks")) > 20, facts


def crowded(scheduler, log: DecisionLog):
    """Three requests for a cache that holds two of them; the last is urgent."""
    engine = make_engine(scheduler, num_blocks=6, decisions=log, enable_prefix_caching=False)
    for index, name in enumerate(("low", "also", "urgent")):
        engine.add_request(name, range(100 * index, 100 * index + 7), greedy(5), priority=-index)
        engine.step()
    drain(engine)
    return engine


def test_a_decision_says_who_got_what_who_gave_way_and_why():
    log = DecisionLog()
    engine = crowded(Priority(watermark=0.0), log)
    assert log.policy == "Priority"
    steps = {step.step: step for step in engine.records.steps}
    assert sum(len(decision.preempt) for decision in log.decisions) > 0
    for decision in log.decisions:
        if decision.tokens or decision.preempt:
            step = steps[decision.step]
            assert decision.now == step.started
            assert decision.tokens == tuple(zip(step.request_ids, step.num_tokens, strict=True))
            assert [p[:3] for p in step.preemptions] == [tuple(p) for p in decision.preempt]
    assert any("waits: no blocks" in why for decision in log.decisions for why in decision.reasons.values())


def test_the_decisions_about_a_request_are_those_that_name_it():
    log = DecisionLog()
    crowded(FCFS(watermark=0.0), log)
    about = log.about("urgent")
    assert about and about != log.decisions
    for decision in log.decisions:
        text = json.dumps([decision.tokens, [p.request_id for p in decision.preempt], decision.reasons])
        assert (decision in about) == ('"urgent"' in text)


def test_a_step_that_decides_nothing_is_not_in_the_log():
    log = DecisionLog()
    engine = make_engine(FCFS(), decisions=log)
    engine.step()
    assert engine.num_steps == 1 and log.decisions == []


def test_a_replay_that_no_longer_fits_names_step_and_request():
    engine = make_engine(ReplayScheduler([Decision(1, 0.0, (("gone", 1),))]))
    engine.add_request("here", [1], greedy())
    engine.step()
    with pytest.raises(
        PlanError, match=r"step 1: ReplayScheduler: request 'gone': is scheduled, but no such request is live"
    ):
        engine.step()


def test_a_log_keeps_order_and_any_text(tmp_path: Path):
    log = DecisionLog("P", [
        Decision(0, 0.1 + 0.2, (("b", 2), ("a", 1)), (Preemption("c", "swap", "für b\n"),), {"é": "waits"}),
        Decision(7, 1.0, (), (), {"a": "skipped"}),
    ])  # fmt: skip
    path = tmp_path / "log.jsonl"
    log.write(path)
    assert DecisionLog.read(path) == log
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3


HEAD = '{"format": "research_engine.decisions", "version": 1, "policy": "P"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no decision log"),
        ('{"step": 1}\n', "line 1: no decision log: the first line must hold"),
        ('{"format": "research_engine.decisions", "version": 2}\n', "line 1: .*the first line must hold"),
        (HEAD + '{"step": 1, "now": 0}\n', "line 2: no decision log: no 'tokens'"),
        (HEAD + '{"step": 1, "now": 0, "tokens": [["a"]]}\n', "line 2: no decision log"),
        (HEAD + '{"step": 1, "now": 0, "tokens": [], "preempt": [["a", "drop", ""]]}\n', "mode 'drop' must be one of"),
        (HEAD + '{"step": 1, "now": 0, "tokens": []}\n' * 2, "line 3: .*step 1 comes after step 1"),
        (HEAD + '{"step": 1, "no', "line 2: no decision log"),
    ],
)
def test_a_damaged_log_is_told_by_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        DecisionLog.read(path)
