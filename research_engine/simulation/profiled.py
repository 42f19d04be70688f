"""Step time from measurements: a profile is a JSON file that says what was measured, on what, and how well it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from research_engine.engine.contract import Batch

from .attention_cost import AttentionCost, attention_from_json
from .cost_model import Work, work_of
from .curve import Curve

FORMAT = 2


class ProfileMismatch(ValueError):
    """A profile of another model, GPU or version than the one asked for; names the difference."""


@dataclass(frozen=True)
class Profile:
    """Everything that was measured of one model on one machine.

    Args:
        model: its name.
        machine: gpu, driver, dtype, libraries and kernels by name -> version; what is unknown is left out.
        dense: tokens of a step -> seconds of everything but attention, head and host.
        head: rows drawn -> seconds of logits and sampling; may hold zeros alone where `dense` includes them.
        attention: of all layers.
        host: (a, b): a + b rows seconds a step that the device does not hide.
        block_move: (latency, seconds a block) of swapping blocks in a step; block_copy: of copying them on the device.
        held_out: error on steps it was not made from: steps, mape and bias (mean signed), shares of the step time;
            empty where nothing was held out.
        parts: the same for each part of the measurement, by name.
        origin: how it was made, in words.
    """

    model: str
    machine: Mapping[str, str]
    dense: Curve
    head: Curve
    attention: AttentionCost
    host: tuple[float, float] = (0.0, 0.0)
    block_move: tuple[float, float] = (0.0, 0.0)
    block_copy: tuple[float, float] = (0.0, 0.0)
    held_out: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    origin: str = ""

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

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        data = {
            "format": FORMAT, "model": self.model, "machine": dict(self.machine), "origin": self.origin,
            "held_out": dict(self.held_out), "parts": {name: dict(error) for name, error in self.parts.items()},
            "host": self.host, "block_move": self.block_move, "block_copy": self.block_copy,
            "dense": self.dense.points, "head": self.head.points, "attention": self.attention.as_json(),
        }  # fmt: skip
        path.write_text(json.dumps(data) + "\n", encoding="utf-8")

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
                host=_two(data["host"]),
                block_move=_two(data["block_move"]),
                block_copy=_two(data["block_copy"]),
                held_out={name: float(value) for name, value in data["held_out"].items()},
                parts={part: {n: float(v) for n, v in error.items()} for part, error in data["parts"].items()},
                origin=_text(data["origin"]),
            )
        except KeyError as error:
            raise ValueError(f"{path}: the profile lacks {error.args[0]!r}") from error
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path}: the profile is corrupt: {error}") from error


class ProfiledCost:
    """A CostModel that looks a profile up; off its tables it extrapolates, smoothly."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._dense: dict[int, float] = {0: 0.0}  # a run meets few different numbers
        self._head: dict[int, float] = {0: 0.0}

    def seconds(self, batch: Batch) -> float:
        return self.price(work_of(batch))

    def host_seconds(self, batch: Batch) -> float:
        """What of it the host takes."""
        a, b = self.profile.host
        return a + b * len(batch.rows)

    def price(self, work: Work) -> float:
        """Seconds of a step with these features."""
        profile = self.profile
        dense = self._dense.get(work.tokens)
        if dense is None:
            dense = self._dense[work.tokens] = profile.dense(work.tokens)
        head = self._head.get(work.draws)
        if head is None:
            head = self._head[work.draws] = profile.head(work.draws)
        seconds = dense + head + profile.attention.seconds(work) + profile.host[0] + profile.host[1] * work.sequences
        if work.blocks_moved:
            seconds += profile.block_move[0] + work.blocks_moved * profile.block_move[1]
        if work.blocks_copied:
            seconds += profile.block_copy[0] + work.blocks_copied * profile.block_copy[1]
        return seconds

    def parts(self, work: Work) -> tuple[float, float, float, float]:
        """Seconds of a step's dense work, head, decode attention and prefill attention; block moves count as dense."""
        decode = self.profile.attention.seconds(work._replace(prefills=()))
        prefill = self.profile.attention.seconds(work) - decode
        head = self.profile.head(work.draws) if work.draws else 0.0
        host = self.profile.host[0] + self.profile.host[1] * work.sequences
        return self.price(work) - host - head - decode - prefill, head, decode, prefill


def _two(values: Any) -> tuple[float, float]:
    first, second = (float(value) for value in values)
    if not (0 <= first < float("inf") and 0 <= second < float("inf")):
        raise ValueError(f"{[first, second]} must be two finite numbers >= 0")
    return first, second


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} must be a text")
    return value
