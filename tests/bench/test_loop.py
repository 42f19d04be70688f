"""The loop's benchmark measures what it says: so many sequences, all decoding, without torch."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from research_engine.bench.loop import LoopBenchOptions, _decoding_engine, report, run


@pytest.mark.parametrize("scheduler", ["fcfs", "chunked_prefill", "priority"])
def test_every_sequence_decodes_in_every_step_measured(scheduler):
    """Prompts longer than one step's budget included, and nobody ends or is preempted before the last step."""
    options = LoopBenchOptions(sequences=5, steps=40, prompt_tokens=5000, block_size=4)
    engine = _decoding_engine(options, scheduler)
    for _ in range(50):
        batch = engine.commit(engine.plan(engine.view()), engine.view())
        assert [row.num_tokens for row in batch.rows] == [1] * 5 and not batch.preempted
        engine.update(batch, engine.execute(batch))


def test_the_parts_are_times_and_the_total_holds_them():
    times = run(LoopBenchOptions(sequences=4, steps=5), "fcfs")
    assert min(times.schedule, times.commit, times.update) > 0
    assert times.total >= max(times.schedule, times.commit, times.update) and times.total >= times.fastest_tenth > 0


def test_the_report_has_a_row_a_policy():
    out = io.StringIO()
    report(LoopBenchOptions(sequences=2, steps=2, schedulers=("fcfs", "priority")), Console(file=out, width=120))
    assert "fcfs" in out.getvalue() and "priority" in out.getvalue() and "2 running sequences" in out.getvalue()


@pytest.mark.parametrize("field", ["sequences", "steps", "prompt_tokens", "block_size"])
def test_a_number_below_one_is_refused(field):
    with pytest.raises(ValueError, match=rf"{field} = 0: must be an integer >= 1"):
        LoopBenchOptions(**{field: 0})


def test_torch_is_not_imported():
    script = "import sys, research_engine.bench.loop; assert 'torch' not in sys.modules"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
