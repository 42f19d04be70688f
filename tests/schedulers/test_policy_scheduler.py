"""PolicyScheduler: whatever the three choices are, the plan keeps the rules or says which choice was no choice."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from research_engine.engine.decision_log import DecisionLog
from research_engine.engine.errors import PolicyError
from schedulers.base import PolicyScheduler
from schedulers.chunked_prefill import ChunkedPrefill
from schedulers.fcfs import FCFS
from schedulers.ranked import RankedScheduler
from tests.engine.random_runs import RandomRun
from tests.engine.shadow import drain, greedy, make_engine


@dataclass(kw_only=True)
class Whim(PolicyScheduler):
    """Chooses at random: order with omissions and repetitions, quotas from -2 up, victims or none."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rng = random.Random(self.seed)

    def order(self, view):
        everyone = [*view.running, *view.waiting]
        return self.rng.choices(everyone, k=2 * len(everyone)) if everyone else []

    def quota(self, request, view, budget):
        return self.rng.choice([-2, 0, 1, 3, budget, 10 * budget])

    def victim(self, candidates, needy, view):
        return self.rng.choice([None, *candidates, *candidates])


def test_any_choices_make_a_plan_that_keeps_the_rules():
    """Random choices in random runs: no PlanError, and outputs as alone."""
    for seed in range(300):

        def policy(rng, seed=seed):
            return Whim(
                seed=seed, overtaking=rng.random() < 0.7, watermark=rng.choice([0.0, 0.2]),
                admission=rng.choice(["whole", "chunk"]), preemption=rng.choice(["swap", "recompute"]),
            )  # fmt: skip

        RandomRun(seed, policy).finish()


def test_a_request_that_the_order_names_twice_is_served_once(rows):
    class Twice(PolicyScheduler):
        def order(self, view):
            return [request for request in (*view.running, *view.waiting) for _ in range(2)]

    engine = make_engine(Twice(), max_num_batched_tokens=3)
    for name in "abc":
        engine.add_request(name, [1], greedy(3))
    drain(engine)
    assert rows(engine) == [{"a": 1, "b": 1, "c": 1}] * 3, "naming it twice takes no second share of the budget"


def test_an_order_without_an_end_is_named():
    class Endless(PolicyScheduler):
        def order(self, view):
            while True:
                yield view.waiting[-1]

    engine = make_engine(Endless())
    for name in "ab":
        engine.add_request(name, [1], greedy())
    with pytest.raises(PolicyError, match="Endless.order yielded more than 4 requests and there are 2; it must end"):
        engine.step()


def test_a_request_that_the_order_leaves_out_is_skipped(rows):
    class OnlyB(PolicyScheduler):
        def order(self, view):
            everyone = [*view.running, *view.waiting]
            return [r for r in everyone if r.id == "b" or len(everyone) == 1]

    engine = make_engine(OnlyB())
    for name in "ab":
        engine.add_request(name, range(6), greedy(2))
    drain(engine)
    assert rows(engine) == [{"b": 6}, {"b": 1}, {"a": 2}, {"a": 1}]


def test_nobody_is_preempted_when_all_victims_together_would_not_be_enough():
    class TakesAll(PolicyScheduler):
        def victim(self, candidates, needy, view):
            return candidates[-1]

        def order(self, view):
            return sorted((*view.running, *view.waiting), key=lambda r: r.id)

    engine = make_engine(TakesAll(watermark=0.0), num_blocks=4)
    engine.add_request("b", range(4), greedy(8))
    engine.add_request("c", range(50, 54), greedy(8))
    engine.step()
    kept = TakesAll.victim
    TakesAll.victim = lambda self, candidates, needy, view: next((r for r in candidates if r.id == "c"), None)
    engine.add_request("a", range(100, 116), greedy(1))
    engine.step()
    assert not engine.records.steps[-1].preemptions and set(engine.records.steps[-1].request_ids) == {"b", "c"}
    TakesAll.victim = kept
    engine.step()
    assert {p.request_id for p in engine.records.steps[-1].preemptions} == {"b", "c"}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"quota": lambda *_: 1.5}, r"Odd.quota returned 1.5; it must return a number of tokens, an int"),
        ({"quota": lambda *_: None}, r"Odd.quota returned None"),
        ({"victim": lambda *_: "b"}, r"Odd.victim returned 'b'; it must return one of the candidates, or None"),
        ({"yielding": lambda *_: 5}, r"Odd.yielding returned 5; it must return the candidates that may be asked"),
        ({"own_victim": lambda *_: None}, r"Odd.own_victim returned None; it must return one of the candidates"),
        ({"order": lambda *_: None}, r"Odd.order returned None; it must return the requests to serve, in order"),
        ({"order": lambda *_: ["a"]}, r"Odd.order yielded 'a'; it must yield requests, of view.running and view.wait"),
        ({"mode": lambda *_: "drop"}, r"Odd.mode returned 'drop'; it must return 'recompute' or 'swap'"),
        ({"explain": lambda *_: 3}, r"Odd.explain returned 3; it must return a mapping of names to numbers or texts"),
    ],
)
def test_a_choice_that_is_no_choice_is_named(choice, message):
    """The error says what the hook should return and, where it was about one, the request."""
    odd = type("Odd", (PolicyScheduler,), choice)(watermark=0.0)
    engine = make_engine(odd, num_blocks=2, decisions=DecisionLog())
    for name in "ab":
        engine.add_request(name, range(4), greedy(4))
    with pytest.raises(PolicyError, match=message) as caught:
        drain(engine)
    assert caught.value.request_id == (None if "order" in choice else "a")
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (
            lambda self, request: 5,
            r"request 'a': .*on_arrival raised TypeError: rank of request 'a' is 5; it must be a tu",
        ),
        (lambda self, request: (1,), r"rank of request 'b' is \(1,\); it must be a tuple .* unique: end it with req"),
        (
            lambda self, request: ("x" if request.id == "a" else 1,),
            r"rank of request 'b' is \(1,\); it must be a tuple",
        ),
    ],
)
def test_a_rank_that_orders_nothing_is_named(rank, message):
    engine = make_engine(type("Odd", (RankedScheduler,), {"rank": rank})())
    with pytest.raises(PolicyError, match=message):
        [engine.add_request(name, range(4), greedy(4)) for name in "ab"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("watermark", 1.0, "watermark = 1.0: must be a share of the blocks"),
        ("watermark", -0.1, "watermark = -0.1"),
        ("admission", "half", "admission = 'half': must be one of 'whole', 'chunk'"),
        ("preemption", "drop", "preemption = 'drop': must be one of 'recompute', 'swap'"),
    ],
)
def test_a_parameter_out_of_range_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        PolicyScheduler(**{field: value})


@pytest.mark.parametrize("policy", [FCFS, ChunkedPrefill])
@pytest.mark.parametrize("admission", ["whole", "chunk"])
def test_requests_never_take_each_others_blocks_in_turn(policy, admission):
    """Chunk-wise admission without a watermark overcommits the pool; still whoever has run longest goes on."""
    for seed in range(30):
        rng = random.Random(seed)
        scheduler = policy(admission=admission, watermark=0.0)
        engine = make_engine(scheduler, num_blocks=10, max_num_seqs=4, max_num_batched_tokens=16)
        for i in range(6):
            engine.add_request(
                str(i), [rng.randrange(1000) for _ in range(rng.randint(8, 24))], greedy(rng.randint(1, 15))
            )
        for _ in range(600):
            if not engine.has_unfinished:
                break
            oldest = next(iter(engine.view().running), None)
            engine.step()
            assert oldest is None or oldest.is_running or oldest.is_finished, f"{oldest} was preempted"
        assert not engine.has_unfinished
