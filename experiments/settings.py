"""The base of every settings class: frozen, strict about keys, and helpful about the wrong ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class Settings(BaseModel):
    """A part of an experiment's configuration. What is accepted is honoured; an unknown key is refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    context = {"key": str(key), "hint": nearest_first(str(key), cls.model_fields)}
                    raise PydanticCustomError("unknown_key", "unknown key '{key}'; {hint}", context)
        return data


def nearest_first(wrong: str, valid: Iterable[str]) -> str:
    """The valid names as a phrase, those most like the wrong one first."""
    names = sorted(valid)
    near = difflib.get_close_matches(wrong, names, n=len(names) or 1, cutoff=0.5)
    return f"valid ones, nearest first: {', '.join([*near, *(name for name in names if name not in near)])}"
