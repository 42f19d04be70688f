"""GGUF's block formats as float32: llama.cpp's F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K and Q6_K, vectorised over all blocks.

Every format stores runs of consecutive weights with shared scales. d and m are float16, little endian.

    Q4_0   32 weights, 18 bytes   d | 16 nibble pairs                         w = d (q - 8)
    Q4_1   32 weights, 20 bytes   d, m | 16 nibble pairs                      w = d q + m
    Q8_0   32 weights, 34 bytes   d | 32 int8                                 w = d q
    Q4_K  256 weights, 144 bytes  d, dmin | 12 bytes: 8 x (6-bit scale s, 6-bit min b) | 128 nibble pairs
                                                                              w = d s q - dmin b, s and b per 32 weights
    Q6_K  256 weights, 210 bytes  128 bytes low nibbles | 64 bytes high bit pairs | 16 int8 scales s | d
                                                                              w = d s (q - 32), s per 16 weights

A nibble pair holds weight i in its low and weight i + n/2 in its high half, n being 32 in Q4_0 and Q4_1 and 64 in Q4_K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch


class GgmlType(NamedTuple):
    """A storage format: its name, weights per block, bytes per block, and how blocks become float32."""

    name: str
    block_weights: int
    block_bytes: int
    dequantize: Callable[[np.ndarray], np.ndarray]


def _half(raw: np.ndarray) -> np.ndarray:
    """uint8 ``[n, 2]`` -> float32 ``[n, 1]``."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """uint8 ``[..., n]`` -> uint8 ``[..., 2n]``: all low halves, then all high halves."""
    return np.concatenate((raw & 15, raw >> 4), axis=-1)


def _f32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view("<f4")


def _f16(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks[:, 2:4])


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    n = len(blocks)
    d, d_min = _half(blocks[:, :2]), _half(blocks[:, 2:4])
    # 12 bytes hold two rows of eight 6-bit numbers: the first four of each in the low bits of bytes 0-3 and 4-7; the
    # last four of each as nibbles of bytes 8-11, with the top two bits of bytes 0-3 and 4-7 on top
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = d * np.concatenate((a & 63, (c & 15) | (a >> 6 << 4)), axis=-1).astype(np.float32)  # [n, 8]
    mins = d_min * np.concatenate((b & 63, (c >> 4) | (b >> 6 << 4)), axis=-1).astype(np.float32)
    q = _nibbles(blocks[:, 16:].reshape(n, 4, 32)).reshape(n, 8, 32).astype(np.float32)
    return (scales[:, :, None] * q - mins[:, :, None]).reshape(n, 256)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    n = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(n, 2, 64)).reshape(
        n, 2, 4, 32
    )  # two halves of 128 weights, four runs of 32 each
    pairs = blocks[:, 128:192].reshape(n, 2, 1, 32)
    high = pairs >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1) & 3
    q = (low | high << 4).astype(np.float32).reshape(n, 16, 16) - 32
    scales = _half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)  # [n, 16]
    return (scales[:, :, None] * q).reshape(n, 256)


GGML_TYPES = {
    0: GgmlType("F32", 1, 4, _f32),
    1: GgmlType("F16", 1, 2, _f16),
    2: GgmlType("Q4_0", 32, 18, _q4_0),
    3: GgmlType("Q4_1", 32, 20, _q4_1),
    8: GgmlType("Q8_0", 32, 34, _q8_0),
    12: GgmlType("Q4_K", 256, 144, _q4_k),
    14: GgmlType("Q6_K", 256, 210, _q6_k),
    30: GgmlType("BF16", 1, 2, _bf16),
}
"""By the number that a file gives. A tensor in any other of llama.cpp's formats is refused by name."""

_CHUNK_WEIGHTS = 1 << 22  # bounds the temporaries of a large tensor


def dequantize(raw: np.ndarray, kind: GgmlType) -> torch.Tensor:
    """Weights of consecutive blocks: uint8 ``[bytes]`` -> float32 ``[weights]``, a fresh tensor."""
    blocks = raw.reshape(-1, kind.block_bytes)
    out = torch.empty(len(blocks) * kind.block_weights, dtype=torch.float32)
    view = out.numpy().reshape(-1, kind.block_weights)
    step = max(1, _CHUNK_WEIGHTS // kind.block_weights)
    for start in range(0, len(blocks), step):
        view[start : start + step] = kind.dequantize(blocks[start : start + step])
    return out
