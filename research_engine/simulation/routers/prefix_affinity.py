"""The replica that was sent the longest beginning of the prompt before, unless it is much busier than the others.

The cache-aware routing of SGLang (Zheng et al., NeurIPS 2024, and its router) in small: the router keeps the hash chain
of the blocks that it sent to each replica, and forgets the ones it has not met for longest. What the replicas really
hold it does not know.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from research_engine.engine.driver import Arrival
    from research_engine.simulation.cluster.replica import ReplicaView


@dataclass(kw_only=True)
class PrefixAffinity:
    """Affinity first, balance where affinity would cost too much.

    Args:
        block_size: tokens that are compared at once.
        most_blocks: blocks remembered for each replica.
        imbalance: a replica with more than this many times the mean of the tokens under way, and `slack` more, gets
            nothing for affinity's sake.
        slack: tokens.

    Raises:
        ValueError: a number is out of range.
    """

    block_size: int = 64
    most_blocks: int = 100_000
    imbalance: float = 1.5
    slack: int = 4096
    _seen: dict[int, OrderedDict[bytes, None]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.most_blocks < 1 or self.imbalance < 1 or self.slack < 0:
            raise ValueError(f"{self}: block_size, most_blocks and imbalance must be >= 1, slack >= 0")

    def route(self, arrival: Arrival, replicas: Sequence[ReplicaView]) -> int:
        chain = self._chain(arrival.prompt_token_ids)
        limit = self.imbalance * sum(r.num_tokens for r in replicas) / len(replicas) + self.slack
        chosen = min(
            (replica for replica in replicas if replica.num_tokens <= limit),
            key=lambda replica: (-self._known(replica.index, chain), replica.num_tokens, replica.index),
        ).index
        seen = self._seen.setdefault(chosen, OrderedDict())
        for digest in chain:
            seen[digest] = None
            seen.move_to_end(digest)
        while len(seen) > self.most_blocks:
            seen.popitem(last=False)
        return chosen

    def _known(self, index: int, chain: Sequence[bytes]) -> int:
        """Leading blocks that the replica was sent before."""
        seen = self._seen.get(index, OrderedDict())
        return next((at for at, digest in enumerate(chain) if digest not in seen), len(chain))

    def _chain(self, prompt: Sequence[int]) -> list[bytes]:
        chain, parent = [], b""
        for at in range(0, len(prompt) - self.block_size + 1, self.block_size):
            block = array("q", prompt[at : at + self.block_size]).tobytes()
            parent = blake2b(parent + block, digest_size=16).digest()
            chain.append(parent)
        return chain
