"""`research-engine new scheduler NAME`: a policy that works, with comments on what can be changed, and its test."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path
from typing import Annotated

import tyro

POLICY = '''"""{Title}: the shortest prompt first, and nobody is passed over after `patience` seconds.

(Say here what yours does, and where the idea comes from, with its paper.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, Fact, Request
from schedulers.base import PolicyScheduler


@dataclass(kw_only=True)
class {Class}(PolicyScheduler):
    """Running requests as admitted, then waiting ones: those out of patience by arrival, the others by length.

    The fields are the policy's parameters: scheduler_params.patience=5 on the command line of an experiment,
    `scheduler_params: {{patience: 5}}` in YAML, `scheduler_params={{"patience": 5}}` in Python.

    Args:
        patience: seconds of waiting after which a request goes before all that have waited for less.
    """

    patience: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("patience", self.patience >= 0, "seconds >= 0")  # the error names parameter, value and this rule

    def order(self, view: EngineView) -> Iterable[Request]:
        """Whom to serve, in which order. Whoever is left out is skipped in this step.

        view.now is the time: never read a clock, or the policy cannot be simulated. All that a view and a request offer
        is in research_engine/engine/contract.py and request.py; all of it is read-only.
        """
        yield from view.running
        yield from sorted(view.waiting, key=lambda request: self.rank(request, view))

    def rank(self, request: Request, view: EngineView) -> tuple[float, ...]:
        """Smaller goes first; the index at its end makes it unique, so that runs repeat exactly."""
        if view.now - request.arrival_time >= self.patience:
            return (0, request.arrival_time, request.index)
        return (1, view.uncomputed_tokens(request), request.index)  # what the prefix cache holds is no work

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        """By what a request was judged: for `--explain`, and asked only then."""
        return {{"waited": view.now - request.arrival_time, "tokens to compute": view.uncomputed_tokens(request)}}

    # What else can be chosen. Take the mark off, and delete what you don't need.
    #
    # def quota(self, request, view, budget):
    #     """How many tokens it gets in this step, of the `budget` that is left; 0 skips it."""
    #     return min(budget, 256)
    #
    # def yielding(self, candidates, needy, view):
    #     """Which of the running candidates may lose their blocks to `needy`; victim_rule picks one of them."""
    #     return super().yielding(candidates, needy, view)
    #
    # To wait for a time although requests are there, set self.wake_at in `order` and name nobody.
    #
    # What happened, for policies with state:
    #
    # def on_arrival(self, request): ...
    # def on_step(self, record): ...  # record.request_ids, num_tokens and drew run parallel
    # def on_finish(self, request): ...
'''

TEST = '''"""{Class} does what it says, changes no output, and keeps its hands off the clock."""

from pathlib import Path

import pytest

import schedulers
from research_engine.testing import ManualClock, check_policy, drain, greedy, make_engine, reads_a_clock

FILE = Path(__file__).with_name("{name}.py")


def make(**parameters):
    return schedulers.create(f"{{FILE}}:{Class}", **parameters)


def first_served(policy, lengths, *, seconds_apart):
    """Prompt lengths in the order in which their requests first ran, one at a time; they arrive one after the other."""
    engine = make_engine(policy, clock=ManualClock(), max_num_seqs=1)
    for index, length in enumerate(lengths):
        engine.add_request(str(index), range(length), greedy(1), arrival_time=index * seconds_apart)
    engine.clock.sleep_until(len(lengths) * seconds_apart)
    drain(engine)
    return [record.prompt_tokens for record in engine.records.requests]


def test_the_shortest_prompt_goes_first():
    assert first_served(make(), [9, 3, 6], seconds_apart=1.0) == [3, 6, 9]


def test_nobody_waits_for_longer_than_patience():
    assert first_served(make(patience=0.5), [9, 3, 6], seconds_apart=1.0) == [9, 3, 6]


def test_a_wrong_parameter_is_refused():
    with pytest.raises(ValueError, match="patience = -1: must be seconds >= 0"):
        make(patience=-1)


def test_it_changes_no_output_and_leaks_no_block():
    """Random workloads in small caches: every output is that of the request alone, every rule of a plan is kept."""
    check_policy(make)


def test_it_reads_no_clock():
    assert reads_a_clock(FILE) == []
'''

DONE = """wrote {policy} and {test}. Next:

  python -m pytest {test}
  python experiments/run.py model=dummy:tiny workload.arrivals.rate=20 'scheduler=[fcfs,{policy}:{Class}]'

To offer it by name from a package of yours, put into its pyproject.toml:

  [project.entry-points."research_engine.schedulers"]
  {name} = "YOUR_PACKAGE.{name}:{Class}"
"""


def main(name: Annotated[str, tyro.conf.Positional], /, *, out: Path = Path()) -> int:
    """Write a policy that works, with comments on what can be changed, and a test of it that passes.

    Args:
        name: of the policy and its file, such as shortest_first.
        out: directory for NAME.py and test_NAME.py.
    """
    policy, test = write_scheduler(name, out)
    print(DONE.format(policy=policy, test=test, name=name, Class=class_name(name)), end="")
    return 0


def write_scheduler(name: str, directory: Path) -> tuple[Path, Path]:
    """Write NAME.py and test_NAME.py; both or none.

    Raises:
        ValueError: the name is none for a module, or taken; a file is there already; no such directory. Nothing was
            written.
    """
    import schedulers

    taken = [*schedulers.available(), "schedulers", "experiments", "research_engine", "tests"]
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        better = re.sub("[^a-z0-9]+", "_", re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_")
        better = better if re.fullmatch("[a-z][a-z0-9_]*", better) and not keyword.iskeyword(better) else "my_policy"
        raise ValueError(f"name = {name!r}: must be small letters, digits and _, as a module's, such as {better!r}")
    if name in taken or name in sys.stdlib_module_names:
        rule = "it is that of a module of Python's" if name not in taken else f"taken are {', '.join(taken)}"
        raise ValueError(f"name = {name!r}: choose another, {rule}")
    if not directory.is_dir():
        raise ValueError(f"out = {str(directory)!r}: no such directory")
    policy, test = directory / f"{name}.py", directory / f"test_{name}.py"
    for path in (policy, test):
        if path.exists():
            raise ValueError(f"{path} is there already; it is left as it is. Choose another name or --out")
    words = {"name": name, "Class": class_name(name), "Title": name.replace("_", " ").capitalize()}
    for path, text in ((policy, POLICY), (test, TEST)):
        path.write_text(text.format(**words), encoding="utf-8")
    return policy, test


def class_name(name: str) -> str:
    """shortest_first -> ShortestFirst."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))
