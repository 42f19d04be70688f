"""One answer, read as it comes: which chunks are tokens, what failed and why, and gaps that add up."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from research_engine.bench.backends import Call, Observation, error_message, output_tokens_of, request_body, token_gaps
from research_engine.bench.datasets import Sample

SAMPLE = Sample("hi", 1, 8)


def event(value) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(words: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": words, "finish_reason": finish}]})


def delta(finish: str | None = None, **content) -> bytes:
    return event({"choices": [{"index": 0, "delta": content, "finish_reason": finish}]})


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}})


DONE = event(b"[DONE]")


def read(chunks, *, streamed=True, status=200, kind="text/event-stream; charset=utf-8", cut=False) -> Observation:
    """Chunks arrive at 1, 2, 3, ... seconds; the end is a second after the last."""
    seen, ended = Observation(SAMPLE, scheduled=0.0, sent=0.5), []
    call = Call(seen, streamed, ended.append)
    call.on_status(status, kind)
    now = 0.0
    for now, chunk in enumerate(chunks, 1):
        call.on_body(chunk, float(now))
    if cut:
        call.on_failure("the connection was closed", now + 1.0)
    else:
        call.on_end(now + 1.0)
    assert ended == [call]
    return seen


def test_a_stream_of_completions():
    seen = read([text("a"), text("b"), text("", "length"), usage(2), DONE])
    assert seen.is_completed and seen.times == [1.0, 2.0] and "".join(seen.text) == "ab"
    assert (seen.finish_reason, seen.prompt_tokens, seen.output_tokens, seen.finished) == ("length", 5, 2, 6.0)


def test_a_stream_of_chat_whose_first_chunk_has_the_role_alone():
    seen = read([delta(role="assistant", content=""), delta(content="a"), delta("stop"), usage(1), DONE])
    assert seen.times == [2.0] and seen.finish_reason == "stop"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_tokens(name):
    assert read([delta(**{name: "hm"}), delta(content="a"), delta("stop"), DONE]).times == [1.0, 2.0]


def test_calls_of_tools_are_tokens():
    assert read([delta(tool_calls=[{"index": 0}]), delta("tool_calls"), DONE]).times == [1.0]


def test_an_end_token_that_has_no_text_is_a_token_where_the_server_counts_it():
    assert read([text("a"), text("", "stop"), usage(2), DONE]).times == [1.0, 2.0]
    assert read([text("a"), text("", "stop"), usage(1), DONE]).times == [1.0]


def test_several_chunks_read_at_once_came_at_the_same_time():
    seen = read([text("a"), text("b") + text("c"), text("", "length"), usage(3), DONE])
    assert seen.times == [1.0, 2.0, 2.0]
    assert token_gaps(seen, 3) == [1.0, 0.0]


def test_several_tokens_in_a_chunk_are_one_gap_and_zeros():
    seen = read([text("a"), text("bcd"), text("", "length"), usage(4), DONE])
    assert sorted(token_gaps(seen, 4)) == [0.0, 0.0, 1.0]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_gaps_are_one_fewer_than_tokens_and_add_up_to_the_time_from_first_to_last(bundles):
    seen = read([*[text("x" * size) for size in bundles], text("", "length"), usage(sum(bundles)), DONE])
    gaps = token_gaps(seen, sum(bundles))
    assert len(gaps) == sum(bundles) - 1
    assert sum(gaps) == pytest.approx(seen.times[-1] - seen.times[0])


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([text("a"), event({"error": {"message": "out of memory", "code": 500}}), DONE], "out of memory"),
        ([text("a"), event({"object": "error", "error": "boom"}), DONE], "boom"),
        ([text("a")], "without a finish reason"),
        ([], "without a finish reason"),
        ([event(b"{not json"), DONE], "no answer of this protocol"),
        ([event({"choices": "none"}), DONE], "no answer of this protocol"),
    ],
)
def test_a_stream_that_goes_wrong_has_failed_with_its_reason(chunks, reason):
    seen = read(chunks)
    assert seen.is_failed and not seen.is_completed and reason in (seen.error or "")


def test_a_connection_lost_in_the_middle_is_a_failure_however_much_had_come():
    assert read([text("a"), text("b", "length")], cut=True).error == "the connection was closed"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_refusal_tells_the_servers_message(status):
    body = json.dumps({"error": {"message": "too many requests", "type": "x"}}).encode()
    assert read([body], status=status, kind="application/json").error == f"HTTP {status}: too many requests"


def test_an_answer_in_one_piece_in_place_of_a_stream_is_a_failure():
    assert "a stream was asked for" in (read([b"{}"], kind="application/json").error or "")


def test_an_answer_in_one_piece():
    body = json.dumps({"choices": [{"text": "abc", "finish_reason": "stop"}],
                       "usage": {"prompt_tokens": 3, "completion_tokens": 9}}).encode()  # fmt: skip
    seen = read([body[:20], body[20:]], streamed=False, kind="application/json")
    assert seen.is_completed and seen.text == ["abc"] and seen.output_tokens == 9 and seen.times == []


def test_an_embedding_is_an_answer_and_anything_else_is_none():
    vector = json.dumps({"data": [{"embedding": [1.0]}], "usage": {"prompt_tokens": 3}}).encode()
    assert read([vector], streamed=False).is_completed
    assert read([b'{"ok": true}'], streamed=False).is_failed


def test_tokens_are_counted_by_the_server_else_by_the_tokenizer_else_by_chunks():
    counted = read([text("a"), text("b"), text("", "length"), usage(7), DONE])
    uncounted = read([text("a"), text("b"), text("", "length"), DONE])
    assert output_tokens_of([counted, uncounted], len) == [7, 2]
    assert output_tokens_of([counted, uncounted], lambda text: 5) == [7, 5]
    assert output_tokens_of([uncounted], None) == [2]


def body(backend, **more):
    settings = {"model": "m", "streamed": True, "ignore_eos": False, "extra": {}}
    return json.loads(request_body(backend, SAMPLE, **(settings | more)))


def test_the_bodies_of_the_backends():
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    assert body("openai") == {"model": "m", "prompt": "hi", "max_tokens": 8, **usage}
    assert body("vllm", ignore_eos=True)["ignore_eos"] is True
    chat = body("openai-chat", streamed=False)
    assert chat == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 8,
                    "stream": False}  # fmt: skip
    assert body("openai-embeddings", streamed=False) == {"model": "m", "input": "hi"}
    assert body("openai", extra={"max_tokens": 3, "top_k": 5})["max_tokens"] == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b'{"detail": "no"}', "no"),
        (b'{"error": "no"}', "no"),
        (b"<h1>no</h1>", "<h1>no</h1>"),
        (b"", "no body"),
        (b"[1]", "[1]"),
    ],
)
def test_messages_of_errors(answer, message):
    assert error_message(answer) == message
