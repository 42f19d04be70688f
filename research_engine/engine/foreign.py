"""Words for what comes from a user's code: its exceptions and its values, whose own words may fail to be made."""

from __future__ import annotations

from collections.abc import Callable

_CAUGHT = (Exception, SystemExit)  # Ctrl-C goes through


def words_of(error: BaseException) -> str:
    """`KeyError: 'x'`; where `__str__` raises, `Boom (its message could not be made: TypeError: no)`."""
    message, why = _made(error, str)
    name = type(error).__name__
    if message is None:
        return f"{name} (its message could not be made: {why})"
    return f"{name}: {message or 'no message'}"


def has_words(error: BaseException) -> bool:
    """Whether its message can be made."""
    return _made(error, str)[0] is not None


def shown(value: object) -> str:
    """Its `repr`; of a value whose `__repr__` raises: `a Plan (it could not be shown: RuntimeError: no)`."""
    text, why = _made(value, repr)
    return f"a {type(value).__name__} (it could not be shown: {why})" if text is None else text


def _made(value: object, make: Callable[[object], str]) -> tuple[str | None, str]:
    """The text, or None and why there is none."""
    try:
        return make(value), ""
    except _CAUGHT as error:
        name = type(error).__name__
        try:
            return None, f"{name}: {error}"
        except _CAUGHT:
            return None, name
