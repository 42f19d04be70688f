"""From OpenAI's messages and tools to what a chat template expects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from research_engine.server.errors import invalid

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text contents, and arguments of tool calls as objects.

    Raises:
        ApiError: 400, a message has no role, or a content that is no text.
    """
    if not messages:
        raise invalid("messages is empty: a conversation needs at least one message", "messages")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"messages[{index}].role = {role!r}: must be one of {', '.join(ROLES)}", "messages")
    made = {**message, "content": _text(index, message.get("content"))}
    calls = message.get("tool_calls")
    if calls is None:
        made.pop("tool_calls", None)
    else:
        made["tool_calls"] = _tool_calls(index, calls)
    return made


def _text(index: int, content: Any) -> str:
    """A content is a text, nothing (beside tool calls), or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        whole = [text for text in texts if isinstance(text, str)]
        if len(whole) == len(content):
            return "".join(whole)
    raise invalid(
        f"messages[{index}].content must be a text or a list of text parts; this model reads no others", "messages"
    )


def _tool_calls(index: int, calls: Any) -> list[dict[str, Any]]:
    where = f"messages[{index}].tool_calls"
    if not isinstance(calls, list) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls
    ):
        raise invalid(f"{where} must be a list of objects with a function", "messages")
    made = []
    for call in calls:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):  # templates write objects themselves
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:
                raise invalid(f"{where}: the arguments {function['arguments']!r} are no JSON", "messages") from None
        made.append({**call, "function": function})
    return made


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises ApiError (400): a tool that is no function with a name."""
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
        ):
            raise invalid(f"tools[{index}] must be {{'type': 'function', 'function': {{'name': ...}}}}", "tools")
