"""Renders a model's chat template (Jinja, sandboxed) the way templates expect from transformers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """One compiled template. It comes from whoever made the model, so it runs without access to Python's inside."""

    def __init__(self, source: str, tokens: Mapping[str, str | None]) -> None:
        """``tokens``: what the template knows as ``bos_token`` and ``eos_token``.

        Raises:
            ValueError: the template does not parse.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._tokens = {name: token or "" for name, token in tokens.items()}
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: it is no text
            raise ValueError(f"the chat template does not parse: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any) -> str:
        """The conversation as one text. ``variables`` are what the template may know besides, such as ``tools``.

        Raises:
            ValueError: a message lacks its role, or the template refuses the conversation or fails on it.
        """
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"message {i} must be a dictionary with 'role' and 'content', got {message!r}")
        if not messages:
            raise ValueError("a conversation needs at least one message")
        try:
            known = {**variables, **self._tokens, "messages": messages, "add_generation_prompt": add_generation_prompt}
            return self._template.render(known)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        except Exception as error:  # whatever its code meets in a conversation that it was not written for
            raise ValueError(f"the chat template fails on this conversation: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
