"""Outputs of a given form, offline: whatever the policy, the seed and the company."""

from __future__ import annotations

import json
import re

import pytest

from research_engine import LLM, SamplingParams, StructuredOutputsParams
from research_engine.engine.sampling_params import SamplingParams as CoreParams
from research_engine.loading.tokenizer import byte_tokenizer
from research_engine.structured_outputs import GrammarCompiler

SPACES = {ord(space): -100.0 for space in " \n\r\t"}  # a model of random weights would write little else
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex="[0-9]{3}-[a-c]{1,9}z"),
    StructuredOutputsParams(choice=["yes", 'no, "never"']),
    StructuredOutputsParams(grammar='start: "a" rest\nrest: "b" | "c" "d"'),
]


def fits(text: str, form: StructuredOutputsParams) -> bool:
    if form.json is not None:
        made = json.loads(text)
        return set(made) == {"a", "b"} and 0 <= made["a"] <= 99 and made["b"] in ("x", "yy")
    if form.choice is not None:
        return text in form.choice
    return re.fullmatch(form.regex or "a(b|cd)", text) is not None


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:tiny", device="cpu", num_blocks=512, max_num_seqs=8, check_integrity=True)


def params(form: StructuredOutputsParams | None, **fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 80, "logit_bias": SPACES, "structured_outputs": form, **fields})


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_every_output_has_its_form_in_one_batch_with_free_ones(llm: LLM, temperature: float) -> None:
    forms = [*FORMS, None]
    outputs = llm.generate(
        ["hi"] * 5, [params(form, n=2, seed=3, temperature=temperature) for form in forms], use_tqdm=False
    )
    for output, form in zip(outputs, forms, strict=True):
        for made in output.outputs:
            if form is not None:
                assert fits(made.text, form), made.text
                assert made.finish_reason == "stop"


def test_a_form_takes_no_part_in_what_others_draw(llm: LLM) -> None:
    free = params(None, seed=5, logit_bias={})
    (alone,) = llm.generate("abc", free, use_tqdm=False)
    (_, beside) = llm.generate(["x", "abc"], [params(FORMS[0], seed=1), free], use_tqdm=False)
    assert alone.outputs[0].token_ids == beside.outputs[0].token_ids


def test_preemption_changes_no_output() -> None:
    tight = LLM("dummy:tiny", device="cpu", num_blocks=8, max_model_len=100, check_integrity=True,
                enable_prefix_caching=False, scheduler_params={"watermark": 0.0})  # fmt: skip
    wide = LLM("dummy:tiny", device="cpu", num_blocks=64, max_model_len=100, enable_prefix_caching=False)
    form = StructuredOutputsParams(regex="[a-z]{40,60}")
    sampling = [params(form, seed=seed, logit_bias={}) for seed in range(4)]
    made = [
        [output.outputs[0].token_ids for output in each.generate(["prompt"] * 4, sampling, use_tqdm=False)]
        for each in (tight, wide)
    ]
    assert sum(record.preemptions for record in tight.engine.records.requests) > 0
    assert made[0] == made[1]


def test_an_output_that_is_whole_ends_whatever_min_tokens_and_ignore_eos_say(llm: LLM) -> None:
    sampling = params(FORMS[2], min_tokens=40, ignore_eos=True, seed=1)
    (output,) = llm.generate("hi", sampling, use_tqdm=False)
    assert fits(output.outputs[0].text, FORMS[2]) and output.outputs[0].finish_reason == "stop"


def test_max_tokens_may_cut_an_output(llm: LLM) -> None:
    (output,) = llm.generate("hi", params(FORMS[1], max_tokens=2), use_tqdm=False)
    assert re.fullmatch("[0-9]{2}", output.outputs[0].text) and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (StructuredOutputsParams(json={"type": "strin"}), "strin"),
        (StructuredOutputsParams(json="{"), "no JSON"),
        (StructuredOutputsParams(json="[]"), "is an object"),
        (StructuredOutputsParams(regex="("), "regex"),
        (StructuredOutputsParams(grammar="no grammar"), "structured_outputs"),
        (StructuredOutputsParams(regex="a" * 70000), "at most 65536"),
        (StructuredOutputsParams(grammar="".join(f"r{i}: r{i + 1}\n" for i in range(3000))), "at most 250"),
    ],
    ids=["schema", "json", "list", "regex", "grammar", "size", "rules"],
)  # fmt: skip
def test_a_form_that_is_wrong_or_too_large_is_refused_before_anything_runs(
    llm: LLM, form: StructuredOutputsParams, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        llm.generate("hi", params(form), use_tqdm=False)
    assert not llm.engine.has_unfinished


def test_without_a_tokenizer_a_form_is_refused() -> None:
    bare = LLM("dummy:tiny", device="cpu", num_blocks=8, max_model_len=64, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        bare.generate([[1, 2]], params(FORMS[0], detokenize=False), use_tqdm=False)


@pytest.mark.parametrize(
    "fields",
    [{}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": [""]}, {"choice": "ab"}, {"regex": 5}, {"json": 5}],
)
def test_parameters_that_are_not_exactly_one_form_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        StructuredOutputsParams(**fields)


def test_sampling_takes_nothing_else_for_a_form() -> None:
    with pytest.raises(ValueError, match="structured_outputs"):
        CoreParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_tokens_beyond_the_tokenizers_vocabulary_are_never_allowed() -> None:
    constraint = GrammarCompiler(byte_tokenizer(), 300)(params(StructuredOutputsParams(regex="[\\x00-\\x7f]+")))
    assert constraint is not None
    mask = constraint.allowed()
    allowed = {i for i in range(8 * len(mask)) if mask[i // 8] >> (i % 8) & 1}
    assert ord("a") in allowed and allowed <= set(range(259))
