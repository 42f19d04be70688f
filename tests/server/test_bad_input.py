"""Requests that users of public servers have reported faults with: each is refused by name, and the engine lives."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.server.live import DEADLINE, LiveServer

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def still_serves(server: LiveServer) -> bool:
    return server.complete(prompt="a", max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"logit_bias": {"259": 1}}, "logit_bias", "258"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a'"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "100"),
        ({"stop_token_ids": [259]}, "stop_token_ids", "258"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [259]}, "prompt", "259"),
        ({"prompt": [2**63]}, "prompt", ""),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "the prompt is empty"),
        ({"prompt": [[65], []]}, "prompt", "prompt[1]: the prompt is empty"),
        ({"prompt": ["a", 1]}, "prompt", ""),
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": 5}, "prompt", ""),
        ({"prompt": ["a"] * 3000}, "prompt", "2048"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "4"),
        ({"stop": ""}, "stop", "empty"),
        ({"n": 0}, "n", "128"),
        ({"n": 129}, "n", "128"),
        ({"n": "2"}, "n", "int"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"temperature": "hot"}, "temperature", ""),
        ({"top_p": 0}, "top_p", "0"),
        ({"top_p": 1.1}, "top_p", "1.1"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"min_p": 2}, "min_p", "2"),
        ({"presence_penalty": 3}, "presence_penalty", "3"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"max_tokens": -5}, "max_tokens", "-5"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "5"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": -1}, "logprobs", "-1"),
        ({"best_of": 2}, "best_of", "2"),
        ({"suffix": "end"}, "suffix", "end"),
        ({"use_beam_search": True}, "use_beam_search", "beam"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"priority": 1.5}, "priority", ""),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(
    server: LiveServer, fields: dict[str, Any], param: str | None, says: str
) -> None:
    answer = server.post(TEXT, {"prompt": "a", "max_tokens": 1, **fields})
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param and answer.error["type"] == "invalid_request_error"
    assert says in answer.error["message"]
    assert still_serves(server)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
        ({"response_format": {}}, "response_format.type"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert still_serves(server)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(server: LiveServer) -> None:
    for streamed in (False, True):
        answer = server.post(TEXT, {"prompt": [65] * 5000, "max_tokens": 1, "stream": streamed})
        assert answer.status == 400
        rule = "with max_model_len = 4096 at most 4095 leave room for an output"
        assert answer.error["message"] == f"the prompt has 5000 tokens; {rule}"  # the same words for every such request
        assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "prompt")
        long = {"messages": [{"role": "user", "content": "a" * 5000}], "stream": streamed}
        assert server.post(CHAT, long).error["param"] == "messages"
    assert still_serves(server)


def test_a_bad_prompt_among_good_ones_is_refused_and_the_others_are_aborted(server: LiveServer) -> None:
    assert server.post(TEXT, {"prompt": [[65], [300], [66]], "max_tokens": 4000}).status == 400
    server.wait_until(lambda stats: stats["running"] == stats["waiting"] == 0)


def test_a_field_that_is_missing_or_no_choice_is_told_with_what_is_valid(server: LiveServer) -> None:
    error = server.post(CHAT, {"prompt": "a"}).error
    assert (error["message"], error["param"]) == ("messages is missing", "messages")
    assert "/v1/chat/completions takes messages" in server.post(TEXT, {"messages": []}).error["message"]
    error = server.post(CHAT, {"messages": [], "response_format": {"type": "xml"}}).error
    assert error["param"] == "response_format.type"
    assert error["message"].endswith("Invalid enum value 'xml'; valid: json_object, json_schema, text")
    error = server.post("/v1/embeddings", {"input": "a", "encoding_format": "hex"}).error
    assert error["message"].endswith("valid: base64, float")


def test_nulls_and_unknown_fields_are_accepted(server: LiveServer) -> None:
    document = server.get("/openapi.json").json()["components"]["schemas"]
    for path, name, needed in (
        (TEXT, "CompletionRequest", {"prompt": "a", "max_tokens": 1}),
        (CHAT, "ChatRequest", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/tokenize", "TokenizeRequest", {"prompt": "a"}),
        ("/detokenize", "DetokenizeRequest", {"tokens": [65]}),
    ):
        nulls = dict.fromkeys(document[name]["properties"])
        answer = server.post(path, {**nulls, **needed, "made_up": {"x": [1]}, "store": None})
        assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"prompt": "a"', b"1" * 10000, b'"a"', b"{}"]
)
def test_a_body_that_is_no_request_is_refused(server: LiveServer, body: bytes) -> None:
    for path in (TEXT, CHAT, "/v1/embeddings", "/tokenize", "/detokenize"):
        answer = server.post(path, body)
        assert answer.status == 400 and answer.error["message"]
    assert still_serves(server)


def test_deep_nesting_is_refused_without_harm(server: LiveServer) -> None:
    for body in (b'{"prompt":' + b"[" * 100000, b'{"guided_json":' + b'{"a":' * 100000):
        assert server.post(TEXT, body).status == 400
    assert still_serves(server)


def test_another_content_type_is_refused(server: LiveServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.post(TEXT, {"prompt": "a"}, headers={"content-type": kind})
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    kind = "application/json; charset=utf-8"
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}, headers={"content-type": kind}).status == 200


def test_a_body_of_100_mb_is_refused_whether_its_length_is_told_or_not(server: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    for told in (b"content-length: 104857600\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as connection:
            connection.sendall(head + told)
            piece = b"x" * 65536
            try:
                for _ in range(1600):
                    connection.sendall(b"10000\r\n" + piece + b"\r\n" if b"chunked" in told else piece)
            except (BrokenPipeError, ConnectionResetError):
                continue  # refused before it was all sent
            assert b" 413 " in connection.recv(4096).partition(b"\r\n")[0]
    assert still_serves(server)


def test_an_unknown_model_is_not_found_and_the_names_are_told(server: LiveServer) -> None:
    for path in (TEXT, CHAT):
        answer = server.post(path, {"model": "gpt-4", "prompt": "a", "messages": [{"role": "user", "content": "a"}]})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert "'tiny'" in answer.error["message"]
    for name in ("tiny", "dummy:tiny"):
        assert server.complete(model=name, prompt="a", max_tokens=1)["model"] == "tiny"
        assert server.get(f"/v1/models/{name}").json()["id"] == name
    assert server.get("/v1/models/gpt-4").status == 404
    assert [entry["id"] for entry in server.get("/v1/models").json()["data"]] == ["tiny", "dummy:tiny"]


def test_paths_and_methods_that_do_not_exist(server: LiveServer) -> None:
    assert server.get("/v2/nothing").error["type"] == "not_found_error"
    for path, near in (("/chat/completions", "/v1/chat/completions"), ("/completion", "/v1/completions"),
                       ("/v1/model", "/v1/models"), ("/metric", "/metrics")):  # fmt: skip
        assert server.get(path).error["message"] == f"there is no {path}; nearest: {near}"
    answer = server.get(TEXT)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert server.post("/health", {}).status == 405
    assert server.get("/stats?since=x").error["param"] == "since"


def test_bytes_that_are_no_characters_make_valid_text_of_bounded_cost(server: LiveServer) -> None:
    """0xFF never is a character: a run of it becomes a run of U+FFFD, whole and streamed."""
    fields = {"prompt": "a", "max_tokens": 400, "temperature": 0, "logit_bias": {"255": 100}}
    whole = server.complete(**fields)
    assert whole["choices"][0]["text"] == "\ufffd" * 400
    events = server.events(TEXT, fields)
    assert "".join(c["text"] for event in events for c in event["choices"]) == "\ufffd" * 400
    assert still_serves(server)


def test_a_lone_surrogate_in_a_prompt_is_refused(server: LiveServer) -> None:
    body = b'{"prompt": "\\ud800", "max_tokens": 1}'
    assert server.post(TEXT, body).status == 400
    assert server.post("/tokenize", b'{"prompt": "\\ud800"}').status == 400


def test_pipelined_and_half_sent_requests_harm_nobody(stub: LiveServer) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    )
    whole = request % (len(body), body)
    with socket.create_connection(("127.0.0.1", stub.port), timeout=DEADLINE) as connection:
        connection.sendall(whole * 3)
        received = b""
        while received.count(b'"text":"abc"') < 3:
            piece = connection.recv(65536)
            assert piece, received
            received += piece
    with socket.create_connection(("127.0.0.1", stub.port), timeout=DEADLINE) as connection:
        connection.sendall(whole[:-5])
    with socket.create_connection(("127.0.0.1", stub.port), timeout=DEADLINE) as connection:
        connection.sendall(b"NONSENSE\r\n\r\n")
        assert b" 400 " in connection.recv(4096).partition(b"\r\n")[0]
    assert still_serves(stub)
