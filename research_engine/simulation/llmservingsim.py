"""Reads profiles and recorded runs in the CSV and JSONL form of LLMServingSim (Cho et al., IISWC 2024; version 2).

A profile is three files: `dense` (layer, tokens, time_us), `per_sequence` (layer, sequences, time_us) and `attention`
(prefill_chunk, kv_prefill, n_decode, kv_decode, time_us), each time of one layer. Linear and element-wise layers are
counted as often as a decoder of the Llama family has them.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .attention_cost import AttentionTable
from .curve import Curve
from .host_cost import HostCost
from .profiled import Profile

PER_LAYER = {
    "layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1, "act_fn": 1, "down_proj": 1,
}  # fmt: skip
ONCE = ("embedding", "final_layernorm")
PER_SEQUENCE = ("lm_head", "sampler")


class RecordedRequest(NamedTuple):
    """One request of a recorded run, in seconds after the run's first arrival.

    Attributes:
        arrival, first_token, last_token: when it came, and when its first and last token were out.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    arrival: float
    first_token: float
    last_token: float


def import_profile(
    dense: Path,
    per_sequence: Path,
    attention: Path,
    *,
    model: str,
    num_layers: int,
    machine: Mapping[str, str],
    host: tuple[float, float] = (0.0, 0.0),
) -> Profile:
    """Make a profile of the three CSV files.

    Dense times are made monotone by the nearest monotone curve (isotonic regression), attention is taken as measured.

    Args:
        model: name to store.
        num_layers: decoder layers; the files give the time of one.
        machine: gpu and versions, as far as known.
        host: (a, b): seconds a step and seconds a step and sequence to add. The files hold the time of kernels alone,
            so the gaps between kernels and what the host does not hide are missing in them.

    Raises:
        ValueError: a layer or column is missing, or one that is not known is there; names it.
    """
    counts = {name: count * num_layers for name, count in PER_LAYER.items()} | dict.fromkeys(ONCE, 1)
    rows = []
    for row in _rows(attention, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")):
        chunk, before, decodes, context, microseconds = row
        rows.append((chunk, before, decodes, context, microseconds * 1e-6 * num_layers))
    return Profile(
        model=model,
        machine=machine,
        dense=_sum_of_layers(dense, "tokens", counts),
        head=_sum_of_layers(per_sequence, "sequences", dict.fromkeys(PER_SEQUENCE, 1)),
        attention=AttentionTable(rows),
        host=HostCost(schedule=host),
        origin="imported from LLMServingSim's CSV form",
    )


def read_run(path: Path) -> list[RecordedRequest]:
    """The requests of a `requests.jsonl`, by arrival.

    Arrivals are on another clock than tokens; a request is queued no earlier than it arrives, so the smallest
    difference between the two is taken for the clocks' offset.

    Raises:
        ValueError: the file holds no request.
    """
    raw = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not raw:
        raise ValueError(f"{path} holds no request")
    offset = min(entry["queued_ts"] - entry["arrival_time"] for entry in raw)
    start = min(entry["arrival_time"] for entry in raw)
    requests = [
        RecordedRequest(
            entry["request_id"],
            entry["input_toks"],
            entry["output_toks"],
            entry["arrival_time"] - start,
            entry["first_token_ts"] - offset - start,
            entry["last_token_ts"] - offset - start,
        )
        for entry in raw
    ]
    return sorted(requests, key=lambda request: request.arrival)


def _sum_of_layers(path: Path, column: str, counts: Mapping[str, int]) -> Curve:
    """Seconds of all layers by the numbers in `column` at which every layer was measured, made monotone."""
    from scipy.optimize import isotonic_regression

    times: dict[float, dict[str, float]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        for entry in csv.DictReader(file):
            if entry["layer"] not in counts:
                raise ValueError(f"{path}: layer {entry['layer']!r} is not known; known are {', '.join(counts)}")
            times[float(entry[column])][entry["layer"]] = float(entry["time_us"]) * 1e-6
    complete = sorted(at for at, layers in times.items() if len(layers) == len(counts))
    if not complete:
        missing = sorted(set(counts).difference(*times.values()))
        raise ValueError(f"{path}: no row count has all layers; missing are {', '.join(missing)}")
    sums = [sum(counts[layer] * seconds for layer, seconds in times[at].items()) for at in complete]
    return Curve(zip(complete, map(float, isotonic_regression(sums).x), strict=True))


def _rows(path: Path, columns: Sequence[str]) -> list[tuple[float, ...]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} lacks the columns {', '.join(missing)}")
        return [tuple(float(entry[name]) for name in columns) for entry in reader]
