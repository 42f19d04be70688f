"""The engine process: takes messages, steps, sends what came out, and never waits for HTTP while there is work."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from research_engine.engine.errors import EngineError, IntegrityError, PromptTooLongError, QueueFullError, RequestError
from research_engine.engine.foreign import has_words, words_of
from research_engine.engine.overdue import overdue_calls_end
from research_engine.engine.request import Request
from research_engine.server.live_records import LiveRecords
from research_engine.server.wire import (
    Abort,
    Add,
    Delta,
    Embed,
    Embedded,
    EngineEnd,
    Failed,
    Finish,
    Progress,
    Ready,
    Refused,
    ToEngine,
    decode_sampling,
)

if TYPE_CHECKING:
    from research_engine.engine.contract import TokenLogprobs
    from research_engine.engine.token_output import TokenOutput
    from research_engine.server.engine_source import EngineParts, EngineSource

log = logging.getLogger("research_engine.server.engine")
_SNAPSHOT_SECONDS = 0.1
_FAILURES_IN_A_ROW = 3  # steps that fail one after the other before the engine gives up
_QUIET = 0.05  # seconds without work before the books are balanced
_IDLE_WAIT = 0.01  # seconds between steps in which the scheduler chose to run nobody


class _Continuation:
    """What is known of one continuation here: where its tokens go, and what waits for its end if it isn't streamed."""

    __slots__ = ("first", "index", "key", "logprobs", "request", "stream", "text")

    def __init__(self, request: Request, key: int, index: int, stream: bool) -> None:
        self.request, self.key, self.index, self.stream = request, key, index, stream
        self.first = True
        self.text: list[str] = []
        self.logprobs: list[TokenLogprobs] | None = [] if request.sampling.logprobs is not None else None


class EngineLoop:
    """Serves one connection.

    Args:
        parts: the engine and what is beside it.
        records: those that the engine writes to.
        end: the socket to the HTTP process.
    """

    def __init__(self, parts: EngineParts, records: LiveRecords, end: EngineEnd) -> None:
        self._engine = parts.engine
        self._embed, self._generates = parts.embed, parts.generates
        self._to_embed: list[Embed] = []
        self._records = records
        self._end = end
        self._groups: dict[int, tuple[str, list[str]]] = {}  # key -> id of the prompt, ids of live continuations
        self._live: dict[str, _Continuation] = {}
        self._failures = 0
        self._last_snapshot = -1.0
        self._stale = True  # requests have come or gone since the last snapshot
        self._balance_due = False  # there were steps since the books were last looked at
        self._engine.kv_cache.balances_later = True  # not in the step whose tokens somebody waits for

    def run(self) -> None:
        """Serve until the HTTP process is gone (EOFError), or until the engine cannot go on.

        Raises:
            EOFError: the other side closed the connection.
            Exception: a step failed in a way that the engine does not survive; clients have been told.
        """
        engine = self._engine
        while True:
            if not engine.has_unfinished:
                self._rest()
                continue
            self._take_all(self._end.receive(min(self._policys_wait(), _SNAPSHOT_SECONDS)))
            if engine.wake_at is not None and engine.wake_at > engine.clock.now():
                self._report([])  # a policy that waits is no engine that hangs
            elif engine.has_unfinished:
                self._balance_due = True
                self._step()

    def _policys_wait(self) -> float:
        """Seconds until the policy is to be asked again, unless something happens before that."""
        engine = self._engine
        if engine.wake_at is not None:
            return max(0.0, engine.wake_at - engine.clock.now())
        return _IDLE_WAIT if engine.idle and engine.num_steps else 0.0

    def _rest(self) -> None:
        """Without work: say so, balance the books once it has been quiet for a while, and take what comes next."""
        if self._stale:
            self._report([])
        messages = self._end.receive(_QUIET if self._balance_due else None)
        if not messages and self._balance_due:
            self._balance_due = False
            self._engine.kv_cache.balance_if_earned()
        self._take_all(messages)

    # In.

    def _take_all(self, messages: Sequence[ToEngine]) -> None:
        for message in messages:
            self._take(message)
        self._embed_waiting()

    def _take(self, message: ToEngine) -> None:
        self._stale = True
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            self._abort(message.key)
        else:
            self._to_embed.append(message)

    def _add(self, message: Add) -> None:
        if not self._generates:
            self._end.send(Refused(message.key, "request", "this model embeds and does not generate"))
            return
        age = max(0.0, time.perf_counter() - message.arrived)
        try:
            group = self._engine.add_request(
                message.request_id,
                message.prompt,
                decode_sampling(message.sampling),
                arrival_time=self._engine.clock.now() - age,
                priority=message.priority,
                client=message.client,
            )
        except QueueFullError as error:
            self._end.send(Refused(message.key, "queue", str(error)))
        except PromptTooLongError as error:
            self._end.send(Refused(message.key, "length", str(error)))
        except (RequestError, ValueError) as error:
            self._end.send(Refused(message.key, "request", str(error)))
        except EngineError as error:  # the policy failed at this arrival; the request is queued all the same
            log.error("request %s: %s", message.request_id, error)
            self._abort_in_engine(message.request_id)
            self._end.send(Refused(message.key, "engine", "the scheduler failed at this request"))
        else:
            self._groups[message.key] = (message.request_id, [request.id for request in group])
            for index, request in enumerate(group):
                self._live[request.id] = _Continuation(request, message.key, index, message.stream)

    def _abort(self, key: int) -> None:
        request_id, names = self._groups.pop(key, ("", []))
        for name in names:
            del self._live[name]
        if names:
            self._abort_in_engine(request_id)

    def _abort_in_engine(self, request_id: str) -> None:
        """It ends there, whatever the policy has to say about it."""
        try:
            self._engine.abort(request_id)
        except EngineError as error:
            log.error("aborting request %s: %s", request_id, error)

    def _embed_waiting(self) -> None:
        """Embed what has come, all at once; a prompt that is refused costs its own message alone."""
        waiting, self._to_embed = self._to_embed, []
        if waiting and not self._embed_together(waiting):
            for message in waiting:
                self._embed_together([message])

    def _embed_together(self, messages: Sequence[Embed]) -> bool:
        """Embed the prompts of messages in one call and answer; False where several failed and none was answered."""
        import numpy as np

        try:
            if self._embed is None:
                raise ValueError("this model does not embed")
            prompts = [prompt for message in messages for prompt in message.prompts]
            vectors = iter(self._embed(prompts, lambda ended: self._report([])))
        except Exception as error:
            if len(messages) > 1:
                return False
            if isinstance(error, ValueError):
                self._end.send(Refused(messages[0].key, "request", str(error)))
            else:
                log.exception("embedding failed")
                self._end.send(Refused(messages[0].key, "engine", _told(error)))
            return True
        for message in messages:
            encoded = [np.asarray(next(vectors), dtype="<f4").tobytes() for _ in message.prompts]
            self._end.send(Embedded(message.key, encoded, sum(map(len, message.prompts))))
        return True

    # Out.

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._fail(error)
        else:
            self._failures = 0
            self._report(self._deltas(outputs))

    def _deltas(self, outputs: list[TokenOutput]) -> list[Delta]:
        deltas, live = [], self._live
        for request, token_id, text, reason, logprobs in outputs:
            own = live.get(request.id)
            if own is None:
                continue
            if own.logprobs is not None and logprobs is not None:
                own.logprobs.append(logprobs)
            if own.stream:
                delta = Delta(own.key, own.index, [token_id], text)
                if own.logprobs:
                    delta.logprobs, own.logprobs = own.logprobs, []
            else:
                if text:
                    own.text.append(text)
                if reason is None:
                    continue
                delta = Delta(own.key, own.index, request.output_token_ids, "".join(own.text), own.logprobs)
            if own.first:
                own.first = False
                if request.sampling.prompt_logprobs is not None and own.index == 0:
                    delta.prompt_logprobs = list(request.prompt_logprobs)
            if reason is not None:
                delta.finish = Finish(reason, request.stop_reason, request.num_cached_tokens)
                self._forget(request.id, own.key)
            deltas.append(delta)
        return deltas

    def _forget(self, name: str, key: int) -> None:
        del self._live[name]
        names = self._groups[key][1]
        names.remove(name)
        if not names:
            del self._groups[key]

    def _report(self, deltas: list[Delta]) -> None:
        """Send what is new. Summaries of steps alone wait for a snapshot: nobody need be woken for each of them."""
        now = time.perf_counter()
        due = not self._engine.has_unfinished or now - self._last_snapshot > _SNAPSHOT_SECONDS
        if not deltas and not due:
            return
        snapshot = None
        if due:
            self._last_snapshot, self._stale = now, False
            queues = self._engine.queues  # a view would let out tokens that the next step is to hand on
            running, waiting = len(queues.running), queues.num_waiting
            snapshot = self._records.snapshot(running, waiting, self._engine.kv_cache.num_used_blocks)
        self._end.send(Progress(deltas, self._records.take_steps(), snapshot))

    def _fail(self, error: Exception) -> None:
        """A step raised: its requests are lost, the engine goes on if it can."""
        self._failures += 1
        log.error("step %d failed", self._engine.num_steps, exc_info=error)
        for key, (request_id, _) in list(self._groups.items()):
            self._abort_in_engine(request_id)  # an executor's failure has ended it already, a policy's has not
            self._end.send(Refused(key, "engine", _told(error)))
        self._groups.clear()
        self._live.clear()
        if not _survivable(error) or self._failures >= _FAILURES_IN_A_ROW:
            raise error


def _survivable(error: Exception) -> bool:
    """Memory may suffice for the next batch, a request's own numbers end with it; a lost device or books do not."""
    if isinstance(error, IntegrityError):
        return False
    return isinstance(error, (EngineError, ValueError, MemoryError)) or type(error).__name__ == "OutOfMemoryError"


def _told(error: Exception) -> str:
    """What a client learns; messages of libraries may hold paths."""
    return f"the engine failed in this step ({type(error).__name__}); the server's log says more"


def main(source: EngineSource, sock: socket.socket, log_level: int = logging.INFO) -> None:
    """The process's target. Ends with code 0 when the HTTP process is gone, 1 otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both; the HTTP process decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.basicConfig(level=log_level, format="%(levelname)s engine: %(message)s", stream=sys.stderr)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the HTTP process asks so where a step hangs
    end, records, serving = EngineEnd(sock), LiveRecords(), False
    try:
        parts = source.build(records)
        records.num_blocks = parts.engine.config.num_blocks
        gc.collect()
        gc.freeze()  # what was loaded stays; no collection need look at it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to all processes; see above
        end.send(_ready(parts))
        serving = True
        with overdue_calls_end(parts.engine):
            EngineLoop(parts, records, end).run()
    except EOFError:
        sys.exit(0)
    except Exception as error:
        mistake = not serving and isinstance(error, ValueError)  # OptionError, a scheduler's parameters, a model's name
        told = f"{error}" if has_words(error) else words_of(error)
        if not mistake:
            log.error("the engine process ends", exc_info=error)
        try:
            end.send(Failed(_told(error) if serving else told, mistake=mistake))
            end.drain()
        except (EOFError, OSError):
            pass
        sys.exit(1)


def _ready(parts: EngineParts) -> Ready:
    config, clock = parts.engine.config, parts.engine.clock
    zero = time.perf_counter() - clock.now()
    longest = config.max_model_len - (not parts.generates)  # an embedding has no room for an output token
    facts = {**asdict(config), **parts.facts, "eos_token_ids": list(config.eos_token_ids), "max_model_len": longest}
    return Ready(
        zero, os.getpid(), longest, config.vocab_size, facts, embeds=parts.embed is not None, generates=parts.generates
    )
