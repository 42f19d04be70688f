"""The running batch as it lies on the device, and what a step sends to bring it up to date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from research_engine import kernels
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import UNKNOWN_TOKEN, ScheduledRequest
from research_engine.executors.seats import SeatChanges, Seats
from research_engine.executors.staging import Staging
from research_engine.models.attention_metadata import AttentionMetadata


@dataclass(frozen=True)
class Drawing:
    """The rows of a step that draw a token, S of them.

    Attributes:
        rows: indices into the batch, ascending.
        sitting: where each one's request sits.
    """

    rows: Sequence[int]
    sitting: Sequence[int]


class Inputs(NamedTuple):
    """A step on the device.

    Attributes:
        token_ids, positions: int64 [T].
        attention: what attention needs.
        seats: int64 [S], of the rows that draw.
        num_tokens: int64 [S], how many tokens each has.
        hidden_rows: int64 [S], of the step's hidden states [T, H]; None when every row has one token, and draws.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    seats: torch.Tensor
    num_tokens: torch.Tensor
    hidden_rows: torch.Tensor | None = None


class DeviceBatch:
    """Block tables and last tokens by seat, and the staging of a step's integers.

    Args:
        kv_cache: [L, 2, N, Hkv, B, D].
        kv_scales: [L, 2, Hkv] of a quantised cache, or None.
        config: limits of a batch.
        query: of the shape and dtype that the largest step in a graph has, [T, Hq, D]; not read.

    Attributes:
        staging: the copies to and from the device.
    """

    def __init__(
        self, kv_cache: torch.Tensor, kv_scales: torch.Tensor | None, config: EngineConfig, query: torch.Tensor
    ) -> None:
        device, max_num_seqs = kv_cache.device, config.max_num_seqs
        self._kv_cache, self._kv_scales, self._block_size = kv_cache, kv_scales, config.block_size
        self._width = -(-config.max_model_len // config.block_size)
        self._nobody = max_num_seqs  # the seat of padding rows
        self._seats = Seats(max_num_seqs, self._width)
        self._tables = torch.zeros((max_num_seqs + 1, self._width), dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._row_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._workspace = self._make_workspace(query)
        # three integers a token, up to five a row and two a new table entry
        news = 2 * max_num_seqs * min(self._width, config.num_blocks)
        room = 3 * max(max_num_seqs, config.max_num_batched_tokens) + 5 * (max_num_seqs + 1) + news
        self.staging = Staging(room, max_num_seqs, device)

    def _make_workspace(self, query: torch.Tensor) -> torch.Tensor | None:
        """Memory for the split partials of the largest step in a graph, so that it need not clear any of its own."""
        if self._kv_cache.device.type == "cpu":
            return None
        size = kernels.paged_attention_workspace(
            query, self._kv_cache[0, 0], self._tables[: self._nobody], max_query_len=len(query),
            max_seq_len=self._width * self._block_size,
        )  # fmt: skip
        return torch.zeros(max(1, size), dtype=torch.float32, device=query.device)

    def shutdown(self) -> None:
        """Mutates: lets go of the cache and of what lies beside it on the device; no step can follow."""
        self._kv_cache, self._kv_scales, self._workspace = self._kv_cache.new_empty(0), None, None
        self._tables = self._tables.new_empty(0)

    def seat(self, rows: Sequence[ScheduledRequest]) -> SeatChanges:
        """Mutates: gives the rows' requests their seats."""
        return self._seats.update(rows)

    def store(self, token_ids: torch.Tensor, seats: torch.Tensor) -> None:
        """Mutates: drawn tokens int64 [S] become the last ones of their seats."""
        self._last_tokens[seats] = token_ids

    # Steps of one token a row, all of which draw.

    def send_decode(self, rows: Sequence[ScheduledRequest], changes: SeatChanges, padded: int) -> Drawing:
        """Bring the device up to date for `decode_inputs(padded)`."""
        padding = padded - len(rows)
        inputs = np.empty((3, padded), dtype=np.int32)
        inputs[0] = changes.seats + [self._nobody] * padding
        inputs[1] = [row[1] for row in rows] + [0] * padding
        inputs[2] = [row[0]._tokens[-1] for row in rows] + [0] * padding
        self._send([inputs.reshape(-1)], changes)
        return Drawing(range(len(rows)), changes.seats)

    def decode_inputs(self, padded: int) -> Inputs:
        """A step of P rows, by device work alone, so that a graph can hold it."""
        parts = self.staging.device_inputs[: 3 * padded].view(3, padded).unbind()
        seats, positions, known = (part.long() for part in parts)
        nobody, num_tokens = seats == self._nobody, positions + 1
        attention = self._attention(
            self._slots(seats, positions, nobody), seats, self._row_starts[: padded + 1],
            torch.where(nobody, 0, num_tokens).int(), max_query_len=1,
        )  # fmt: skip
        return Inputs(self._tokens(seats, known), positions, attention, seats, num_tokens)

    # Any other step.

    def send_padded(self, rows: Sequence[ScheduledRequest], changes: SeatChanges, padded: int) -> Drawing:
        """Bring the device up to date for `padded_inputs(padded)`."""
        batch = _Ragged.of(rows, changes)
        self._send(batch.parts(tokens=padded, rows=self._nobody, nobody=self._nobody), changes)
        return batch.drawn(changes)

    def padded_inputs(self, padded: int) -> Inputs:
        """A step of T tokens of up to max_num_seqs rows, which draw in front, by device work alone."""
        most = self._nobody
        sizes = [padded, padded, padded, most + 1, most, most, most]
        parts = self.staging.device_inputs[: sum(sizes)].split(sizes)
        return self._ragged_inputs(parts, max_query_len=padded)

    def send_mixed(self, rows: Sequence[ScheduledRequest], changes: SeatChanges) -> tuple[Drawing, Inputs]:
        """Bring the device up to date for a step that runs as it is."""
        batch = _Ragged.of(rows, changes)
        parts = self._send(batch.parts(tokens=batch.num_tokens, rows=len(rows), nobody=self._nobody), changes)
        parts[-1] = parts[-1][: len(batch.drawing)]
        return batch.drawn(changes), self._ragged_inputs(
            parts, max_query_len=int(batch.counts.max()), max_seq_len=int(batch.lengths.max())
        )

    def _ragged_inputs(
        self, parts: Sequence[torch.Tensor], *, max_query_len: int, max_seq_len: int | None = None
    ) -> Inputs:
        """From the parts of `_Ragged.parts`, on the device."""
        owners, positions, known, row_starts, lengths, seats, drawing = (part.long() for part in parts)
        attention = self._attention(
            self._slots(owners, positions, owners == self._nobody), seats, parts[3], parts[4],
            max_query_len=max_query_len, max_seq_len=max_seq_len,
        )  # fmt: skip
        last = (row_starts[drawing + 1] - 1).clamp(min=0)  # a graph is captured before any row is there
        return Inputs(self._tokens(owners, known), positions, attention, seats[drawing], lengths[drawing], last)

    # What these are made of.

    def _tokens(self, seats: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Token ids, those from the last draw where the host does not know them yet."""
        return torch.where(known == UNKNOWN_TOKEN, self._last_tokens[seats], known)

    def _slots(self, seats: torch.Tensor, positions: torch.Tensor, nobody: torch.Tensor) -> torch.Tensor:
        """Where each token's KV goes; -1 for padding."""
        size = self._block_size
        blocks = self._tables.view(-1)[seats * self._width + positions // size]
        slots = blocks.long() * size + positions % size
        return torch.where(nobody, -1, slots)

    def _attention(
        self,
        slots: torch.Tensor,
        seats: torch.Tensor,
        row_starts: torch.Tensor,
        lengths: torch.Tensor,
        *,
        max_query_len: int,
        max_seq_len: int | None = None,
    ) -> AttentionMetadata:
        """Metadata of rows that sit in `seats`; without max_seq_len for any lengths, in the memory set aside."""
        columns = self._width if max_seq_len is None else -(-max_seq_len // self._block_size)
        return AttentionMetadata(
            kv_cache=self._kv_cache,
            slot_mapping=slots,
            block_tables=self._tables[seats, :columns],
            query_start_loc=row_starts,
            seq_lens=lengths,
            max_query_len=max_query_len,
            max_seq_len=self._width * self._block_size if max_seq_len is None else max_seq_len,
            workspace=self._workspace if max_seq_len is None else None,
            kv_scales=self._kv_scales,
        )

    def _send(self, parts: Sequence[np.ndarray], changes: SeatChanges) -> list[torch.Tensor]:
        """Copy a step's integers over, and enter the new blocks into the tables; returns the parts on the device."""
        *views, cells, blocks = self.staging.send([*parts, changes.cells, changes.blocks])
        if changes.cells:
            self._tables.view(-1)[cells.long()] = blocks
        return views


@dataclass(frozen=True)
class _Ragged:
    """A step of rows of any number of tokens, on the host: T tokens of R rows."""

    seats: np.ndarray  # [R]
    counts: np.ndarray  # [R]
    row_starts: np.ndarray  # [R + 1]
    lengths: np.ndarray  # [R], with this step's tokens
    tokens: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    num_tokens: int
    drawing: list[int]

    @classmethod
    def of(cls, rows: Sequence[ScheduledRequest], changes: SeatChanges) -> _Ragged:
        starts = np.array([row[1] for row in rows], dtype=np.int64)
        counts = np.array([row[2] for row in rows], dtype=np.int64)
        ends = counts.cumsum()
        total = int(ends[-1])
        chunks = (row[0]._tokens[row[1] : row[1] + row[2]] for row in rows)
        return cls(
            seats=np.array(changes.seats),
            counts=counts,
            row_starts=np.concatenate(([0], ends)),
            lengths=starts + counts,
            tokens=np.fromiter(chain.from_iterable(chunks), dtype=np.int64, count=total),
            positions=np.arange(total) + np.repeat(starts + counts - ends, counts),
            num_tokens=total,
            drawing=[index for index, row in enumerate(rows) if row[3]],
        )

    def parts(self, *, tokens: int, rows: int, nobody: int) -> list[np.ndarray]:
        """What is sent, padded: of tokens owner, position and id; of rows starts, lengths, seats; which rows draw."""
        more, empty = tokens - self.num_tokens, rows - len(self.seats)
        drawing = np.array(self.drawing, dtype=np.int64)
        return [
            _extended(np.repeat(self.seats, self.counts), more, nobody), _extended(self.positions, more),
            _extended(self.tokens, more), _extended(self.row_starts, empty, self.num_tokens),
            _extended(self.lengths, empty), _extended(self.seats, empty, nobody),
            _extended(drawing, rows - len(drawing)),
        ]  # fmt: skip

    def drawn(self, changes: SeatChanges) -> Drawing:
        return Drawing(self.drawing, [changes.seats[index] for index in self.drawing])


def _extended(array: np.ndarray, count: int, value: int = 0) -> np.ndarray:
    return np.concatenate((array, np.full(count, value, dtype=array.dtype))) if count else array
