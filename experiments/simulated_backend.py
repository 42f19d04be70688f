"""Trials in virtual time: a model's configuration, a GPU sheet or a profile, and no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.backend import needs_no_tokenizer
from experiments.config import SIMULATED_BATCHED_TOKENS, ConfigError, TrialSettings
from experiments.workloads.samples import Encoder

if TYPE_CHECKING:
    from research_engine.engine.config import EngineConfig
    from research_engine.engine.engine import Engine
    from research_engine.models.config import ModelConfig
    from research_engine.simulation.cost_model import CostModel
    from research_engine.simulation.gpu_sheet import GpuSheet


class SimulatedBackend:
    """Engines on virtual clocks. Holds one model's configuration, sheet and cost model at a time."""

    kind = "simulated"

    def __init__(self, *, progress: bool = True) -> None:
        self._progress = progress
        self._model: ModelConfig | None = None
        self._gpu: GpuSheet | None = None
        self._cost_model: CostModel | None = None
        self._tokenizer: Encoder | None = None

    def prepare(self, settings: TrialSettings) -> None:
        """Raises LoadError when the model cannot be had, ConfigError for a wrong sheet or profile."""
        from research_engine.loading import load_config, load_tokenizer, resolve_model
        from research_engine.simulation.build import cost_model_of
        from research_engine.simulation.gpu_sheet import load_sheet
        from research_engine.simulation.profiled import ProfileMismatch

        source = resolve_model(settings.model, progress=self._progress)
        self._model = load_config(source)
        self._tokenizer = None if needs_no_tokenizer(settings) else load_tokenizer(source)
        try:
            self._gpu = None if settings.gpu is None else load_sheet(settings.gpu)
        except ValueError as error:
            raise ConfigError(f"gpu: {error}") from error
        try:
            self._cost_model = cost_model_of(
                settings.cost_model,
                model_name=settings.model,
                model=self._model,
                gpu=self._gpu,
                dtype=settings.dtype,
                block_size=settings.block_size,
                tensor_parallel=settings.tensor_parallel_size,
                force=settings.force_profile,
            )
        except ProfileMismatch as error:
            raise ConfigError(f"cost_model: {error}; force_profile takes it all the same") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"cost_model: {error}") from error

    def vocab_size(self) -> int:
        assert self._model is not None
        return self._model.vocab_size

    def tokenizer(self) -> Encoder | None:
        return self._tokenizer

    def bytes_per_block(self, settings: TrialSettings) -> int:
        from research_engine.simulation.build import bytes_per_element

        assert self._model is not None
        return self._model.kv_bytes_per_token * settings.block_size * bytes_per_element(settings.dtype)

    def machine(self) -> str:
        from research_engine.simulation.profiled import ProfiledCost
        from research_engine.simulation.roofline import RooflineCost

        if isinstance(self._cost_model, ProfiledCost):
            profile = self._cost_model.profile
            busy = f" of a busy machine ({profile.disturbance})" if profile.disturbance else ""
            return f"simulated {profile.machine.get('gpu', 'machine of an unknown name')}, profile{busy}"
        assert isinstance(self._cost_model, RooflineCost)
        several = f"{self._cost_model.num_gpus} x " if self._cost_model.num_gpus > 1 else ""
        return f"simulated {several}{self._cost_model.gpu.name}, roofline"

    def config(self, settings: TrialSettings) -> EngineConfig:
        return self._config(settings, 0)

    def engine(self, settings: TrialSettings, seed: int) -> Engine:
        import schedulers
        from research_engine.simulation.build import simulated_engine

        assert self._cost_model is not None
        scheduler = schedulers.create(settings.scheduler, **settings.scheduler_params)
        return simulated_engine(self._config(settings, seed), scheduler, self._cost_model)

    def _config(self, settings: TrialSettings, seed: int) -> EngineConfig:
        from research_engine.engine.config import EngineConfig
        from research_engine.simulation.build import bytes_per_element, kv_blocks_of
        from research_engine.simulation.profiled import ProfiledCost

        assert self._model is not None
        block_bytes = self.bytes_per_block(settings)
        budget = settings.max_num_batched_tokens or SIMULATED_BATCHED_TOKENS
        num_blocks = settings.num_blocks
        if num_blocks is None and settings.kv_cache_memory is not None:
            num_blocks = int(settings.kv_cache_memory * 2**30) // block_bytes
        if num_blocks is None:
            if self._gpu is None:
                raise ConfigError("a profile says nothing of memory: give gpu, num_blocks or kv_cache_memory with it")
            try:
                num_blocks = kv_blocks_of(
                    self._model,
                    self._gpu,
                    block_size=settings.block_size,
                    max_num_batched_tokens=budget,
                    max_num_seqs=settings.max_num_seqs,
                    gpu_memory_utilization=settings.gpu_memory_utilization,
                    bytes_per_element=bytes_per_element(settings.dtype),
                    tensor_parallel=settings.tensor_parallel_size,
                )
            except ValueError as error:
                raise ConfigError(str(error)) from error
        host_blocks = settings.num_host_blocks
        if host_blocks is None:
            host_blocks = int(settings.swap_space * 2**30) // block_bytes
        overlap = settings.overlap
        if overlap is None:
            overlap = isinstance(self._cost_model, ProfiledCost) and self._cost_model.profile.overlap
        longest = settings.max_model_len or self._model.max_position_embeddings
        num_blocks = min(num_blocks, settings.max_num_seqs * -(-longest // settings.block_size))
        return EngineConfig(
            num_blocks=num_blocks,
            block_size=settings.block_size,
            num_host_blocks=host_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=settings.max_model_len or max(2, min(longest, num_blocks * settings.block_size)),
            max_num_queued=settings.max_num_queued,
            reservation=settings.reservation,
            on_fault=settings.on_fault,
            schedule_limit=settings.schedule_limit,
            enable_prefix_caching=settings.enable_prefix_caching,
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            seed=seed,
            overlap=overlap,
        )
