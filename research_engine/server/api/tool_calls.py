"""Reads tool calls out of a model's text, in the two formats that most open models were trained on.

Hermes, Qwen:   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number of them, text around them
Llama 3.1:      {"name": "f", "parameters": {...}} and nothing else (several of them joined by semicolons)

Which one, the chat template shows: it writes earlier calls in the same format. What does not parse stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_HERMES = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_OPENING = "<tool_call>"
_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; arguments are JSON, as the protocol wants them."""

    name: str
    arguments: str

    def told(self, index: int | None = None) -> dict[str, Any]:
        """As in an answer; with its index, as in a stream."""
        function = {"name": self.name, "arguments": self.arguments}
        told = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        return told if index is None else {"index": index, **told}


def parse(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls of functions among `names`."""
    calls: list[ToolCall] = []
    if _OPENING in text:
        rest, at = [], 0
        for match in _HERMES.finditer(text):
            call = _call(match.group(1), names)
            if call is not None:
                calls.append(call)
                rest.append(text[at : match.start()])
                at = match.end()
        return ("".join([*rest, text[at:]]).strip() if calls else text), calls
    stripped = text.strip().removeprefix(_TAG)
    if stripped.startswith("{"):
        for piece in _objects(stripped):
            call = _call(piece, names)
            if call is None:
                return text, []
            calls.append(call)
        if calls:
            return "", calls
    return text, []


def _objects(text: str) -> list[str]:
    """JSON objects joined by semicolons or white space; empty if there is anything else."""
    decoder, at, found = json.JSONDecoder(), 0, []
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except ValueError:
            return []
        found.append(text[at:end])
        at = end
        while at < len(text) and text[at] in "; \n\t\r":
            at += 1
    return found


def _call(text: str, names: Collection[str]) -> ToolCall | None:
    try:
        made = json.loads(text)
    except ValueError:
        return None
    if not isinstance(made, dict) or made.get("name") not in names:
        return None
    arguments = made.get("arguments", made.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(made["name"], json.dumps(arguments, ensure_ascii=False))


class ToolCallStream:
    """Splits one streamed text into what may be shown and what could be a tool call, which waits for the end."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._shown = 0
        self._holding = False

    def push(self, text: str) -> str:
        """Text that is certainly no part of a call."""
        self._held += text
        if self._holding:
            return ""
        begins = self._held.lstrip()
        if not self._shown and (begins[:1] == "{" or _TAG.startswith(begins) or begins.startswith(_TAG)):
            return ""
        at = self._held.find(_OPENING)
        if at >= 0:
            self._holding = True
        else:
            at = len(self._held) - next(
                (
                    n
                    for n in range(min(len(_OPENING) - 1, len(self._held)), 0, -1)
                    if _OPENING.startswith(self._held[-n:])
                ),
                0,
            )
        shown, self._held = self._held[:at], self._held[at:]
        self._shown += len(shown)
        return shown

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What was held back: text, and calls."""
        held, self._held = self._held, ""
        return parse(held, self._names)
