"""What a profile is fitted to, and its file: so that a fit can be made again without the machine."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from research_engine.calibration.designs import Design
from research_engine.calibration.serving import Served
from research_engine.simulation.cost_model import Work
from research_engine.simulation.fit import Sample
from research_engine.simulation.step_kind import Ladders
from research_engine.simulation.timeline import TimedStep

FORMAT = 1


@dataclass(frozen=True)
class Measurement:
    """Everything that was measured of one model on one machine.

    Attributes:
        model: its name; machine: as `calibration.machine.machine_facts` tells it.
        ladders: sizes of the executor's graphs.
        overlap: whether the engine that served ran ahead.
        designs_made: designs that there were; `designed` holds those that there was time for.
        designed: some samples of each design.
        moves: block moves.
        served: steps of ordinary serving, one after the other.
        conditions: `cores` and `gpu` of a profile's, as far as they are known.
    """

    model: str
    machine: Mapping[str, str]
    ladders: Ladders
    overlap: bool
    designs_made: int
    designed: Mapping[Design, Sequence[Sample]]
    moves: Sequence[Sample]
    served: Sequence[Served]
    conditions: Mapping[str, float] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it as compressed JSON."""
        data = {
            "format": FORMAT, "model": self.model, "machine": dict(self.machine), "ladders": self.ladders,
            "overlap": self.overlap, "designs_made": self.designs_made, "conditions": dict(self.conditions),
            "designed": [[design, [_listed(sample) for sample in own]] for design, own in self.designed.items()],
            "moves": [_listed(sample) for sample in self.moves],
            "served": [[step.stretch, _listed(step.sample), step.timed[1:]] for step in self.served],
        }  # fmt: skip
        path.write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))

    @classmethod
    def load(cls, path: Path) -> Measurement:
        """What `save` wrote.

        Raises:
            ValueError: it is no measurement, or of another format; names the file and what is wrong.
            OSError: it cannot be read.
        """
        try:
            data: Any = json.loads(gzip.decompress(path.read_bytes()))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}, this version reads {FORMAT}")
            served = [
                Served(stretch, sample, TimedStep(sample.work, *map(float, times)))
                for stretch, sample, times in ((at, _sample(own), times) for at, own, times in data["served"])
            ]
            return cls(
                str(data["model"]), dict(data["machine"]), Ladders(*map(tuple, data["ladders"])), bool(data["overlap"]),
                int(data["designs_made"]), {_design(own): list(map(_sample, made)) for own, made in data["designed"]},
                list(map(_sample, data["moves"])), served,
                {name: float(value) for name, value in data.get("conditions", {}).items()},
            )  # fmt: skip
        except OSError as error:
            if isinstance(error, gzip.BadGzipFile):
                raise ValueError(f"{path} holds no measurement: {error}") from error
            raise
        except (KeyError, TypeError, ValueError, EOFError, AttributeError) as error:
            raise ValueError(f"{path} holds no measurement: {error!r}") from error


def _listed(sample: Sample) -> list[Any]:
    work, *seconds = sample
    return [work, *(None if math.isnan(value) else value for value in seconds)]


def _sample(row: Sequence[Any]) -> Sample:
    work, *seconds = row
    own = Work(*work)
    own = own._replace(prefills=tuple((tokens, before) for tokens, before in own.prefills))
    return Sample(own, *(math.nan if value is None else float(value) for value in seconds))


def _design(row: Sequence[Any]) -> Design:
    part, decodes, chunks = row
    return Design(part, tuple(decodes), tuple((tokens, before, bool(draws)) for tokens, before, draws in chunks))
