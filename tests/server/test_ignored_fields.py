"""A field that no endpoint knows is told to the log once, with the one that was meant."""

from __future__ import annotations

import json
import logging

import pytest

from research_engine.server.ignored_fields import MOST_NAMES, IgnoredFields
from research_engine.server.protocol import ChatRequest
from tests.server.live import LiveServer


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, logger="research_engine.server")
    return lambda: [record.getMessage() for record in caplog.records]


def body(**fields) -> bytes:
    return json.dumps({"messages": [], **fields}).encode()


def test_a_name_is_told_once_and_with_what_was_meant(told):
    fields = IgnoredFields()
    for _ in range(3):
        fields.look(ChatRequest, body(temprature=0, store=True, top_k=3))
    assert told() == [
        "the field 'temprature' of a request is passed over; 'temperature' is known",
        "the field 'store' of a request is passed over",
    ]


def test_names_that_are_made_up_fill_neither_log_nor_memory(told):
    fields = IgnoredFields()
    for number in range(3 * MOST_NAMES):
        fields.look(ChatRequest, body(**{f"{number}x": 0}))
    assert len(told()) == MOST_NAMES


def test_a_name_cannot_break_out_of_its_line(told):
    IgnoredFields().look(ChatRequest, body(**{"a\nINFO b" + "c" * 500: 0}))
    (line,) = told()
    assert "\n" not in line and len(line) < 150


def test_a_long_body_is_not_read_again(told):
    IgnoredFields().look(ChatRequest, body(strange="x" * 100_000))
    assert told() == []


def test_a_server_serves_such_a_request_and_tells(server: LiveServer) -> None:
    for path, needed in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                         ("/v1/completions", {"prompt": "a"})):  # fmt: skip
        assert server.post(path, {**needed, "max_tokens": 1, "presense_penalty": 1}).status == 200
    assert server.log.read_text().count("'presense_penalty' of a request is passed over; 'presence_penalty'") == 1
