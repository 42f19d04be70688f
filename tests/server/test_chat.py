"""/v1/chat/completions: roles, templates, log-probabilities, structured answers and tool calls."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.live import LiveServer

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def said(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def test_a_whole_answer(stub: LiveServer) -> None:
    answer = stub.chat("hi", max_tokens=5)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abcde"}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["usage"]["completion_tokens"] == 5


def test_max_completion_tokens_bounds_the_answer_and_goes_before_max_tokens(stub: LiveServer) -> None:
    assert stub.chat("hi", max_completion_tokens=3, max_tokens=9)["usage"]["completion_tokens"] == 3
    assert stub.chat("hi", max_tokens=9)["usage"]["completion_tokens"] == 9


def test_two_choices_streamed_at_once_carry_their_index_and_begin_with_the_role(server: LiveServer) -> None:
    fields = {"n": 2, "max_tokens": 8, "seed": 1, "ignore_eos": True}
    whole = server.chat("hello", **fields)
    events = server.events(CHAT, {**user("hello"), **fields})
    for index in range(2):
        mine = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        assert said(events, index) == whole["choices"][index]["message"]["content"]
    assert all(event["object"] == "chat.completion.chunk" for event in events)


def test_one_begin_token_however_many_the_template_and_the_tokenizer_write(server: LiveServer) -> None:
    """dummy:tiny's template writes <|im_start|>, its begin token, before every message; the tokenizer adds none."""
    tokens = server.post("/tokenize", user("hi")).json()["tokens"]
    assert tokens[0] == 257 and tokens[1] != 257
    assert server.chat("hi", max_tokens=1)["usage"]["prompt_tokens"] == len(tokens)


def test_contents_in_parts_are_their_text(stub: LiveServer) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert stub.chat(parts, max_tokens=1)["usage"] == stub.chat("hi", max_tokens=1)["usage"]
    refused = stub.post(CHAT, user([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]))
    assert refused.status == 400 and refused.error["param"] == "messages"


def test_logprobs_have_tokens_bytes_and_the_most_probable_beside_them(server: LiveServer) -> None:
    fields = {"max_tokens": 5, "logprobs": True, "top_logprobs": 2, "temperature": 0, "ignore_eos": True}
    (choice,) = server.chat("hello", **fields)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 5
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy
    assert (
        bytes(b for entry in content for b in entry["bytes"]).decode(errors="replace") == choice["message"]["content"]
    )
    events = server.events(CHAT, {**user("hello"), **fields})
    streamed = [entry for e in events for c in e["choices"] if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert streamed == content


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["response_format", "guided_json", "structured_outputs"],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_is_valid_by_its_schema(server: LiveServer, form: dict[str, Any], temperature: float) -> None:
    bias = {str(ord(space)): -100 for space in " \n\r\t"}  # a model of random weights would write little else
    answer = server.chat("hi", max_tokens=200, temperature=temperature, seed=3, logit_bias=bias, n=2, **form)
    for choice in answer["choices"]:
        made = json.loads(choice["message"]["content"])
        assert made["a"] in (1, 2) and made["b"] in ("x", "y") and len(made) == 2
        assert choice["finish_reason"] == "stop"


def test_other_forms(server: LiveServer) -> None:
    def content(**fields: Any) -> str:
        return server.chat("hi", max_tokens=60, seed=2, **fields)["choices"][0]["message"]["content"]

    assert re.fullmatch("[0-9]{3}-[ab]{1,4}", content(guided_regex="[0-9]{3}-[ab]{1,4}"))
    assert content(guided_choice=["yes", 'no, "never"']) in ("yes", 'no, "never"')
    assert re.fullmatch("a(x|y)b", content(guided_grammar='start: "a" inner "b"\ninner: "x" | "y"'))
    assert content(response_format={"type": "json_object"}).lstrip().startswith("{")
    assert content(response_format={"type": "text"}) != ""


def test_a_form_holds_whatever_else_is_asked(server: LiveServer) -> None:
    answer = server.chat(
        "hi", guided_choice=["yes", "no"], min_tokens=30, max_tokens=40, ignore_eos=True, temperature=0
    )
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "not a grammar"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_a_malformed_form_is_refused_by_name(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = server.post(CHAT, {**user("hi"), **fields})
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert server.chat("hi", max_tokens=1)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_tool_call_follows_the_tools_schema(server: LiveServer, choice: Any) -> None:
    bias = {str(ord(space)): -100 for space in " \n\r\t"}
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "seed": 1, "logit_bias": bias}
    (whole,) = server.chat("hi", **fields)["choices"]
    (call,) = whole["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    assert (whole["message"]["content"], whole["finish_reason"]) == (None, "tool_calls")
    events = server.events(CHAT, {**user("hi"), **fields})
    calls = [call for e in events for c in e["choices"] for call in c["delta"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [call["function"] for call in whole["message"]["tool_calls"]]
    assert said(events) == "" and calls[0]["index"] == 0


def test_tools_reach_the_template_and_a_text_without_calls_stays_text(stub: LiveServer) -> None:
    answer = stub.chat("hi", tools=TOOLS, max_tokens=4)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "abcd"}
    events = stub.events(CHAT, {**user("hi"), "tools": TOOLS, "max_tokens": 4})
    assert said(events) == "abcd"


def test_a_conversation_with_tool_calls_and_their_results_is_taken(stub: LiveServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    assert stub.post(CHAT, {"messages": messages, "max_tokens": 1}).status == 200
    call["function"]["arguments"] = "{"
    assert stub.post(CHAT, {"messages": messages, "max_tokens": 1}).status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tools": TOOLS, "tool_choice": "weather"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": "required"},
    ],
)
def test_wrong_tools_are_refused(stub: LiveServer, fields: dict[str, Any]) -> None:
    assert stub.post(CHAT, {**user("hi"), **fields}).status == 400
