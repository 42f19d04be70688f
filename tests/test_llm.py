"""`LLM` on a tiny model: outputs do not depend on how the work is cut, and users' mistakes leave the engine clean."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from research_engine import LLM, SamplingParams
from research_engine.engine.errors import PolicyError
from research_engine.options import OptionError
from tests.models.tiny_llama import make_reference, saved

ASCII = dict.fromkeys((*range(32), *range(127, 259)), -100.0)  # a bias that leaves printable characters
PROMPTS = [
    "a",
    "The quick brown fox jumps over the lazy dog. " * 2,
    "Pack my box with five dozen liquor jugs.",
    "0123456789" * 7,
    "The quick brown fox jumps over the lazy cat. " * 2,
    "Sphinx of black quartz, judge my vow",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=8, max_tokens=28, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.2, min_p=0.05, seed=-3, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=16, logprobs=1),
]


def make_llm(**options):
    options = {"num_blocks": 256, "max_model_len": 512, "check_integrity": True, **options}
    return LLM("dummy:tiny", **options)


def tokens(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def all_blocks_free(llm):
    llm.engine.kv_cache.check_integrity([])
    return not llm.engine.has_unfinished and llm.engine.kv_cache.num_used_blocks == 0


@pytest.fixture(scope="module")
def llm():
    return make_llm()


@pytest.fixture(scope="module")
def undisturbed():
    """Each prompt on its own, whole, nothing shared."""
    llm = make_llm(scheduler="fcfs", max_num_seqs=1, enable_prefix_caching=False)
    return tokens([llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)])


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": "fcfs"},
        {"scheduler": "chunked_prefill"},
        {"scheduler": "priority"},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 13},
        {"max_num_batched_tokens": 13, "enable_prefix_caching": False},
        {"scheduler": "priority", "max_num_batched_tokens": 40, "max_num_seqs": 3},
        {"block_size": 1, "num_blocks": 1024},
        {"block_size": 8, "max_num_batched_tokens": 37},
        {"block_size": 32},
        {"block_size": 256, "num_blocks": 16},
        {"overlap": True},
        {"overlap": True, "scheduler": "priority", "max_num_batched_tokens": 13, "max_num_seqs": 3},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
def test_outputs_do_not_depend_on_how_the_work_is_cut(options, undisturbed):
    llm = make_llm(**options)
    assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == undisturbed
    assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == undisturbed  # now with a warm prefix cache
    assert all_blocks_free(llm)


@pytest.mark.parametrize("scheduler", ["fcfs", "chunked_prefill", "priority"])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_go_on_as_if_undisturbed(overlap, preemption, prefix_caching, scheduler, undisturbed):
    llm = make_llm(
        overlap=overlap,
        scheduler=scheduler,
        scheduler_params={"preemption": preemption, "watermark": 0.0},
        num_blocks=34,
        block_size=4,
        num_host_blocks=64,
        max_model_len=136,
        max_num_batched_tokens=32,
        enable_prefix_caching=prefix_caching,
    )
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert tokens(outputs) == undisturbed
    assert sum(output.metrics.preemptions for output in outputs) > 0
    swapped = sum(step.blocks_swapped_out for step in llm.engine.records.steps)
    assert (swapped > 0) == (preemption == "swap")
    assert swapped == sum(step.blocks_swapped_in for step in llm.engine.records.steps)
    assert all_blocks_free(llm)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_continuations_share_the_prompt_and_draw_their_own_streams(block_size):
    options = {"block_size": block_size, "num_blocks": 600, "enable_prefix_caching": False}
    llm, prompt = make_llm(**options), PROMPTS[1][:87]
    together = llm.generate(prompt, SamplingParams(n=4, seed=11, max_tokens=12, ignore_eos=True), use_tqdm=False)
    apart = make_llm(**options).generate(
        [prompt] * 4, [SamplingParams(seed=11 + i, max_tokens=12, ignore_eos=True) for i in range(4)], use_tqdm=False
    )
    assert tokens(together)[0] == [completion[0] for completion in tokens(apart)]
    assert len(set(map(tuple, tokens(together)[0]))) == 4
    steps = llm.engine.records.steps
    assert sum(sum(step.num_tokens) for step in steps) == 87 + 3 + 4 * 11  # prompt once, its last token for each
    assert (sum(step.blocks_copied for step in steps) > 0) == (87 % block_size > 0)
    assert all_blocks_free(llm)


def test_a_repeated_prompt_is_found_in_the_prefix_cache(llm):
    params = SamplingParams(temperature=0, max_tokens=4)
    cold, warm = (llm.generate("x" * 100, params, use_tqdm=False)[0] for _ in range(2))
    assert (cold.metrics.cached_tokens, warm.metrics.cached_tokens) == (0, 96)
    assert tokens([cold]) == tokens([warm])


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 14, "max_model_len": 150}])
def test_prompt_logprobs_are_the_same_warm_chunked_and_preempted(options, llm):
    params = SamplingParams(temperature=0, max_tokens=40, prompt_logprobs=2, ignore_eos=True)
    prompts = [PROMPTS[1], PROMPTS[4]]
    reference = llm.generate(prompts, params, use_tqdm=False)
    other = make_llm(**options)
    for _ in range(2):
        outputs = other.generate(prompts, params, use_tqdm=False)
        assert ("num_blocks" in options) == any(output.metrics.preemptions for output in outputs)
        for output, expected in zip(outputs, reference, strict=True):
            assert output.prompt_logprobs[0] is None
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
            for token, entry, known in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True
            ):
                assert token in entry and len(entry) in (2, 3)
                assert {i: e.logprob for i, e in entry.items()} == pytest.approx(
                    {i: e.logprob for i, e in known.items()}, abs=1e-4
                )


def test_logprobs_of_an_output_are_those_of_the_same_tokens_as_a_prompt(llm):
    output = llm.generate(
        PROMPTS[2], SamplingParams(seed=3, max_tokens=12, logprobs=0, ignore_eos=True), use_tqdm=False
    )[0]
    drawn = output.outputs[0]
    again = llm.generate(
        [output.prompt_token_ids + drawn.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )[0]
    values = [entry[token].logprob for token, entry in zip(drawn.token_ids, drawn.logprobs, strict=True)]
    assert again.prompt_logprobs is not None
    known = [entry[token].logprob for token, entry in zip(drawn.token_ids, again.prompt_logprobs[-12:], strict=True)]
    assert values == pytest.approx(known, abs=1e-4)
    assert drawn.cumulative_logprob == pytest.approx(sum(values))


def test_greedy_tokens_are_of_rank_one(llm):
    output = llm.generate("abc", SamplingParams(temperature=0, max_tokens=6, logprobs=1), use_tqdm=False)[0].outputs[0]
    assert [entry[token].rank for token, entry in zip(output.token_ids, output.logprobs, strict=True)] == [1] * 6
    assert all(len(entry) == 1 for entry in output.logprobs)


def test_greedy_is_deterministic_and_draws_without_a_seed_are_not_repeated(llm):
    greedy = SamplingParams(temperature=0, max_tokens=12)
    assert tokens(llm.generate("abc", greedy, use_tqdm=False)) == tokens(llm.generate("abc", greedy, use_tqdm=False))
    free = SamplingParams(max_tokens=12)
    assert tokens(llm.generate("abc", free, use_tqdm=False)) != tokens(llm.generate("abc", free, use_tqdm=False))


def test_a_stop_string_over_several_tokens_ends_the_text_before_it(llm):
    params = {"temperature": 0, "max_tokens": 30, "logit_bias": ASCII, "ignore_eos": True, "repetition_penalty": 1.5}
    text = llm.generate("abc", SamplingParams(**params), use_tqdm=False)[0].outputs[0].text
    stop = text[9:14]
    output = llm.generate("abc", SamplingParams(stop=["never seen", stop], **params), use_tqdm=False)[0].outputs[0]
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    kept = SamplingParams(stop=stop, include_stop_str_in_output=True, **params)
    assert llm.generate("abc", kept, use_tqdm=False)[0].outputs[0].text == text[: text.index(stop)] + stop


def test_text_that_could_only_have_begun_a_stop_string_comes_out(llm):
    params = {"temperature": 0, "max_tokens": 12, "logit_bias": ASCII, "ignore_eos": True}
    text = llm.generate("abc", SamplingParams(**params), use_tqdm=False)[0].outputs[0].text
    output = llm.generate("abc", SamplingParams(stop=text[-3:] + "~~~", **params), use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason) == (text, "length")


def test_stop_tokens_wait_for_min_tokens(llm):
    params = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    first = llm.generate("abc", SamplingParams(**params), use_tqdm=False)[0].outputs[0].token_ids[0]
    at_once = llm.generate("abc", SamplingParams(stop_token_ids=[first], **params), use_tqdm=False)[0].outputs[0]
    assert (at_once.token_ids, at_once.finish_reason, at_once.stop_reason) == ([first], "stop", first)
    later = SamplingParams(stop_token_ids=[first], min_tokens=10, **params)
    assert first not in llm.generate("abc", later, use_tqdm=False)[0].outputs[0].token_ids[:10]


def test_a_stop_token_on_the_last_allowed_place_is_a_stop(llm):
    params = {"temperature": 0, "ignore_eos": True, "repetition_penalty": 1.5}
    ids = llm.generate("abc", SamplingParams(max_tokens=6, **params), use_tqdm=False)[0].outputs[0].token_ids
    output = llm.generate("abc", SamplingParams(max_tokens=6, stop_token_ids=[ids[5]], **params), use_tqdm=False)[
        0
    ].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (ids.index(ids[5]) + 1, "stop")


def test_text_equals_the_decoded_tokens_also_where_characters_stay_incomplete(llm):
    part_of_an_emoji = set("🙂".encode())  # its bytes, drawn in any order
    emoji = {token: -100.0 for token in range(259) if token not in part_of_an_emoji}
    for seed in range(8):
        params = SamplingParams(seed=seed, max_tokens=15, logit_bias=emoji, ignore_eos=True)
        output = llm.generate("abc", params, use_tqdm=False)[0].outputs[0]
        assert output.text == llm.tokenizer.decode(output.token_ids)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 2)]
    outputs = llm.generate(["d", "c", {"prompt": "b"}, {"prompt_token_ids": [97]}], params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[100], [99], [98], [97]]
    assert [output.prompt for output in outputs] == ["d", "c", "b", None]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5, 2]


def test_one_prompt_of_token_ids_is_one_prompt(llm):
    params = SamplingParams(temperature=0, max_tokens=3)
    assert tokens(llm.generate([97, 98], params, use_tqdm=False)) == tokens(llm.generate("ab", params, use_tqdm=False))


def test_chat_is_the_template_around_the_messages(llm):
    params = SamplingParams(temperature=0, max_tokens=3)
    output = llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False)[0]
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokens([output]) == tokens(llm.generate([output.prompt_token_ids], params, use_tqdm=False))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", "empty"),
        ([5, 259], "259"),
        ([-1], "-1"),
        ("x" * 512, "512"),
        ({"prompt_tokens": [1]}, "prompt_token_ids"),
        ([1.5], "integers"),
        (None, "text or a list"),
    ],
)
def test_a_refused_prompt_raises_before_anything_runs_and_leaves_nothing_behind(bad, message, llm):
    steps = llm.engine.num_steps
    with pytest.raises(ValueError, match=message):
        llm.generate(["good", bad, "also good"], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert llm.engine.num_steps == steps
    assert all_blocks_free(llm)
    assert len(llm.generate("good", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("bad", [None, 42])
def test_what_is_no_prompt_and_no_list_is_refused(bad, llm):
    for call in (llm.generate, llm.chat):
        with pytest.raises(ValueError, match="or a list of them"):
            call(bad, use_tqdm=False)


def test_text_that_is_no_unicode_is_refused(llm):
    with pytest.raises(ValueError, match="no valid Unicode"):
        llm.generate("\ud800", use_tqdm=False)


@pytest.mark.parametrize(
    "poison",
    [
        SamplingParams(min_tokens=5, stop_token_ids=range(259), max_tokens=8),
        SamplingParams(repetition_penalty=1e-50, max_tokens=8),
        SamplingParams(repetition_penalty=1e300, max_tokens=8, temperature=0),
    ],
    ids=["nothing left to draw", "penalty to infinity", "penalty to nothing"],
)
def test_no_parameters_of_one_request_end_the_others_of_its_batch(poison, llm):
    """A failing executor ends every live request, so what could make it fail is refused, or does not fail."""
    (other,) = llm.engine.add_request("other", [1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    with contextlib.suppress(ValueError):
        llm.generate("abc", poison, use_tqdm=False)
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert other.finish_reason in ("length", "stop")
    assert all_blocks_free(llm)


@pytest.mark.parametrize("event", ["on_arrival", "on_finish"])
def test_a_policy_that_fails_in_an_event_leaves_no_request_behind(event, monkeypatch):
    llm = make_llm()

    def fail(request):
        raise RuntimeError("boom")

    monkeypatch.setattr(llm.engine.scheduler, event, fail, raising=False)
    with pytest.raises(PolicyError, match=f"{event} raised RuntimeError: boom"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=3), use_tqdm=False)
    assert all_blocks_free(llm)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_a_policy_that_never_comes_back_ends_the_call_and_leaves_the_engine_clean(llm, monkeypatch):
    monkeypatch.setattr(llm.engine._policy, "patience", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "schedule", lambda view: threading.Event().wait())
        with pytest.raises(PolicyError, match=r"schedule did not return within 0.5 s"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=3), use_tqdm=False)
    assert all_blocks_free(llm)
    assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=3), use_tqdm=False)) == len(PROMPTS)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_an_event_that_never_ends_is_broken_off_while_a_call_is_cleaned_up_too(llm, monkeypatch):
    came_back = []

    def fail(view):
        raise RuntimeError("boom")

    def hang(request):
        threading.Event().wait(60)
        came_back.append(request.id)

    monkeypatch.setattr(llm.engine._policy, "patience", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "schedule", fail)
        patch.setattr(llm.engine.scheduler, "on_finish", hang, raising=False)
        with pytest.raises(PolicyError, match="schedule raised RuntimeError: boom"):
            llm.generate("a", SamplingParams(max_tokens=3), use_tqdm=False)
    assert not came_back
    assert all_blocks_free(llm)


@pytest.mark.parametrize(
    ("model", "quantization", "rule"),
    [("dummy:tiny", "awq", "dummy:tiny has weights that are not quantised, and loading quantises none"),
     ("dummy:tiny-awq", "gptq", "quantization = 'gptq': dummy:tiny-awq has awq weights"),
     ("dummy:tiny-awq", "none", "has awq weights"),
     ("dummy:tiny", "awk", "quantization = 'awk': must be one of awq, ")],
)  # fmt: skip
def test_a_model_stored_otherwise_than_asked_for_is_refused(model, quantization, rule):
    with pytest.raises(OptionError, match=rule):
        LLM(model, quantization=quantization)


@pytest.mark.parametrize(("model", "quantization"), [("dummy:tiny", "none"), ("dummy:tiny-awq", "awq_marlin")])
def test_a_model_stored_as_asked_for_is_loaded(model, quantization):
    made = LLM(model, quantization=quantization, num_blocks=16, max_model_len=64)
    assert made.generate([[97]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids


def test_parameters_must_be_one_or_one_for_each_prompt(llm):
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2, use_tqdm=False)


def test_without_a_tokenizer_token_ids_go_in_and_out():
    llm = make_llm(skip_tokenizer_init=True)
    output = llm.generate([[97, 98]], SamplingParams(temperature=0, max_tokens=4, logprobs=1), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].text == ""
    for attempt in (
        lambda: llm.generate("text", use_tqdm=False),
        lambda: llm.generate([[97]], SamplingParams(stop="x"), use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False),
    ):
        with pytest.raises(ValueError, match="tokenizer"):
            attempt()
    assert all_blocks_free(llm)


def test_ctrl_c_ends_the_call_after_a_step_and_the_engine_goes_on(llm, monkeypatch):
    step, calls = llm.engine.step, []

    def interrupted_step():
        calls.append(None)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"], params, use_tqdm=False)
    assert len(calls) == 3
    monkeypatch.undo()
    assert all_blocks_free(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(llm.generate("abc", params, use_tqdm=False)[0].outputs[0].token_ids) == 50


def test_a_failing_executor_ends_its_requests_and_the_engine_goes_on(llm, monkeypatch):
    model = llm.engine.executor._model
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: compute(hidden) * float("nan"))
    with pytest.raises(ValueError, match=r"request '.*': the model's logits .* NaN"):
        llm.generate(["abc", "def"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    monkeypatch.undo()
    assert all_blocks_free(llm)
    assert len(llm.generate("abc", SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_after_shutdown_nothing_runs():
    llm = make_llm()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate("abc", use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "no option 'max_num_seq'; valid ones, nearest first: max_num_seqs"),
        ({"scheduler": "fcsf"}, "no scheduler 'fcsf'; valid ones, nearest first: fcfs"),
        ({"scheduler": "fcfs", "scheduler_params": {"watermarks": 0.1}}, "nearest first: watermark"),
        ({"dtype": "float23"}, "dtype = 'float23': must be one of float32"),
        ({"dtype": "float16", "device": "cpu"}, "float16"),
        ({"device": "tpu"}, "device = 'tpu': must be auto, cpu"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"max_model_len": 8193}, "8192 positions"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0: must be an integer >= 1"),
        ({"num_blocks": None, "kv_cache_memory": 1e-7}, "one block of 16 tokens takes"),
        ({"kv_cache_memory": -1.0}, "kv_cache_memory = -1.0"),
        ({"swap_space": -1.0}, "swap_space = -1.0"),
        ({"swap_space": "4"}, "swap_space = '4': must be a number"),
        ({"swap_space": float("inf")}, "swap_space = inf"),
        ({"num_blocks": 10**12}, "no memory for the KV cache of num_blocks = 1000000000000"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching = 'no': must be True or False"),
        ({"seed": "x"}, "seed = 'x': must be an integer"),
        ({"scheduler": 5}, "scheduler = 5: must be a text"),
        ({"scheduler_params": None}, "scheduler_params = None: must be a mapping"),
        ({"scheduler_params": {"preemption": "swap"}}, "needs host blocks: set swap_space"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_be_right(options, message):
    with pytest.raises(ValueError) as error:
        make_llm(**options)
    assert message in str(error.value)


def test_a_wrong_option_of_the_engine_is_told_before_the_model_is_looked_for():
    with pytest.raises(OptionError, match="max_num_seq"):
        LLM("no/such-model-anywhere", max_num_seq=1)


def test_an_unknown_model_is_told_with_the_known_ones():
    with pytest.raises(ValueError, match="dummy:tiny"):
        LLM("dummy:tinny")


def test_memory_in_gib_becomes_blocks_and_never_more_than_needed():
    block = 2 * 2 * 16 * 2 * 32 * 4  # layers, K and V, slots, heads, head size, bytes
    config = make_llm(
        num_blocks=None, kv_cache_memory=20.5 * block / 2**30, swap_space=7.0 * block / 2**30
    ).engine.config
    assert (config.num_blocks, config.num_host_blocks) == (20, 7)
    assert make_llm(num_blocks=None, max_num_seqs=2).engine.config.num_blocks == 2 * 512 // 16
    assert make_llm(num_blocks=4, max_model_len=None).engine.config.max_model_len == 64


def test_dummy_weights_depend_on_the_seed_alone():
    params = SamplingParams(temperature=0, max_tokens=10)
    first, same, other = (tokens(make_llm(seed=seed).generate("abc", params, use_tqdm=False)) for seed in (1, 1, 2))
    assert first == same != other


def test_a_progress_bar_counts_prompts(llm, capsys):
    llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    assert "2/2" in capsys.readouterr().err


def test_dummy_load_format_keeps_the_shape_and_replaces_the_weights(tmp_path):
    directory = str(saved(make_reference(), tmp_path))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = {"num_blocks": 16, "skip_tokenizer_init": True}
    real, dummy, again = (
        tokens(LLM(directory, load_format=load_format, **options).generate([[5, 6, 7]], params, use_tqdm=False))
        for load_format in ("auto", "dummy", "dummy")
    )
    assert dummy == again != real
