"""/v1/completions: every field does what it says, streamed and not."""

from __future__ import annotations

import pytest

from tests.server.live import LiveServer


def joined(events: list[dict], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


def test_text_and_usage_of_a_whole_answer(stub: LiveServer) -> None:
    answer = stub.complete(prompt="hello", max_tokens=30)
    (choice,) = answer["choices"]
    assert choice["text"] == "abcdefghijklmnopqrstuvwxyzabcd"
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == (
        0,
        "length",
        None,
        None,
    )
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 30, "total_tokens": 35}
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == "stub"


def test_a_stream_adds_up_to_the_whole_answer_with_one_finish_reason(server: LiveServer) -> None:
    fields = {"prompt": "hello", "max_tokens": 20, "seed": 7, "temperature": 0.8, "ignore_eos": True}
    whole = server.complete(**fields)
    events = server.events("/v1/completions", fields)
    assert joined(events) == whole["choices"][0]["text"]
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["length"]
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "text_completion" and "usage" not in event for event in events)


def test_usage_comes_in_a_stream_when_asked_for_and_equals_the_whole_answers(server: LiveServer) -> None:
    fields = {"prompt": ["hello", "you"], "max_tokens": 9, "n": 2, "seed": 3}
    whole = server.complete(**fields)
    events = server.events("/v1/completions", {**fields, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert [event for event in events if "usage" in event] == events[-1:]


def test_no_usage_comes_unasked(stub: LiveServer) -> None:
    for options in (None, {"include_usage": False}, {"include_usage": None}, {}):
        events = stub.events("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream_options": options})
        assert all(event["choices"] and "usage" not in event for event in events)


def test_prompts_and_continuations_are_numbered_prompt_by_prompt(server: LiveServer) -> None:
    fields = {"prompt": ["one", "another"], "n": 3, "max_tokens": 4, "seed": 5, "ignore_eos": True}
    whole = server.complete(**fields)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3, 4, 5]
    alone = server.complete(**{**fields, "prompt": "another"})
    assert [c["text"] for c in whole["choices"][3:]] == [c["text"] for c in alone["choices"]]
    events = server.events("/v1/completions", fields)
    assert [joined(events, index) for index in range(6)] == [c["text"] for c in whole["choices"]]


def test_a_prompt_may_be_token_ids(stub: LiveServer) -> None:
    for prompt, tokens in ((list(b"abc"), 3), ([list(b"abc"), list(b"de")], 5), ("abc", 3), (["abc", list(b"de")], 5)):
        assert stub.complete(prompt=prompt, max_tokens=1)["usage"]["prompt_tokens"] == tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_no_part_of_a_stop_string_leaks_and_only_what_could_begin_it_waits(stub: LiveServer, streamed: bool) -> None:
    fields = {"prompt": "x", "max_tokens": 40, "stop": ["klmnop", "zz"]}
    if not streamed:
        (choice,) = stub.complete(**fields)["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abcdefghij", "stop", "klmnop")
        return
    events = stub.events("/v1/completions", fields)
    assert joined(events) == "abcdefghij"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert stub.complete(prompt="x", max_tokens=12, stop="lmnop")["choices"][0]["text"] == "abcdefghijkl"


def test_stop_token_ids_and_the_stop_string_when_it_is_to_be_kept(stub: LiveServer) -> None:
    (choice,) = stub.complete(prompt="x", max_tokens=40, stop_token_ids=[ord("d")])["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("abc", ord("d"))
    (choice,) = stub.complete(prompt="x", max_tokens=40, stop="cd", include_stop_str_in_output=True)["choices"]
    assert choice["text"] == "abcd"
    (choice,) = stub.complete(prompt="x", max_tokens=40, stop="cd", min_tokens=10)["choices"]
    assert choice["text"] == "abcdefghijklmnopqrstuvwxyzab"


def test_max_tokens_is_cut_to_what_the_context_leaves(server: LiveServer) -> None:
    answer = server.complete(prompt=[65] * 4090, max_tokens=1000, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 4090, "completion_tokens": 6, "total_tokens": 4096}


def test_echo_without_new_tokens_scores_the_prompt(server: LiveServer) -> None:
    """V5 and S20: the first token has no log-probability, and the texts line up."""
    answer = server.complete(prompt="score me", max_tokens=0, echo=True, logprobs=2)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "score me"
    assert logprobs["tokens"] == list("score me")
    assert logprobs["token_logprobs"][0] is None and all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["top_logprobs"][0] is None and all(len(top) >= 2 for top in logprobs["top_logprobs"][1:])
    assert logprobs["text_offset"] == list(range(8))
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 0, "total_tokens": 8}
    assert server.complete(prompt="ab", max_tokens=0, echo=True)["choices"][0]["text"] == "ab"


def test_echo_goes_before_the_output_of_every_choice(server: LiveServer) -> None:
    fields = {"prompt": "ab", "max_tokens": 3, "echo": True, "logprobs": 0, "n": 2, "seed": 1, "ignore_eos": True}
    whole = server.complete(**fields)
    for choice in whole["choices"]:
        assert choice["text"].startswith("ab")
        assert len(choice["logprobs"]["tokens"]) == 5
    events = server.events("/v1/completions", fields)
    for index in range(2):
        assert joined(events, index) == whole["choices"][index]["text"]
        tokens = [t for e in events for c in e["choices"] if c["index"] == index for t in c["logprobs"]["tokens"]]
        assert tokens == whole["choices"][index]["logprobs"]["tokens"]


def test_logprobs_are_those_of_the_drawn_tokens_streamed_and_not(server: LiveServer) -> None:
    fields = {"prompt": "abc", "max_tokens": 6, "logprobs": 3, "temperature": 0, "ignore_eos": True}
    (choice,) = server.complete(**fields)["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 6
    for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert value == max(top.values())  # greedy
    events = server.events("/v1/completions", fields)
    streamed = [value for e in events for c in e["choices"] for value in c["logprobs"]["token_logprobs"]]
    assert streamed == logprobs["token_logprobs"]


def test_prompt_logprobs_in_vllms_form(server: LiveServer) -> None:
    (choice,) = server.complete(prompt="abc", max_tokens=1, prompt_logprobs=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 2
    assert rest[0][str(ord("b"))]["decoded_token"] == "b"


def test_a_seed_decides_the_output_and_parameters_reach_the_sampler(server: LiveServer) -> None:
    def text(**fields: object) -> str:
        return server.complete(prompt="abc", max_tokens=12, ignore_eos=True, **fields)["choices"][0]["text"]

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text(seed=1, top_k=1) == text(temperature=0)
    assert text(seed=1, min_p=1.0) == text(temperature=0)
    assert text(temperature=0, logit_bias={"65": 100}) == "A" * 12
    assert text(temperature=0, logit_bias={"65": 100}, frequency_penalty=2.0) != text(temperature=0)


def test_ignore_eos_and_min_tokens(server: LiveServer) -> None:
    bias = {"258": 100}
    assert server.complete(prompt="a", max_tokens=9, logit_bias=bias)["choices"][0]["finish_reason"] == "stop"
    assert (
        server.complete(prompt="a", max_tokens=9, logit_bias=bias, ignore_eos=True)["usage"]["completion_tokens"] == 9
    )
    assert server.complete(prompt="a", max_tokens=9, logit_bias=bias, min_tokens=4)["usage"]["completion_tokens"] == 5


def test_a_request_id_comes_back_and_one_that_is_no_word_is_replaced(stub: LiveServer) -> None:
    for path, body in (("/v1/completions", {"prompt": "a", "max_tokens": 1}), ("/health", None)):
        method = "GET" if body is None else "POST"
        assert stub.request(method, path, body, {"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        assert stub.request(method, path, body, {"x-request-id": "a b"}).headers["x-request-id"] != "a b"
        assert stub.request(method, path, body).headers["x-request-id"]
