"""A policy that never comes back ends its run with an error that says where it was, or is gone over."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from research_engine.engine import overdue
from research_engine.engine.contract import EngineView, Request, SchedulePlan
from research_engine.engine.driver import Arrival, replay
from research_engine.engine.engine import Engine
from research_engine.engine.errors import PolicyError
from research_engine.engine.overdue import Overdue, overdue_calls_end
from schedulers.chunked_prefill import ChunkedPrefill

from .shadow import assert_empty, drain, greedy, make_engine

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread alone"
)
ARRIVALS = [Arrival(0.0, name, range(5), greedy(6)) for name in "ab"]


def computes_for_ever() -> None:
    while True:
        with suppress(Exception):
            sum(range(10))


def waits_for_ever() -> None:
    threading.Event().wait()


def sleeps_for_ever() -> None:
    time.sleep(1e8)


def holds_on() -> None:
    """Lets go of the third signal alone."""
    for _ in range(2):
        with suppress(BaseException):
            waits_for_ever()
    sleeps_for_ever()


class Hangs(ChunkedPrefill):
    """Does not return from its third decision, once; or from the first arrival that it is told of."""

    how: Callable[[], None] | None = None
    at_arrival = False
    hung = False

    def schedule(self, view: EngineView) -> SchedulePlan:
        self._hang(not self.at_arrival and view.step == 2)
        return super().schedule(view)

    def on_arrival(self, request: Request) -> None:
        self._hang(self.at_arrival)
        super().on_arrival(request)

    def _hang(self, here: bool) -> None:
        if here and not self.hung and self.how is not None:
            self.hung = True
            self.how()


def engine_with(how: Callable[[], None] | None, at_arrival: bool = False, on_fault: str = "stop") -> Engine:
    policy = Hangs()
    policy.how, policy.at_arrival = how, at_arrival
    engine = make_engine(policy, on_fault=on_fault)
    engine._policy.patience = 0.5
    return engine


@pytest.mark.parametrize("how", [computes_for_ever, waits_for_ever, sleeps_for_ever])
def test_a_decision_that_never_comes_is_an_error_that_says_where_it_was(how: Callable[[], None]) -> None:
    engine = engine_with(how)
    with pytest.raises(PolicyError, match=r"step 2: Hangs.schedule did not return within 0.5 s; it was in ") as caught:
        replay(engine, ARRIVALS)
    assert isinstance(caught.value.__cause__, Overdue)
    assert str(caught.value).endswith(how.__name__)
    drain(engine)  # the engine is as it was before the step
    assert_empty(engine)


def test_a_call_that_catches_everything_is_ended_again_until_it_lets_go() -> None:
    with pytest.raises(PolicyError, match=r"did not return within 0.5 s; it was in .*, sleeps_for_ever"):
        replay(engine_with(holds_on), ARRIVALS)


INSTALLED = """
class Installed(Base):
    def schedule(self, view):
        dumps([self], default=for_ever)

def for_ever(value):
    wait()
"""


def test_the_place_is_the_policys_own_line_even_among_the_libraries_and_whatever_it_called() -> None:
    names = {"Base": ChunkedPrefill, "dumps": json.dumps, "wait": waits_for_ever, "__name__": "installed"}
    exec(compile(INSTALLED, json.__file__.replace("__init__", "installed"), "exec"), names)
    engine = make_engine(names["Installed"]())
    engine._policy.patience = 0.5
    with pytest.raises(PolicyError, match=r"it was in .*installed.py:\d, for_ever"):
        replay(engine, ARRIVALS)


class ByHand(threading.Event):
    """What the watch waits with, that looks when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: SimpleQueue[None] = SimpleQueue()  # a signal in its midst leaves no lock held
        self._due: SimpleQueue[None] = SimpleQueue()

    def wait(self, timeout: float | None = None) -> bool:
        self._asked.put(None)
        self._due.get()
        return self.is_set()

    def set(self) -> None:
        super().set()
        self._due.put(None)

    def look(self, times: int) -> None:
        """Returns when the looks are over, and what they led to."""
        for _ in range(times):
            self._asked.get()
            self._due.put(None)
        self._asked.get()
        self._asked.put(None)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> ByHand:
    """The watch of the engines of a test."""
    watch = ByHand()
    names = {name: getattr(threading, name) for name in ("Thread", "main_thread", "current_thread")}
    monkeypatch.setattr(overdue, "threading", SimpleNamespace(Event=lambda: watch, **names))
    return watch


MOST_LOOKS = 9  # the first sees the call, and eight its patience


def test_a_call_just_within_its_patience_is_left_alone_and_one_beyond_is_not(by_hand: ByHand) -> None:
    policy, came_back = engine_with(None)._policy, []
    with overdue_calls_end(SimpleNamespace(_policy=policy)):  # type: ignore[arg-type]
        for _ in range(2):  # two calls are not one of twice the length
            policy._call(by_hand.look, MOST_LOOKS)
            came_back.append(policy.calls)
        with pytest.raises(Overdue):
            policy._call(by_hand.look, MOST_LOOKS + 1)
    assert came_back == [1, 2]


def test_a_signal_meant_for_an_earlier_call_ends_no_later_one(by_hand: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, sent = engine_with(None)._policy, []
    monkeypatch.setattr(signal, "pthread_kill", lambda *args: sent.append(args))
    with overdue_calls_end(SimpleNamespace(_policy=policy)):  # type: ignore[arg-type]
        policy._call(by_hand.look, MOST_LOOKS + 1)
        assert len(sent) == 1  # and arrives late
        policy._call(signal.raise_signal, signal.SIGRTMIN)


def test_a_run_that_is_to_go_on_goes_on_past_it() -> None:
    engine = engine_with(waits_for_ever, on_fault="go_on")
    replay(engine, ARRIVALS)
    assert_empty(engine)
    (fault,) = engine.faults.latest
    assert "did not return" in fault.rule
    assert [record.output_tokens for record in engine.records.requests] == [6, 6]


def test_an_event_that_never_ends_is_an_error_too() -> None:
    engine = engine_with(waits_for_ever, at_arrival=True)
    with pytest.raises(PolicyError, match=r"request 'a': Hangs.on_arrival did not return within 0.5 s"):
        replay(engine, ARRIVALS)


def test_nothing_is_left_of_the_watch_after_a_run() -> None:
    before = signal.getsignal(signal.SIGRTMIN)
    engine = engine_with(None)
    replay(engine, ARRIVALS)
    assert signal.getsignal(signal.SIGRTMIN) == before
    assert "overdue calls" not in [thread.name for thread in threading.enumerate()]
    assert [record.output_tokens for record in engine.records.requests] == [6, 6]


def test_a_signal_that_comes_after_the_call_has_ended_does_nothing() -> None:
    engine = engine_with(None)
    with overdue_calls_end(engine):
        signal.raise_signal(signal.SIGRTMIN)
    assert not engine._policy.is_called


def test_another_thread_than_the_main_one_is_not_watched() -> None:
    engine, seen = engine_with(None), []

    def run() -> None:
        with overdue_calls_end(engine):
            seen.append([thread.name for thread in threading.enumerate()])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen and "overdue calls" not in seen[0]
