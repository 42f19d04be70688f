"""Integers of 4 and 8 bits as checkpoints pack them into int32 words: AWQ's, GPTQ's and compressed-tensors' orders.

    format          tensor                                   a word holds                      in its bits, low to high
    AWQ (gemm)      qweight [K, N / 8], qzeros [G, N / 8]    8 neighbours along N              columns 0 2 4 6 1 3 5 7
    GPTQ            qweight [K / E, N]                       E = 32 / bits along K             in order
                    qzeros [G, N / E]                        E neighbours along N              in order, less 1 in v1
    pack-quantized  weight_packed [N, K / E]                 E neighbours along K              in order
                    weight_zero_point [N / E, G]             E neighbours along N              in order

(Lin et al., 2306.00978; Frantar et al., 2210.17323.)
"""

from __future__ import annotations

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 words -> uint8, each word's elements along ``dim``, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    elements = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.dim() - dim - 1))) & ((1 << bits) - 1)
    return elements.to(torch.uint8).flatten(dim, dim + 1)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """int32 ``[R, N / 8]`` -> uint8 ``[R, N]``."""
    elements = unpack(words, 4, 1).view(words.shape[0], -1, 8)
    columns = torch.empty_like(elements)
    columns[:, :, list(AWQ_ORDER)] = elements
    return columns.flatten(1)
