"""Engines that fail on demand: the first letter of a prompt says how."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from research_engine.engine.clock import MonotonicClock
from research_engine.engine.contract import Batch, EngineView, SchedulePlan, StepResult
from research_engine.engine.engine import Engine
from research_engine.options import EngineOptions
from research_engine.server.engine_source import EngineParts
from research_engine.server.live_records import LiveRecords
from research_engine.server.stub_engine import StubExecutor, parts_around, stub_parts
from schedulers.chunked_prefill import ChunkedPrefill

TOKENIZER = "research_engine.server.stub_engine:stub_tokenizer"
SLOW = ("tests.server.faulty:slow_parts", TOKENIZER)
FAULTY = ("tests.server.faulty:faulty_parts", TOKENIZER)
JUMPING = ("tests.server.faulty:jumping_parts", TOKENIZER)
EMBEDDING = ("tests.server.faulty:embedding_parts", TOKENIZER)
BROKEN = ("tests.server.faulty:broken_parts", TOKENIZER)
MISTAKEN = ("tests.server.faulty:mistaken_parts", TOKENIZER)


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class FaultyExecutor(StubExecutor):
    """Fails at prompts that begin with O (out of memory), C (CUDA), N (no numbers); K kills the process, H hangs."""

    def execute(self, batch: Batch) -> StepResult:
        for row in batch.rows:
            letter = chr(row.request.token_ids[0] % 256)
            if letter == "O":
                raise OutOfMemoryError("CUDA out of memory in /secret/path.py")
            if letter == "C":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if letter == "N":
                raise ValueError("the model's logits hold NaN")
            if letter == "K":
                os.kill(os.getpid(), signal.SIGKILL)
            if letter == "H":
                threading.Event().wait()
        return super().execute(batch)


class NeverDecides(ChunkedPrefill):
    """A policy without an end."""

    def schedule(self, view: EngineView) -> SchedulePlan:
        while True:
            with suppress(BaseException):  # not even an interruption ends it
                sum(range(10))


class WaitsForTwo(ChunkedPrefill):
    """Serves nobody while there is one request alone, and asks to be woken in an hour."""

    def schedule(self, view: EngineView) -> SchedulePlan:
        if view.num_running + view.num_waiting < 2:
            return SchedulePlan({}, wake_at=view.now + 3600.0)
        return super().schedule(view)


class JumpingClock(MonotonicClock):
    """Jumps an hour ahead every few looks, as after a machine's sleep."""

    looks = 0

    def now(self) -> float:
        self.looks += 1
        return super().now() + 3600.0 * (self.looks // 5)


def slow_parts(options: EngineOptions, records: LiveRecords) -> EngineParts:
    """20 ms a step."""
    return parts_around(StubExecutor(0.02), options, records)


def faulty_parts(options: EngineOptions, records: LiveRecords) -> EngineParts:
    return parts_around(FaultyExecutor(0.005), options, records)


def jumping_parts(options: EngineOptions, records: LiveRecords) -> EngineParts:
    usual = stub_parts(options, records).engine
    return EngineParts(Engine(usual.config, usual.scheduler, usual.executor, clock=JumpingClock(), records=records))


def embedding_parts(options: EngineOptions, records: LiveRecords) -> EngineParts:
    """Embeds as 8 numbers of length 1 made of the tokens."""

    def embed(prompts: Sequence[Sequence[int]], after_step: Callable[[int], None]) -> list[list[float]]:
        if any(len(prompt) > 100 for prompt in prompts):
            raise ValueError("input holds a text of more than 100 tokens")
        raw = [[float((sum(prompt) * (i + 1)) % 17 + 1) for i in range(8)] for prompt in prompts]
        return [[value / sum(v * v for v in row) ** 0.5 for value in row] for row in raw]

    return EngineParts(stub_parts(options, records).engine, embed)


def broken_parts(options: EngineOptions, records: LiveRecords) -> EngineParts:
    raise RuntimeError("the device is lost")


def mistaken_parts(options: EngineOptions, records: LiveRecords) -> EngineParts:
    raise ValueError("num_blocks = 3: must be more")
