"""The CPU benchmark compares like with like: the same tokens on both sides, timed the same way."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from research_engine.bench import cpu
from research_engine.bench.transformers_twin import TransformersTwin
from research_engine.llm import load
from research_engine.options import EngineOptions

OPTIONS = cpu.CpuBenchOptions(
    model="dummy:tiny", batch=3, min_context=5, max_context=20, decode_tokens=4, repeats=2, threads=1
)


@pytest.fixture(scope="module")
def result():
    return cpu.run(OPTIONS)


def test_both_sides_decode_the_same_tokens(result):
    assert result.same_tokens == 1.0


def test_every_repeat_leaves_a_rate_on_both_sides(result):
    for rates in (result.project, result.transformers):
        for values in (rates.decode, rates.ragged_prefill, rates.single_prefill):
            assert len(values) == 2 and min(values) > 0


def test_the_report_shows_three_ratios(result):
    out = io.StringIO()
    cpu.report(result, Console(file=out, width=140))
    assert all(label in out.getvalue() for label in ("decode", "ragged batch (real tokens)", "no padding", "100.0%"))


def test_prompts_reach_both_ends_of_the_range_and_depend_on_the_seed_alone():
    prompts, single = cpu.make_prompts(OPTIONS, 259)
    lengths = [len(prompt) for prompt in prompts]
    assert (min(lengths), max(lengths), len(single)) == (5, 20, 20)
    assert cpu.make_prompts(OPTIONS, 259) == (prompts, single)


def test_a_step_is_timed_for_every_token_on_both_sides():
    loaded = load(EngineOptions("dummy:tiny", device="cpu", skip_tokenizer_init=True), progress=False)
    prompts, _ = cpu.make_prompts(OPTIONS, 259)
    for generate in (cpu.project_runner(OPTIONS, loaded), TransformersTwin(loaded.source, loaded.config).generate):
        timed = generate(prompts, 5)
        assert [len(row) for row in timed.token_ids] == [5, 5, 5]
        assert len(timed.times) == 5 and timed.times == sorted(timed.times)


def test_agreement_counts_tokens_before_the_first_difference():
    assert cpu._agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 6 / 8


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"repeats": 0}, {"max_context": 4}, {"threads": -1}, {"seed": -1}])
def test_sizes_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        cpu.CpuBenchOptions(**{"min_context": 5, **wrong})
