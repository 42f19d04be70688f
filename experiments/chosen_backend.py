"""Runs each trial on what its settings ask for, a real executor or a simulated one, so that both fit in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.backend import Backend, RealBackend
from experiments.config import TrialSettings
from experiments.simulated_backend import SimulatedBackend
from experiments.workloads.samples import Encoder

if TYPE_CHECKING:
    from research_engine.engine.config import EngineConfig
    from research_engine.engine.engine import Engine


class ChosenBackend:
    """Hands everything to the backend that was prepared last; `prepare` chooses it."""

    def __init__(self, *, progress: bool = True) -> None:
        self._progress = progress
        self._backends: dict[str, Backend] = {}
        self._current: Backend | None = None

    @property
    def kind(self) -> str:
        return self._chosen().kind

    def prepare(self, settings: TrialSettings) -> None:
        """Raises what the chosen backend raises."""
        make = SimulatedBackend if settings.executor == "simulated" else RealBackend
        if settings.executor not in self._backends:
            self._backends[settings.executor] = make(progress=self._progress)
        self._current = self._backends[settings.executor]
        self._current.prepare(settings)

    def vocab_size(self) -> int:
        return self._chosen().vocab_size()

    def tokenizer(self) -> Encoder | None:
        return self._chosen().tokenizer()

    def bytes_per_block(self, settings: TrialSettings) -> int:
        return self._chosen().bytes_per_block(settings)

    def machine(self) -> str:
        return self._chosen().machine()

    def config(self, settings: TrialSettings) -> EngineConfig:
        return self._chosen().config(settings)

    def engine(self, settings: TrialSettings, seed: int) -> Engine:
        return self._chosen().engine(settings, seed)

    def _chosen(self) -> Backend:
        assert self._current is not None, "prepare() comes first"
        return self._current
