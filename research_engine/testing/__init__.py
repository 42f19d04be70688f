"""What the test of a policy of one's own needs; no model, no torch (docs/write_a_scheduler.md)."""

from .policy import check_policy, reads_a_clock
from .random_runs import RandomRun
from .shadow import ManualClock, drain, expected, greedy, make_engine

__all__ = [
    "ManualClock", "RandomRun", "check_policy", "drain", "expected", "greedy", "make_engine", "reads_a_clock",
]  # fmt: skip
