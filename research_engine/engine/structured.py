"""What an output must look like, and what the engine needs of whoever enforces it; the grammars themselves are outside.

A constraint belongs to one request and follows its tokens: preemption, other requests and seeds do not touch it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an output; exactly one of these, named as vLLM's users know them.

    Args:
        json: a JSON schema, as a mapping or its text.
        json_object: any JSON object.
        regex: a regular expression that the whole output matches.
        choice: texts of which the output is one.
        grammar: a context-free grammar in Lark's syntax.

    Raises:
        ValueError: none or several of them are given, or one is of the wrong kind.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [entry.name for entry in fields(self) if getattr(self, entry.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(entry.name for entry in fields(self))
            raise ValueError(f"structured_outputs has {given or 'nothing'}: it takes exactly one of {names}")
        for name, kind, what in (
            ("json", (str, Mapping), "a JSON schema, as a mapping or a text"),
            ("json_object", bool, "True or False"),
            ("regex", str, "a text"),
            ("grammar", str, "a text"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} = {value!r}: must be {what}")
        if self.choice is not None:
            good = isinstance(self.choice, (list, tuple)) and all(
                isinstance(text, str) and text for text in self.choice
            )
            if not good or not self.choice:
                raise ValueError(f"choice = {self.choice!r}: must be a list of texts that are not empty")


class TokenConstraint(Protocol):
    """Follows one output and says what may come next."""

    def allowed(self) -> bytes:
        """The tokens that may come next: bit i % 8 of byte i // 8 is token i; at least one is set."""
        ...

    def advance(self, token_id: int) -> None:
        """A token was drawn; mutates."""
        ...

    @property
    def ended(self) -> str | None:
        """Why no token may follow: "stop" (the output is whole), "error" (the grammar gave up); None while one may."""
        ...
