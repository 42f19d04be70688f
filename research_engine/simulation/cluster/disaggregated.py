"""Prefill on some replicas, decode on others, and the KV cache sent from the ones to the others.

Zhong et al., "DistServe", OSDI 2024; Patel et al., "Splitwise", ISCA 2024. A request is two requests of unchanged
engines. On a prefill replica it has max_tokens = 1. When its token is out, the KV of its prompt is sent; once it is
there the request arrives on a decode replica with prompt + first token as its prompt and the KV of all but the last of
them (`computed_tokens`), and goes on from its second token. Whoever waits for memory there waits as any arrival does.

Not modelled: a prefill replica gives a request's blocks back when its token is out, not when its KV is sent; and no
transfer begins before the prefill has ended, so sending layer by layer would be faster than this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from research_engine.engine.driver import Arrival
from research_engine.engine.engine import Engine
from research_engine.engine.records import RequestRecord
from research_engine.engine.token_output import TokenOutput
from research_engine.simulation.routers import Router

from .cluster import Cluster
from .events import ARRIVES
from .replica import Replica


@dataclass(frozen=True)
class KVLink:
    """What KV is sent over. Each prefill replica sends one request's KV after the other.

    Args:
        bytes_per_token: of all layers, keys and values; `ModelConfig.kv_bytes_per_token` x bytes an element.
        bandwidth: bytes a second out of one replica.
        latency: seconds a transfer takes on top.

    Raises:
        ValueError: a number is out of range.
    """

    bytes_per_token: float
    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_token > 0 and self.bandwidth > 0 and self.latency >= 0):
            raise ValueError(f"{self}: bytes_per_token and bandwidth must be > 0, latency >= 0")

    def seconds(self, num_tokens: int) -> float:
        """That the KV of so many tokens is on its way, once it is its turn."""
        return self.latency + num_tokens * self.bytes_per_token / self.bandwidth


class Disaggregated(Cluster):
    """A cluster whose first replicas prefill and whose others decode.

    Args:
        prefill, decode: engines, each on a VirtualClock of its own.
        router, decode_router: choose the replica for either half.
        link: what KV is sent over.

    Raises:
        ValueError: one of the two kinds has no engine, or two are on one clock.
    """

    def __init__(
        self, prefill: Sequence[Engine], decode: Sequence[Engine], router: Router, decode_router: Router, link: KVLink
    ) -> None:
        if not prefill or not decode:
            raise ValueError(f"{len(prefill)} prefill and {len(decode)} decode engines: each needs at least one")
        super().__init__([*prefill, *decode], router)
        self._prefill, self._decode = self.replicas[: len(prefill)], self.replicas[len(prefill) :]
        self.decode_router, self.link = decode_router, link
        self._whole: dict[str, Arrival] = {}  # as they arrived, until their prefill has ended
        self._link_free = [0.0] * len(prefill)
        self._sent, self._sent_tokens, self._sending_seconds = 0, 0, 0.0

    def _arrived(self, arrival: Arrival) -> None:
        self._whole[arrival.request_id] = arrival
        one_token = replace(arrival, sampling=replace(arrival.sampling, max_tokens=1))
        self._send(one_token, self.router, self._prefill)

    def _ended(self, replica: Replica, output: TokenOutput) -> None:
        request = output.request
        arrival = self._whole.pop(request.id, None)
        if arrival is None or output.finish_reason != "length":
            return
        room = replica.engine.config.max_model_len - request.num_prompt_tokens
        wanted = arrival.sampling.max_tokens or room
        if wanted <= 1:
            return
        rest = replace(
            arrival,
            prompt_token_ids=list(request.token_ids),
            sampling=replace(arrival.sampling, max_tokens=wanted - 1),
            computed_tokens=request.num_prompt_tokens,
        )
        now, sender = self.events.now, replica.view.index
        there = max(now, self._link_free[sender]) + self.link.seconds(request.num_prompt_tokens)
        self._link_free[sender] = there
        self._sent += 1
        self._sent_tokens += request.num_prompt_tokens
        self._sending_seconds += there - now
        self.events.at(there, ARRIVES, lambda: self._send(rest, self.decode_router, self._decode))

    def _requests(self) -> list[RequestRecord]:
        """Both halves of every request as one record."""
        second = {record.request_id: record for replica in self._decode for record in replica.engine.records.requests}
        whole = []
        for replica in self._prefill:
            for record in replica.engine.records.requests:
                rest = second.get(record.request_id)
                if rest is not None:
                    record = replace(
                        record,
                        last_token_time=rest.last_token_time or record.last_token_time,
                        finish_time=rest.finish_time,
                        finish_reason=rest.finish_reason,
                        output_tokens=record.output_tokens + rest.output_tokens,
                        max_tokens=record.max_tokens + rest.max_tokens,
                        recomputed_tokens=record.recomputed_tokens + rest.recomputed_tokens,
                        preemptions=record.preemptions + rest.preemptions,
                    )
                whole.append(record)
        return sorted(whole, key=lambda record: float("inf") if record.finish_time is None else record.finish_time)

    def _transfers(self) -> dict[str, float]:
        mean = self._sending_seconds / self._sent if self._sent else 0.0
        return {"count": self._sent, "bytes": self._sent_tokens * self.link.bytes_per_token, "mean_seconds": mean}
