"""Block tables of running requests as one int32 array, kept from step to step, so that a step writes what changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from research_engine.engine.contract import ScheduledRequest


class BlockTables:
    """One row a request, found by its id; grows in both directions as needed.

    A request that no step has named since others needed its row loses it and is written anew when it returns.
    """

    def __init__(self) -> None:
        self._table = np.zeros((8, 64), dtype=np.int32)
        self._row_of: dict[str, int] = {}
        self._length = [0] * 8  # entries of each row that are up to date
        self._free = list(range(7, -1, -1))

    def update(self, rows: Sequence[ScheduledRequest]) -> NDArray[np.intp]:
        """Mutates: brings the rows' requests up to date; returns where each one's table is."""
        row_of, length = self._row_of, self._length
        where = []
        for request, _, _, _, changed in rows:
            at = row_of.get(request.id)
            if at is None:
                at = self._claim(request.id, rows)
                length = self._length
            blocks = request.block_ids
            known = length[at]
            if changed < known:
                known = changed
            if known < len(blocks):
                if len(blocks) > self._table.shape[1]:
                    self._widen(len(blocks))
                if known + 1 == len(blocks):
                    self._table[at, known] = blocks[known]
                else:
                    self._table[at, known : len(blocks)] = blocks[known:]
                length[at] = len(blocks)
            where.append(at)
        return np.array(where, dtype=np.intp)

    def take(self, where: NDArray[np.intp], num_blocks: int) -> NDArray[np.int32]:
        """Tables of the rows `where`, `num_blocks` columns: a copy, int32 [R, num_blocks]."""
        return self._table[where, :num_blocks]

    def blocks_at(self, where: NDArray[np.intp], index: NDArray[np.int64]) -> NDArray[np.int32]:
        """Entry `index[i]` of the table in row `where[i]`."""
        return self._table[where, index]

    def _claim(self, request_id: str, rows: Sequence[ScheduledRequest]) -> int:
        if not self._free:
            batch = {row.request.id for row in rows}
            for gone in [name for name in self._row_of if name not in batch]:
                self._free.append(self._row_of.pop(gone))
        if not self._free:
            have = len(self._table)
            self._table = np.concatenate((self._table, np.zeros_like(self._table)))
            self._length = self._length + [0] * have
            self._free = list(range(2 * have - 1, have - 1, -1))
        at = self._free.pop()
        self._row_of[request_id] = at
        self._length[at] = 0
        return at

    def _widen(self, least: int) -> None:
        wider = np.zeros((len(self._table), max(least, 2 * self._table.shape[1])), dtype=np.int32)
        wider[:, : self._table.shape[1]] = self._table
        self._table = wider
