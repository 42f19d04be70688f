"""A backend that computes nothing: virtual time, so that every trial is the same on any machine and takes no time."""

from __future__ import annotations

from experiments.config import TrialSettings
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Batch, StepResult
from research_engine.engine.engine import Engine


class VirtualClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, when: float) -> None:
        self.time = max(self.time, when)


class StubExecutor:
    """Every step takes 10 ms and 1 ms a token; every drawn token is 7."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def execute(self, batch: Batch) -> StepResult:
        self.clock.time += 0.01 + 0.001 * batch.num_tokens
        return StepResult([7 if row.draws else -1 for row in batch.rows])

    def shutdown(self) -> None:
        pass


class StubBackend:
    """`fail_at`: raise KeyboardInterrupt when that many engines were made."""

    kind = "simulated"

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.engines = 0
        self.interrupt_at = interrupt_at

    def prepare(self, settings: TrialSettings) -> None:
        pass

    def vocab_size(self) -> int:
        return 100

    def tokenizer(self) -> None:
        return None

    def bytes_per_block(self, settings: TrialSettings) -> int:
        return 1024

    def machine(self) -> str:
        return "virtual machine"

    def engine(self, settings: TrialSettings, seed: int) -> Engine:
        import schedulers

        self.engines += 1
        clock = VirtualClock()
        executor = StubExecutor(clock)
        if self.engines == self.interrupt_at:
            executor.execute = self._interrupt  # type: ignore[method-assign]
        scheduler = schedulers.create(settings.scheduler, **settings.scheduler_params)
        return Engine(self.config(settings), scheduler, executor, clock=clock)

    def config(self, settings: TrialSettings) -> EngineConfig:
        return EngineConfig(
            num_blocks=settings.num_blocks or 64, block_size=settings.block_size, max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens or 256, max_model_len=settings.max_model_len or 1024,
            max_num_queued=settings.max_num_queued, reservation=settings.reservation, check_integrity=True,
        )  # fmt: skip

    def _interrupt(self, batch: Batch) -> StepResult:
        raise KeyboardInterrupt
