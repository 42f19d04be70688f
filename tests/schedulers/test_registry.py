"""Policies by name and from files; what is wrong with a name or parameter is said with the nearest valid one first."""

from __future__ import annotations

import pytest

import schedulers
from schedulers.fcfs import FCFS
from tests.engine.shadow import drain, expected, greedy, make_engine

SHORTEST_FIRST = '''
"""A user's own policy."""
from dataclasses import dataclass

from schedulers.base import PolicyScheduler


@dataclass(kw_only=True)
class ShortestFirst(PolicyScheduler):
    """Running requests, then waiting ones by prompt length."""

    longest: int = 1000

    def order(self, view):
        yield from view.running
        yield from sorted((r for r in view.waiting if r.num_tokens <= self.longest), key=lambda r: r.num_tokens)


class Bare:
    """The whole contract and nothing else."""

    def schedule(self, view):
        from research_engine.engine.contract import SchedulePlan
        return SchedulePlan({r.id: 1 for r in (*view.running, *view.waiting)[:1]})

    def on_arrival(self, request): ...
    def on_step(self, record): ...
    def on_finish(self, request): ...


class NoScheduler:
    pass


class NoEvents:
    def schedule(self, view): ...


class Failing:
    def __init__(self):
        raise RuntimeError("boom")


class MuteError(ValueError):
    def __str__(self):
        raise RuntimeError("no str")


class Mute(Bare):
    def __init__(self):
        raise MuteError
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SHORTEST_FIRST)
    return path


def test_the_shipped_policies_are_available_and_can_be_made():
    assert {"chunked_prefill", "fcfs", "priority"} <= set(schedulers.available())
    for name in ("chunked_prefill", "fcfs", "priority"):
        assert callable(schedulers.create(name).schedule)


def test_parameters_are_fields_of_the_policy():
    policy = schedulers.create("fcfs", watermark=0.25, overtaking=True)
    assert policy == FCFS(watermark=0.25, overtaking=True)


def test_a_policy_from_a_file_serves_requests(file):
    policy = schedulers.create(f"{file}:ShortestFirst", longest=20)
    engine = make_engine(policy, max_num_seqs=1)
    requests = [engine.add_request(str(length), range(length), greedy(3))[0] for length in (9, 5, 7)]
    drain(engine)
    assert [r.request_id for r in engine.records.requests] == ["5", "7", "9"]
    assert [r.output_token_ids for r in requests] == [expected(r)[0] for r in requests]


def test_a_class_with_the_bare_contract_will_do(file):
    engine = make_engine(schedulers.create(f"{file}:Bare"))
    (request,) = engine.add_request("r", range(5), greedy(3))
    drain(engine)
    assert request.output_token_ids == expected(request)[0]


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("fcsf", {}, r"no scheduler 'fcsf'; valid ones, nearest first: fcfs, .*path/to/file.py:ClassName"),
        ("chunked", {}, r"nearest first: chunked_prefill"),
        ("fcfs", {"watermrk": 1}, r"'fcfs' has no parameter 'watermrk'; valid ones, nearest first: watermark"),
        ("fcfs", {"admission_closed": True}, r"has no parameter 'admission_closed'"),
        ("fcfs", {"watermark": 7}, r"watermark = 7: must be a share"),
        ("fcfs", {"watermark": "much"}, r"scheduler 'fcfs' cannot be made with .*'much'"),
        ("{file}:ShortestLast", {}, r"has no class 'ShortestLast'; valid ones, nearest first: ShortestFirst"),
        ("{file}:ShortestFirst", {"longst": 1}, r"nearest first: longest"),
        ("{file}:NoScheduler", {}, r"which has no method schedule\(view\)"),
        ("{file}:NoEvents", {}, r"which has no method on_arrival\(request\); a subclass of .*Scheduler has the events"),
        ("{file}:Failing", {}, r"cannot be made with {}: RuntimeError: boom"),
        ("{file}:Mute", {}, r"made with {}: MuteError \(its message could not be made: RuntimeError: no str\)"),
        ("{file}:Bare", {"x": 1}, r"has no parameter 'x'; it takes none"),
        ("{file}", {}, r"name the scheduler in it: .*:ShortestFirst"),
        ("no/such/file.py", {}, r"no file 'no/such/file.py' to take a scheduler from"),
        ("no/such/file.py:X", {}, r"no file 'no/such/file.py' to take the scheduler 'X' from"),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest_first(file, name, parameters, message):
    with pytest.raises(ValueError, match=message):
        schedulers.create(name.format(file=file), **parameters)


@pytest.mark.parametrize("source", ["def broken(:\n", "import no_such_module\n", "raise RuntimeError('no')\n"])
def test_a_file_that_cannot_be_loaded_is_named(tmp_path, source):
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=r"broken.py cannot be loaded: (SyntaxError|ModuleNotFoundError|RuntimeError)"):
        schedulers.create(f"{path}:X")
