"""Products whose rows do not depend on the rows beside them, bit by bit: every product has the same number of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

ROWS_AT_ONCE = {"cpu": 32, "cuda": 256}
"""Rows of one product. A library picks its kernel, and with it the order of summation, by the shape alone."""
SPLIT_SIZE = 512
"""Keys of one split of decode attention, where that path serves every row."""


def in_tiles(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rows: int) -> torch.Tensor:
    """``product(x)`` for ``x [T, K]``, computed `rows` rows at a time, the last ones beside zeros."""
    num_rows = x.shape[0]
    if num_rows == rows:
        return product(x)
    padded = F.pad(x, (0, 0, 0, -num_rows % rows))
    pieces = [product(piece) for piece in padded.split(rows)] or [product(padded)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:num_rows]
