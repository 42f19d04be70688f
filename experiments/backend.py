"""What a trial runs on: a model with its engines. No other file here knows how an engine is put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from experiments.config import TrialSettings
from experiments.workloads.samples import Encoder
from experiments.workloads.sharegpt_lengths import ShareGPTLengths

if TYPE_CHECKING:
    from research_engine.engine.config import EngineConfig
    from research_engine.engine.engine import Engine
    from research_engine.llm import LoadedModel
    from research_engine.options import EngineOptions


SIMULATION = ("gpu", "cost_model", "force_profile", "tensor_parallel_size")
"""Settings that a simulation alone reads."""


class Backend(Protocol):
    """Makes fresh engines for settings; `kind` is what tables call its results: real or simulated."""

    @property
    def kind(self) -> str: ...

    def prepare(self, settings: TrialSettings) -> None:
        """Load what the settings need, if it is not what is loaded already."""
        ...

    def vocab_size(self) -> int: ...

    def tokenizer(self) -> Encoder | None: ...

    def bytes_per_block(self, settings: TrialSettings) -> int: ...

    def machine(self) -> str:
        """Device in words, for tables."""
        ...

    def config(self, settings: TrialSettings) -> EngineConfig:
        """Sizes and limits of an engine for these settings, without making one.

        Raises:
            ConfigError, OptionError: no engine can be made; says why.
        """
        ...

    def engine(self, settings: TrialSettings, seed: int) -> Engine: ...


class RealBackend:
    """Engines that compute, with torch and the project's kernels. Holds one model at a time, for every trial of it."""

    kind = "real"

    def __init__(self, *, progress: bool = True) -> None:
        self._progress = progress
        self._loaded: LoadedModel | None = None
        self._identity: tuple[object, ...] | None = None

    def prepare(self, settings: TrialSettings) -> None:
        """Raises LoadError or OptionError when the model cannot be had."""
        from research_engine.llm import load

        identity = model_identity(settings)
        if identity != self._identity:
            self._loaded = self._identity = None  # gives the old one's memory back first
            self._loaded = load(_options(settings), progress=self._progress)
            self._identity = identity

    def vocab_size(self) -> int:
        return self._model().config.vocab_size

    def tokenizer(self) -> Encoder | None:
        return self._model().tokenizer

    def bytes_per_block(self, settings: TrialSettings) -> int:
        model = self._model()
        return model.config.kv_bytes_per_token * settings.block_size * model.model.dtype.itemsize

    def machine(self) -> str:
        from experiments.environment import machine_name

        return machine_name(str(self._model().model.device))

    def config(self, settings: TrialSettings) -> EngineConfig:
        from research_engine.llm import engine_config

        own = self._model()
        return engine_config(_options(settings), own.config, own.model.device, own.model.dtype, own.tokenizer)

    def engine(self, settings: TrialSettings, seed: int) -> Engine:
        from research_engine.llm import build_engine

        return build_engine(_options(settings, seed), self._model())

    def _model(self) -> LoadedModel:
        assert self._loaded is not None, "prepare() comes first"
        return self._loaded


def model_identity(settings: TrialSettings) -> tuple[object, ...]:
    """Settings with the same identity run on the same loaded model."""
    simulated = (settings.executor, settings.gpu, settings.cost_model, settings.tensor_parallel_size)
    without = needs_no_tokenizer(settings)
    return (settings.model, settings.device, settings.dtype, settings.load_format, without, *simulated)


def needs_no_tokenizer(settings: TrialSettings) -> bool:
    from research_engine.loading.dummy import DUMMY_MODELS

    dummy = DUMMY_MODELS.get(settings.model)
    without = dummy is not None and not dummy.has_tokenizer
    return without or not isinstance(settings.workload.lengths, ShareGPTLengths)


def _options(settings: TrialSettings, seed: int = 0) -> EngineOptions:
    from research_engine.options import EngineOptions

    exclude = {"warmup_requests", "workload", "slo", "explain", "executor", *SIMULATION}
    own = settings.model_dump(exclude=exclude)
    return EngineOptions(**own, seed=seed, skip_tokenizer_init=needs_no_tokenizer(settings))
