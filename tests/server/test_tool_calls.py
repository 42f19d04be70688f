"""Tool calls are read out of text in the known formats, and everything else stays text."""

from __future__ import annotations

import pytest

from research_engine.server.api.tool_calls import ToolCall, ToolCallStream, parse

NAMES = {"f", "g"}
CASES = [
    ("no call", "no call", []),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [ToolCall("f", '{"a": 1}')]),
    (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        "Let me see.",
        [ToolCall("f", "{}"), ToolCall("g", "{}")],
    ),
    ('<tool_call>{"name": "f", "arguments": </tool_call>', '<tool_call>{"name": "f", "arguments": </tool_call>', []),
    ('<tool_call>{"name": "h"}</tool_call>', '<tool_call>{"name": "h"}</tool_call>', []),
    ('{"name": "f", "parameters": {"x": "é"}}', "", [ToolCall("f", '{"x": "é"}')]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', "", [ToolCall("f", "{}")]),
    ('{"name": "f", "parameters": {}}; {"name": "g"}', "", [ToolCall("f", "{}"), ToolCall("g", "{}")]),
    ('{"name": "f", "parameters": {}} and text', '{"name": "f", "parameters": {}} and text', []),
    ('{"a": 1}', '{"a": 1}', []),
    ("a < b <tool", "a < b <tool", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "rest", "calls"), CASES)
def test_calls_are_read_out_of_a_whole_text(text: str, rest: str, calls: list[ToolCall]) -> None:
    assert parse(text, NAMES) == (rest, calls)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "rest", "calls"), CASES)
def test_a_stream_gives_the_same_calls_and_shows_no_part_of_one(
    text: str, rest: str, calls: list[ToolCall], size: int
) -> None:
    stream = ToolCallStream(NAMES)
    shown = "".join(stream.push(text[at : at + size]) for at in range(0, len(text), size))
    left, found = stream.finish()
    assert found == calls
    assert (shown + left).strip() == rest
    assert not calls or "<tool" not in shown


def test_text_before_a_call_is_shown_at_once() -> None:
    stream = ToolCallStream(NAMES)
    assert stream.push("Hello <") == "Hello "
    assert stream.push("b> ") == "<b> "
