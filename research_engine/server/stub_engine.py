"""An engine whose executor computes nothing: every cost that is left is the server's, for benchmarks and fault tests.

Tokens are those of the byte tokenizer and spell the alphabet over and over, by position: a text of the right length
and order was served whole.
"""

from __future__ import annotations

import time

import schedulers
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Batch, Executor, StepResult, TokenLogprobs
from research_engine.engine.engine import Engine
from research_engine.loading.tokenizer import Tokenizer, byte_tokenizer
from research_engine.options import EngineOptions
from research_engine.server.engine_source import EngineParts
from research_engine.server.live_records import LiveRecords


class StubExecutor:
    """Draws the letter of each position.

    Args:
        step_seconds: how long a step takes.
    """

    def __init__(self, step_seconds: float = 0.0) -> None:
        self._step_seconds = step_seconds

    def execute(self, batch: Batch) -> StepResult:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        tokens = [ord("a") + (row.request.num_output_tokens % 26) for row in batch.rows]
        wanting = [i for i, row in enumerate(batch.rows) if row.draws and row.request.sampling.logprobs is not None]
        return StepResult(tokens, {i: TokenLogprobs(tokens[i], -0.5, 1, ((tokens[i], -0.5),)) for i in wanting})

    def shutdown(self) -> None:
        pass


def stub_parts(options: EngineOptions, records: LiveRecords) -> EngineParts:
    """An engine around a StubExecutor; sizes of the options hold where they are set."""
    return parts_around(StubExecutor(), options, records)


def parts_around(executor: Executor, options: EngineOptions, records: LiveRecords) -> EngineParts:
    """An engine with the byte tokenizer around any executor."""
    tokenizer = byte_tokenizer()
    config = EngineConfig(
        num_blocks=options.num_blocks or 4096,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or 8192,
        max_model_len=options.max_model_len or 8192,
        max_num_queued=options.max_num_queued,
        enable_prefix_caching=options.enable_prefix_caching,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        check_integrity=options.check_integrity,
    )
    scheduler = schedulers.create(options.scheduler, **options.scheduler_params)
    stream = lambda sampling: tokenizer.decode_stream(sampling.skip_special_tokens)  # noqa: E731
    return EngineParts(Engine(config, scheduler, executor, records=records, decode_stream=stream))


def stub_tokenizer(options: EngineOptions) -> Tokenizer:
    """The byte tokenizer, whatever the model's name."""
    return byte_tokenizer()
