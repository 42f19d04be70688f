"""Errors in OpenAI's shape, and how the engine's and the parameters' errors become one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from research_engine.server.engine_client import EngineDeadError, RefusedError

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_FIELD = re.compile(r"(?:request '[^']*': )?([a-z_]+)(?:\[[^\]]*\])? (?:= |holds )")
_OWN_ID = re.compile(r"^request '[a-z]+-[0-9a-f]{32}(?:-(\d+))?': ")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
RETRY_SECONDS = 1


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: of HTTP.
        message: for the person who made the request: which value, which rule.
        param: the field at fault.
        code: a short name that programs can test for.
        headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """The error object, as JSON."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def invalid(message: str, param: str | None = None) -> ApiError:
    """400; the field is read off a message of the project's form `field = value: rule` when it isn't given."""
    if param is None and (match := _FIELD.match(message)):
        param = match.group(1)
    return ApiError(400, message, param=param)


def unavailable(message: str, code: str) -> ApiError:
    """503, to be tried again."""
    return ApiError(503, message, code=code, headers=[(b"retry-after", str(RETRY_SECONDS).encode())])


def of_engine(error: RefusedError | EngineDeadError, param: str | None = None) -> ApiError:
    """What a client is told of a request that the engine did not serve.

    Args:
        param: the field at fault where the engine's message names none.
    """
    if isinstance(error, EngineDeadError):
        return unavailable(f"the engine is not running: {error}", "engine_dead")
    if error.kind == "queue":
        return unavailable(str(error), "queue_full")
    if error.kind == "shutdown":
        return unavailable(str(error), "shutting_down")
    if error.kind in ("request", "length"):
        told = invalid(_OWN_ID.sub(_prompt_of, str(error)))
        told.param = told.param or param
        told.code = "context_length_exceeded" if error.kind == "length" else None  # as OpenAI's, which clients test for
        return told
    return ApiError(500, str(error), code="engine_error")


def _prompt_of(own_id: re.Match[str]) -> str:
    """In place of the engine's name for a prompt: which of the prompts that the client sent, if there were several."""
    return f"prompt[{own_id[1]}]: " if own_id[1] else ""


T = TypeVar("T")


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """A request.

    Raises:
        ApiError: 400, the body is no JSON, or one of its fields is of the wrong type.
    """
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise _of_decoding(error, decoder.type) from None
    except RecursionError:
        raise nested_too_deeply() from None


def nested_too_deeply() -> ApiError:
    return ApiError(400, "the body is nested too deeply", code="invalid_json")


def _of_decoding(error: msgspec.DecodeError, kind: Any) -> ApiError:
    if isinstance(error, msgspec.ValidationError):
        message, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        if missing := _MISSING.fullmatch(message):
            param = f"{param}.{missing[1]}" if param else missing[1]
            return ApiError(400, f"{param} is missing", param=param)
        if message.startswith("Invalid enum value") and param and (valid := _valid_at(kind, param)):
            message = f"{message}; valid: {', '.join(valid)}"
        return ApiError(400, f"{param}: {message}" if param else message, param=param)
    return ApiError(400, f"the body is no valid JSON: {error}", code="invalid_json")


def _valid_at(kind: type, path: str) -> list[str]:
    """The values that a field may have, by its dotted path in a struct; none where it is no choice of texts."""
    types: Sequence[Any] = [inspect.type_info(kind)]
    for name in path.split("."):
        fields = [field for info in types if isinstance(info, inspect.StructType) for field in info.fields]
        found = [field.type for field in fields if field.encode_name == name]
        types = [own for info in found for own in (info.types if isinstance(info, inspect.UnionType) else (info,))]
    return [str(value) for info in types if isinstance(info, inspect.LiteralType) for value in info.values]
