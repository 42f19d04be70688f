"""Request traces for replay: when each request came and how long its prompt and its output were.

Read by the names of the columns: Azure (TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake (timestamp in ms,
input_length, output_length, hash_ids of 512-token prefix blocks), BurstGPT (Timestamp, Request tokens, Response
tokens), LLMServingSim (arrival_time, input_toks, output_toks), Vidur and etalon (num_prefill_tokens,
num_decode_tokens, no times), and plain prompt_tokens, output_tokens and arrival in seconds.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from research_engine.datasets.record_file import read_records


class TraceRow(NamedTuple):
    """One request. `arrival`: seconds after the first; None where the trace has no times.

    `blocks`: hashes of the prompt's blocks of 512 tokens; requests that begin with the same ones share that prefix.
    """

    prompt_tokens: int
    output_tokens: int
    arrival: float | None
    blocks: tuple[int, ...] = ()


class _Form(NamedTuple):
    prompt: str
    output: str
    time: str | None
    seconds: Callable[[Any], float]


def _date(text: Any) -> float:
    """Seconds of a date and time in ISO form; more than six digits of a second are cut off (Azure has seven)."""
    head, dot, fraction = str(text).strip().partition(".")
    digits = "".join(character for character in fraction if character.isdigit())[:6].ljust(6, "0")
    moment = datetime.datetime.fromisoformat(f"{head}{dot}{digits}".replace(" ", "T") if dot else head)
    return moment.replace(tzinfo=datetime.timezone.utc).timestamp()


_FORMS = (
    _Form("ContextTokens", "GeneratedTokens", "TIMESTAMP", _date),
    _Form("input_length", "output_length", "timestamp", lambda value: float(value) / 1000),
    _Form("Request tokens", "Response tokens", "Timestamp", float),
    _Form("input_toks", "output_toks", "arrival_time", float),
    _Form("prompt_tokens", "output_tokens", "arrival", float),
    _Form("num_prefill_tokens", "num_decode_tokens", None, float),
)
FORMS = "; ".join(", ".join(name for name in form[:3] if name) for form in _FORMS)


def read_trace(path: Path) -> list[TraceRow]:
    """Rows in order of arrival, those without a prompt or an output left out.

    Raises:
        ValueError: the file cannot be read, is of no form that is known, or a row has no numbers; names the record.
    """
    rows: list[TraceRow] = []
    for index, record in enumerate(read_records(path), 1):
        form = next((form for form in _FORMS if form.prompt in record and form.output in record), None)
        if form is None:
            raise ValueError(f"{path.name}, record {index}: has {', '.join(map(str, record))}; it must have: {FORMS}")
        try:
            prompt, output = (int(float(record[name])) for name in (form.prompt, form.output))
            time = None if form.time is None else record.get(form.time)
            arrival = None if time in (None, "") else form.seconds(time)
            blocks = tuple(map(int, record.get("hash_ids") or ()))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path.name}, record {index}: {error}") from None
        if arrival is not None and not math.isfinite(arrival):
            raise ValueError(f"{path.name}, record {index}: {form.time} = {arrival!r} is no time")
        if prompt > 0 and output > 0:
            rows.append(TraceRow(prompt, output, arrival, blocks))
    if not rows:
        raise ValueError(f"{path}: holds no request")
    if any(row.arrival is None for row in rows):
        return [row._replace(arrival=None) for row in rows]
    rows.sort(key=lambda row: row.arrival or 0.0)
    first = rows[0].arrival or 0.0
    return [row._replace(arrival=(row.arrival or 0.0) - first) for row in rows]
