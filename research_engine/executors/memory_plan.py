"""Where a device's memory goes: weights, what a step needs, what others hold, and the KV cache that is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from research_engine.executors.kv_sizing import activation_bytes

if TYPE_CHECKING:
    import torch

    from research_engine.models.config import ModelConfig

GIB = 2**30
CONTEXT_BYTES = 600 * 2**20  # of a CUDA context with its libraries' handles, on an H200 with CUDA 13
REMEDIES = (
    "end other processes on the device",
    "raise gpu_memory_utilization",
    "lower max_model_len",
    "lower max_num_batched_tokens or max_num_seqs",
    "take a smaller kv_cache_dtype or quantised weights",
    "take a smaller model or a larger GPU",
)


class NoRoomError(ValueError):
    """The memory holds no useful cache; the message has the numbers, the length that fits, and what to try in order."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device, and what follows from them.

    Attributes:
        total: of the device.
        utilization: share of it that may be used, others' part included.
        weights: of the model.
        activations: what the largest step takes beside weights and cache.
        other: what the context, libraries, graphs and other processes hold.
        kv_bytes_per_token: keys and values of one token over all layers.
        block_size: token slots per block.
        max_model_len: tokens of one request that the cache has to hold at least once; None for whatever fits.
    """

    total: int
    utilization: float
    weights: int
    activations: int
    other: int
    kv_bytes_per_token: int
    block_size: int
    max_model_len: int | None = None

    @property
    def room(self) -> int:
        """Bytes left for the KV cache, 0 if there are none."""
        return max(0, int(self.total * self.utilization) - self.weights - self.activations - self.other)

    @property
    def num_blocks(self) -> int:
        return self.room // (self.kv_bytes_per_token * self.block_size)

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds, which is the longest request that fits, too."""
        return self.num_blocks * self.block_size

    def concurrency(self, max_model_len: int) -> float:
        """Requests of that length that fit at once."""
        blocks = -(-max_model_len // self.block_size)
        return self.num_blocks / blocks

    def check(self) -> None:
        """Raises NoRoomError: the cache cannot hold one request of max_model_len, or no block at all."""
        needed = self.max_model_len or 1
        if self.num_tokens >= needed:
            return
        gib = f"{self.total / GIB:.2f} GiB x gpu_memory_utilization {self.utilization:g}"
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts().items())
        wish = f"one request of max_model_len = {needed} takes {self.request_bytes(needed) / GIB:.2f} GiB of KV cache"
        fits = f"at most {self.num_tokens} tokens fit" if self.num_tokens else "no block fits"
        if self.weights + self.other > self.total:
            advice = "The weights alone are too large: take quantised ones, a smaller model or a larger GPU"
        else:
            advice = "Try, in this order: " + "; ".join(f"({at}) {what}" for at, what in enumerate(REMEDIES, 1))
        raise NoRoomError(f"{wish}, {fits}. Of {gib}: {parts} GiB. {advice}")

    def request_bytes(self, num_tokens: int) -> int:
        """Bytes of the blocks of one request."""
        return -(-num_tokens // self.block_size) * self.block_size * self.kv_bytes_per_token

    def parts(self) -> dict[str, int]:
        """What the memory goes to, in bytes; their sum is `total`."""
        used = {
            "weights": self.weights,
            "activations": self.activations,
            "context, graphs and others": self.other,
            "KV cache": self.room,
        }
        return used | {"left alone": max(0, self.total - sum(used.values()))}


def plan_from_config(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    total: int,
    utilization: float,
    kv_element_bytes: int,
    block_size: int,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> MemoryPlan:
    """The plan that config.json and a device's size give, without a device; a start-up measures instead.

    Args:
        total: bytes of the device's memory.
        kv_element_bytes: of one number in the cache.
        others: as in MemoryPlan and EngineConfig.
    """
    return MemoryPlan(
        total=total,
        utilization=utilization,
        weights=config.num_parameters * dtype.itemsize,
        activations=activation_bytes(config, dtype, max_num_batched_tokens, max_num_seqs),
        other=CONTEXT_BYTES,
        kv_bytes_per_token=config.kv_bytes_per_token * kv_element_bytes,
        block_size=block_size,
        max_model_len=max_model_len,
    )
