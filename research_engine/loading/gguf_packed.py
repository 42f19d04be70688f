"""GGUF's Q4_0, Q4_1 and Q8_0 matrices as they are, instead of dequantised: elements, scales and offsets taken apart."""

from __future__ import annotations

import numpy as np
import torch

from research_engine.layers.quantized import QuantizedTensor

BLOCK = 32  # weights that share a scale
PACKABLE = ("Q4_0", "Q4_1", "Q8_0")


def quantized_blocks(raw: np.ndarray, kind: str, rows: int) -> QuantizedTensor:
    """A matrix of ``rows`` rows of consecutive blocks, uint8 ``[bytes]``, see `dequantize` for their layouts.

    Its scales are float16, as they are stored, and so are Q4_1's offsets: d (q - 0) + m.
    """
    half = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}[kind]  # bytes before the elements
    blocks = torch.from_numpy(np.array(raw.reshape(rows, -1, half + (32 if kind == "Q8_0" else 16))))  # a copy
    halves = blocks[:, :, :half].contiguous().view(torch.float16)  # [rows, G, 1 or 2]
    scales, elements = halves[:, :, 0].T.contiguous(), blocks[:, :, half:]
    if kind == "Q8_0":
        return QuantizedTensor("int8", (elements ^ 0x80).reshape(rows, -1), scales)  # signed, so 128 more
    values = torch.cat((elements & 15, elements >> 4), dim=-1).reshape(rows, -1)
    if kind == "Q4_0":
        return QuantizedTensor("int4", values, scales)
    return QuantizedTensor(
        "int4", values, scales, torch.zeros_like(scales, dtype=torch.uint8), halves[:, :, 1].T.contiguous()
    )
