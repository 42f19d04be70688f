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

FORMAT = 1


class ProfileMismatch(ValueError):
    """A profile of another model, GPU or version than the one asked for; names the difference."""


@dataclass(frozen=True)
class Profile:
    """Everything that was measured of one model on one machine.

    Args:
        model: its name.
        machine: gpu, driver, libraries and kernels by name -> version; what is unknown is left out.
        dense: tokens of a step -> seconds of everything but attention, head and host.
        head: rows drawn -> seconds of logits and sampling; may hold zeros alone where `dense` includes them.
        attention: of all layers.
        host: (a, b): a + b rows seconds a step that the device does not hide.
        block_move: seconds for one swapped block; block_copy: for one block copied on the device.
        held_out: error on steps it was not made from: steps, mape and bias (mean signed), shares of the step time;
            empty where nothing was held out.
        origin: how it was made, in words.
    """

    model: str
    machine: Mapping[str, str]
    dense: Curve
    head: Curve
    attention: AttentionCost
    host: tuple[float, float] = (0.0, 0.0)
    block_move: float = 0.0
    block_copy: float = 0.0
    held_out: Mapping[str, float] = field(default_factory=dict)
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
            "held_out": dict(self.held_out), "host": list(self.host), "block_move": self.block_move,
            "block_copy": self.block_copy, "dense": self.dense.points, "head": self.head.points,
            "attention": self.attention.as_json(),
        }  # fmt: skip
        path.write_text(json.dumps(data) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read what `save` wrote.

        Raises:
            ValueError: it is no profile, or of another format; says what is wrong.
            OSError: it cannot be read.
        """
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data.get("format") != FORMAT:
            raise ValueError(f"{path}: format {data.get('format')!r}, this version reads {FORMAT}")
        try:
            return cls(
                model=data["model"],
                machine=data["machine"],
                dense=Curve((x, y) for x, y in data["dense"]),
                head=Curve((x, y) for x, y in data["head"]),
                attention=attention_from_json(data["attention"]),
                host=(data["host"][0], data["host"][1]),
                block_move=data["block_move"],
                block_copy=data["block_copy"],
                held_out=data["held_out"],
                origin=data["origin"],
            )
        except KeyError as error:
            raise ValueError(f"{path}: the profile lacks {error.args[0]!r}") from error


class ProfiledCost:
    """A CostModel that looks a profile up; off its tables it extrapolates, smoothly."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._dense: dict[int, float] = {}  # a run meets few different numbers
        self._head: dict[int, float] = {0: 0.0}

    def seconds(self, batch: Batch) -> float:
        return self.price(work_of(batch))

    def price(self, work: Work) -> float:
        """Seconds of a step with these features."""
        profile = self.profile
        dense = self._dense.get(work.tokens)
        if dense is None:
            dense = self._dense[work.tokens] = profile.dense(work.tokens) if work.tokens else 0.0
        head = self._head.get(work.draws)
        if head is None:
            head = self._head[work.draws] = profile.head(work.draws)
        moves = work.blocks_moved * profile.block_move + work.blocks_copied * profile.block_copy
        host = profile.host[0] + profile.host[1] * work.sequences
        return dense + head + profile.attention.seconds(work) + moves + host
