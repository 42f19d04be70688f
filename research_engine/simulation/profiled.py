"""Step time from measurements: a profile is a JSON file that says what was measured, on what, and how well it does.

    decode graph   table(padded rows) + c sum(kv) + d max(kv)
    token graph    table(padded tokens) + attention
    launched       dense(tokens) + head(rows drawn) + attention
    longer         where the device has been busy lately and its power is limited (power.py)

Attention is one of attention_cost.py's. A graph's table holds everything else, the head and what attention costs with
next to no context included. Beside these, which the device takes, there are block moves and the host's part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from research_engine.engine.contract import Batch
from research_engine.other_load import DISTURBED_ABOVE

from .attention_cost import AttentionCost, AttentionFormula, attention_from_json
from .cost_model import StepTime, Work, work_of
from .curve import Curve
from .host_cost import NO_HOST, HostCost
from .power import PowerLimit
from .step_kind import NO_GRAPHS, Ladders, StepKind

FORMAT = 4
_CONDITIONS = {
    "cores": (DISTURBED_ABOVE, "other processes took {:.0%} of the cores"),
    "gpu": (DISTURBED_ABOVE, "the GPU was {:.0%} busy before"),
    "spread": (0.15, "repeats of a batch spread by {:.0%}"),
}
"""Name -> (above which it matters, words)."""
PARTS = ("decode graph", "token graph", "dense", "head", "decode", "prefill", "moves")


class ProfileMismatch(ValueError):
    """A profile of another model, GPU or version than the one asked for; names the difference."""


@dataclass(frozen=True)
class Profile:
    """Everything that was measured of one model on one machine.

    Args:
        model: its name.
        machine: gpu, driver, dtype, libraries and kernels by name -> version; what is unknown is left out.
        dense: tokens of a launched step -> seconds of everything but attention and head.
        head: rows drawn in a launched step -> seconds of logits and sampling; may hold zeros alone where `dense`
            includes them.
        attention: of all layers; a formula where there are graphs.
        host: what the host takes.
        ladders: the sizes of the executor's graphs.
        overlap: whether the engine runs ahead, scheduling a step while the device is busy with the one before.
        decode_graph, token_graph: padded size -> seconds of a graph without the contexts' part of attention, at some
            of those sizes; needed where there are such graphs.
        power: what a device that has been busy takes longer; None where that was not seen. Everything else here is of
            a rested one.
        block_move: (latency, seconds a block) of swapping blocks in a step; block_copy: of copying them on the device.
        held_out: error on steps it was not made from: steps, mape and bias (mean signed), shares of the step time;
            empty where nothing was held out.
        parts: the same for each part of the measurement, by name.
        origin: how it was made, in words.
        conditions: shares, as far as they are known: `cores` of the usable cores' time that other processes took while
            it was measured, `gpu` of the time that the GPU was busy before, `spread` of a batch's time between the
            quartiles of its repeats, in the median of all batches.
    """

    model: str
    machine: Mapping[str, str]
    dense: Curve
    head: Curve
    attention: AttentionCost
    host: HostCost = NO_HOST
    ladders: Ladders = NO_GRAPHS
    overlap: bool = False
    decode_graph: Curve | None = None
    token_graph: Curve | None = None
    power: PowerLimit | None = None
    block_move: tuple[float, float] = (0.0, 0.0)
    block_copy: tuple[float, float] = (0.0, 0.0)
    held_out: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    origin: str = ""
    conditions: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, sizes in zip(("decode_graph", "token_graph"), self.ladders, strict=True):
            if list(sizes) != sorted({*sizes}) or (sizes and sizes[0] < 1):
                raise ValueError(f"the sizes of {name} are {list(sizes)}: must be integers >= 1, ascending")
            if sizes and (getattr(self, name) is None or not isinstance(self.attention, AttentionFormula)):
                raise ValueError(f"graphs of {list(sizes)}, but no table of {name} and no formula for attention")

    @property
    def disturbance(self) -> str:
        """Why its times may not be those of the machine alone, in one line; empty where nothing speaks against them."""
        told = [
            words.format(self.conditions[name])
            for name, (limit, words) in _CONDITIONS.items()
            if self.conditions.get(name, 0.0) > limit
        ]
        return ", ".join(told)

    def require(self, *, model: str | None = None, **machine: str) -> None:
        """Refuse to stand in for something else.

        Args:
            model: the name wanted; not looked at when None.
            machine: entries of `machine` that must be equal, e.g. gpu="NVIDIA H200".

        Raises:
            ProfileMismatch: with every difference.
        """
        wanted = {**({} if model is None else {"model": model}), **machine}
        own = {"model": self.model, **self.machine}
        differences = [
            f"{name} is {own.get(name, 'not recorded')!r}, wanted {value!r}"
            for name, value in wanted.items()
            if own.get(name) != value
        ]
        if differences:
            raise ProfileMismatch(f"the profile does not fit: {'; '.join(differences)}")

    def as_json(self) -> dict[str, Any]:
        """What its file holds."""
        return {
            "format": FORMAT, "model": self.model, "machine": dict(self.machine), "origin": self.origin,
            "conditions": dict(self.conditions),
            "held_out": dict(self.held_out), "parts": {name: dict(error) for name, error in self.parts.items()},
            "host": self.host.as_json(), "ladders": self.ladders, "overlap": self.overlap,
            "decode_graph": _points(self.decode_graph), "token_graph": _points(self.token_graph),
            "power": None if self.power is None else self.power.as_json(),
            "block_move": self.block_move, "block_copy": self.block_copy,
            "dense": self.dense.points, "head": self.head.points, "attention": self.attention.as_json(),
        }  # fmt: skip

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(self.as_json()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read what `save` wrote.

        Raises:
            ValueError: it is no profile, or of another format; says what is wrong.
            OSError: it cannot be read.
        """
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # no JSON, or no UTF-8
            raise ValueError(f"{path} is no profile: {error}") from error
        if not isinstance(data, dict) or "format" not in data:
            raise ValueError(f"{path} is no profile: it must hold a JSON object with a 'format'")
        if data["format"] != FORMAT:
            raise ValueError(f"{path}: format {data['format']!r}, this version reads {FORMAT}; make the profile again")
        try:
            return cls(
                model=_text(data["model"]),
                machine={_text(name): _text(value) for name, value in data["machine"].items()},
                dense=Curve((x, y) for x, y in data["dense"]),
                head=Curve((x, y) for x, y in data["head"]),
                attention=attention_from_json(data["attention"]),
                host=HostCost.from_json(data["host"]),
                ladders=_ladders(data["ladders"]),
                overlap=_flag(data["overlap"]),
                decode_graph=_curve(data["decode_graph"]),
                token_graph=_curve(data["token_graph"]),
                power=None if data.get("power") is None else PowerLimit.from_json(data["power"]),
                block_move=_two(data["block_move"]),
                block_copy=_two(data["block_copy"]),
                held_out={name: float(value) for name, value in data["held_out"].items()},
                parts={part: {n: float(v) for n, v in error.items()} for part, error in data["parts"].items()},
                origin=_text(data["origin"]),
                conditions={name: float(value) for name, value in data.get("conditions", {}).items()},
            )
        except KeyError as error:
            raise ValueError(f"{path}: the profile lacks {error.args[0]!r}") from error
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path}: the profile is corrupt: {error}") from error


class ProfiledCost:
    """A CostModel that looks a profile up; off its tables it extrapolates, smoothly."""

    def __init__(self, profile: Profile) -> None:
        self.profile, self.power_limit = profile, profile.power
        self._tables: dict[tuple[StepKind, int, int], float] = {}  # a run meets few different numbers

    def seconds(self, batch: Batch) -> float:
        return self.price(work_of(batch))

    def step_time(self, batch: Batch) -> StepTime:
        return self.time_of(work_of(batch))

    def price(self, work: Work) -> float:
        """Seconds of a step with these features, when it runs alone."""
        return self.time_of(work).total

    def time_of(self, work: Work) -> StepTime:
        """Where the time of a step with these features goes."""
        profile = self.profile
        kind, size = profile.ladders.placed(work)
        before, launch, after = profile.host.seconds(kind, work)
        device = self._table(kind, size, work.draws)
        if kind is StepKind.DECODE_GRAPH:
            device += profile.attention.contexts(work)  # type: ignore[attr-defined]  # a formula, where there are graphs
        else:
            device += profile.attention.seconds(work)
        if work.blocks_moved:
            device += profile.block_move[0] + work.blocks_moved * profile.block_move[1]
        if work.blocks_copied:
            device += profile.block_copy[0] + work.blocks_copied * profile.block_copy[1]
        if profile.power is None or device <= 0.0:
            return StepTime(before, launch, device, after)
        return StepTime(before, launch, device, after, size / device, profile.power.slopes.get(kind, 0.0))

    def parts(self, work: Work) -> dict[str, float]:
        """The device's time by what it goes to: decode graph, token graph, dense, head, decode, prefill, moves."""
        profile = self.profile
        kind, size = profile.ladders.placed(work)
        attention = profile.attention
        if kind is StepKind.DECODE_GRAPH:
            decode, prefill = attention.contexts(work), 0.0  # type: ignore[attr-defined]
        else:
            decode = attention.seconds(work._replace(prefills=()))
            prefill = attention.seconds(work) - decode
        found = dict.fromkeys(PARTS, 0.0) | {"decode": decode, "prefill": prefill}
        if kind is StepKind.LAUNCHED:
            found["head"] = profile.head(work.draws) if work.draws else 0.0
            found["dense"] = self._table(kind, size, work.draws) - found["head"]
        else:
            found[kind.value] = self._table(kind, size, work.draws)
        found["moves"] = self.time_of(work).device - sum(found.values())
        return found

    def _table(self, kind: StepKind, size: int, draws: int) -> float:
        """What a step takes without attention and block moves."""
        key = (kind, size, draws)
        known = self._tables.get(key)
        if known is None:
            known = self._tables[key] = self._look_up(kind, size, draws)
        return known

    def _look_up(self, kind: StepKind, size: int, draws: int) -> float:
        profile = self.profile
        if kind is not StepKind.LAUNCHED:
            table = profile.decode_graph if kind is StepKind.DECODE_GRAPH else profile.token_graph
            assert table is not None
            return table(size)
        return (profile.dense(size) if size else 0.0) + (profile.head(draws) if draws else 0.0)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} must be true or false")
    return value


def _ladders(sizes: Any) -> Ladders:
    decode, tokens = (tuple(map(int, own)) for own in sizes)
    return Ladders(decode, tokens)


def _points(curve: Curve | None) -> list[tuple[float, float]] | None:
    return None if curve is None else curve.points


def _curve(points: Any) -> Curve | None:
    return None if points is None else Curve((x, y) for x, y in points)


def _two(values: Any) -> tuple[float, float]:
    first, second = (float(value) for value in values)
    if not (0 <= first < float("inf") and 0 <= second < float("inf")):
        raise ValueError(f"{[first, second]} must be two finite numbers >= 0")
    return first, second


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} must be a text")
    return value
