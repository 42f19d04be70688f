"""A KV store without tensors, the oracle of tests: each slot remembers the token prefix that wrote it.

`ShadowExecutor` carries a batch out on that store. It fails the test the moment a row would read a slot that holds
anything but its own prefix, and draws each token as a function of the whole prefix and the request's seed alone:
whatever the schedule was, a request's output must equal `alone(...)`, which needs no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import UNKNOWN_TOKEN, Batch, Request, Scheduler, StepResult
from research_engine.engine.decision_log import DecisionLog
from research_engine.engine.engine import Engine
from research_engine.engine.sampling_params import SamplingParams
from research_engine.engine.token_output import TokenOutput

VOCABULARY = 50


def extend(fingerprint: int, token_id: int) -> int:
    """Fingerprint of a prefix from that of the prefix one shorter; 0 is the empty one's."""
    return hash((fingerprint, token_id))


def draw(fingerprint: int, seed: int) -> int:
    """The next token: a function of all tokens before it and of the seed."""
    return hash((fingerprint, seed, "draw")) % VOCABULARY


def alone(
    prompt: Sequence[int],
    *,
    seed: int,
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
) -> tuple[list[int], str]:
    """Output tokens and finish reason of a request that has the machine to itself."""
    fingerprint = 0
    for token_id in prompt:
        fingerprint = extend(fingerprint, token_id)
    output: list[int] = []
    while True:
        output.append(draw(fingerprint, seed))
        fingerprint = extend(fingerprint, output[-1])
        if output[-1] in stop_ids and len(output) >= min_tokens:
            return output, "stop"
        if len(output) == max_tokens:
            return output, "length"


class ShadowExecutor:
    """Executes batches on fingerprints and checks every promise that the engine makes to an executor.

    Args:
        config: sizes of the store.
        choose: draws a token from (request, fingerprint of its tokens); the module's `draw` by default.
    """

    def __init__(self, config: EngineConfig, choose: Callable[[Request, int], int] | None = None) -> None:
        self.size = config.block_size
        self.device: list[list[int | None]] = [[None] * self.size for _ in range(config.num_blocks)]
        self.host: list[list[int | None]] = [[None] * self.size for _ in range(config.num_host_blocks)]
        self.choose = choose or (lambda request, fingerprint: draw(fingerprint, request.seed))
        self.batches: list[Batch] = []
        self.before: Callable[[Batch], None] | None = None  # called on entry, with the step in flight
        self._drawn: dict[Request, int] = {}  # each one's last token, which an engine that runs ahead leaves out
        self._prefixes: dict[Request, list[int]] = {}
        self._tables: dict[Request, list[int]] = {}

    def execute(self, batch: Batch) -> StepResult:
        if self.before is not None:
            self.before(batch)
        self.batches.append(batch)
        self._move(batch)
        for request, count in batch.received:
            for at, prefix in enumerate(self._prefix(request)[:count]):
                self.device[request.block_ids[at // self.size]][at % self.size] = prefix
        written: set[int] = set()
        tokens: list[int] = []
        for row in batch.rows:
            request, start, num_tokens, draws, changed = row
            prefixes = self._prefix(request)
            table = request.block_ids
            if request.is_finished:  # aborted in flight: its blocks are gone, its row is computed for nothing
                tokens.append(-1)
                continue
            assert num_tokens >= 1 and start + num_tokens <= request.num_tokens
            assert draws == (start + num_tokens == request.num_tokens)
            assert list(table[:changed]) == self._tables.get(request, [])[:changed], f"{request!r}: stale table entries"
            for at in range(start):
                found = self.device[table[at // self.size]][at % self.size]
                assert found == prefixes[at], f"{request!r} would read a foreign slot at position {at}"
            for at in range(start, start + num_tokens):
                block, offset = table[at // self.size], at % self.size
                assert block * self.size + offset not in written, f"{request!r}: slot written twice in one step"
                written.add(block * self.size + offset)
                self.device[block][offset] = prefixes[at]
            self._tables[request] = list(table)
            tokens.append(self.choose(request, prefixes[-1]) if draws else -1)
            self._drawn[request] = tokens[-1]
        assert sum(row.num_tokens for row in batch.rows) == batch.num_tokens
        return StepResult(tokens)

    def shutdown(self) -> None:
        self.device.clear()

    def _move(self, batch: Batch) -> None:
        for moves in (batch.swap_out, batch.swap_in, batch.copies):
            targets = [to for _, to in moves]
            assert len(set(targets)) == len(targets), "one block is the target of two moves"
        assert not {a for a, _ in batch.copies} & {b for _, b in batch.copies}, "copies depend on each other's order"
        for source, target in batch.swap_out:
            self.host[target] = list(self.device[source])
        for source, target in batch.swap_in:
            self.device[target] = list(self.host[source])
        for source, target in batch.copies:
            self.device[target] = list(self.device[source])

    def _prefix(self, request: Request) -> list[int]:
        prefixes = self._prefixes.setdefault(request, [])
        for token_id in request.token_ids[len(prefixes) :]:
            token_id = self._drawn[request] if token_id == UNKNOWN_TOKEN else token_id
            prefixes.append(extend(prefixes[-1] if prefixes else 0, token_id))
        return prefixes


class ManualClock:
    """Time that moves when a test says so, and by `tick` at every reading."""

    def __init__(self, tick: float = 0.0) -> None:
        self.time = 0.0
        self.tick = tick

    def now(self) -> float:
        self.time += self.tick
        return self.time

    def sleep_until(self, when: float) -> None:
        self.time = max(self.time, when)


def make_engine(
    scheduler: Scheduler,
    *,
    choose: Callable[[Request, int], int] | None = None,
    decode_stream: Any = None,
    clock: ManualClock | None = None,
    decisions: DecisionLog | None = None,
    **sizes: Any,
) -> Engine:
    """An engine on a shadow store that balances its books after every step. Small unless `sizes` say otherwise."""
    defaults: dict[str, Any] = {
        "num_blocks": 16, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256,
        "check_integrity": True, "stall_limit": 50,
    }  # fmt: skip
    config = EngineConfig(**{**defaults, **sizes})
    return Engine(
        config,
        scheduler,
        ShadowExecutor(config, choose),
        clock=clock or ManualClock(),
        decode_stream=decode_stream,
        decisions=decisions,
    )


def drain(engine: Engine, *, most: int = 2000) -> list[TokenOutput]:
    """Step until nothing is unfinished; returns all outputs in order."""
    outputs: list[TokenOutput] = []
    for _ in range(most):
        if not engine.has_unfinished:
            return outputs
        outputs += engine.step()
    raise AssertionError(f"{engine.num_unfinished} requests unfinished after {most} steps")


def assert_empty(engine: Engine) -> None:
    """Nothing is held any more, on the device or on the host."""
    cache = engine.kv_cache
    cache.check_integrity([])
    assert (cache.num_used_blocks, cache.num_running, cache.slots_stored) == (0, 0, 0)
    assert cache.num_free_blocks == engine.config.num_blocks
    assert cache.num_free_host_blocks == engine.config.num_host_blocks


def expected(request: Request) -> tuple[list[int], str]:
    """What a finished or live request must produce in the end, by `alone`."""
    return alone(
        request.prompt_token_ids,
        seed=request.seed,
        max_tokens=request.max_num_tokens - request.num_prompt_tokens,
        stop_ids=request.stop_token_ids,
        min_tokens=request.sampling.min_tokens,
    )


def greedy(max_tokens: int = 4, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=others.pop("ignore_eos", True), **others)
