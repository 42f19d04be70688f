"""The running batch as it lies on the device, and what a step sends to bring it up to date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

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
        seats: int64 [S], where each one's request sits.
        num_tokens: int64 [S], how many tokens it has, which is the draw's position.
        hidden_rows: int64 [S], of the step's [T, H] hidden states; None when the step has one token a row.
    """

    rows: Sequence[int]
    seats: torch.Tensor
    num_tokens: torch.Tensor
    hidden_rows: torch.Tensor | None = None


class DeviceBatch:
    """Block tables and last tokens by seat, and the staging of a step's integers.

    Args:
        kv_cache: [L, 2, N, Hkv, B, D].
        kv_scales: [L, 2, Hkv] of a quantised cache, or None.
        config: limits of a batch.
        query: of the shape and dtype that the largest decode step has, [max_num_seqs, Hq, D]; not read.

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
        self._decode_workspace = self._make_workspace(query)
        # three integers a token, up to five a row and two a new table entry
        news = 2 * max_num_seqs * min(self._width, config.num_blocks)
        room = 3 * max(max_num_seqs, config.max_num_batched_tokens) + 5 * (max_num_seqs + 1) + news
        self.staging = Staging(room, max_num_seqs, device)

    def _make_workspace(self, query: torch.Tensor) -> torch.Tensor | None:
        """Memory for the split partials of the largest decode step, so that a graph need not clear any of its own."""
        if self._kv_cache.device.type == "cpu":
            return None
        longest = self._width * self._block_size
        size = kernels.paged_attention_workspace(
            query, self._kv_cache[0, 0], self._tables[: self._nobody], max_query_len=1, max_seq_len=longest
        )
        return torch.zeros(max(1, size), dtype=torch.float32, device=query.device)

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
        seats, positions, _ = self._decode_parts(padded)
        return Drawing(range(len(rows)), seats[: len(rows)].long(), positions[: len(rows)].long() + 1)

    def decode_inputs(self, padded: int) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Token ids [P], positions [P] and what attention needs, by device work alone, so that a graph can hold it."""
        seats, positions, known = (part.long() for part in self._decode_parts(padded))
        size, padding = self._block_size, seats == self._nobody
        token_ids = torch.where(known == UNKNOWN_TOKEN, self._last_tokens[seats], known)
        blocks = self._tables.view(-1)[seats * self._width + positions // size]
        slots = torch.where(padding, -1, blocks.long() * size + positions % size)
        attention = AttentionMetadata(
            kv_cache=self._kv_cache,
            slot_mapping=slots,
            block_tables=self._tables[seats],
            query_start_loc=self._row_starts[: padded + 1],
            seq_lens=torch.where(padding, 0, positions + 1).int(),
            max_query_len=1,
            max_seq_len=self._width * size,
            workspace=self._decode_workspace,
            kv_scales=self._kv_scales,
        )
        return token_ids, positions, attention

    def _decode_parts(self, padded: int) -> tuple[torch.Tensor, ...]:
        return self.staging.device_inputs[: 3 * padded].view(3, padded).unbind()

    # Any other step.

    def send_mixed(
        self, rows: Sequence[ScheduledRequest], changes: SeatChanges
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, Drawing]:
        """Token ids [T], positions [T], what attention needs, and who draws."""
        size = self._block_size
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        ends = counts.cumsum()
        total = int(ends[-1])
        chunks = (row.request.token_ids[row.start : row.start + row.num_tokens] for row in rows)
        known = np.fromiter(chain.from_iterable(chunks), dtype=np.int64, count=total)
        where = np.arange(total) + np.repeat(starts + counts - ends, counts)
        of_row = np.array(changes.seats)
        drawing = [index for index, row in enumerate(rows) if row.draws]
        row_starts, lengths = np.concatenate(([0], ends)), starts + counts
        seats, positions, tokens, query_start_loc, seq_lens, seat_of_row, drawing_rows = self._send(
            [np.repeat(of_row, counts), where, known, row_starts, lengths, of_row, np.array(drawing, dtype=np.int64)],
            changes,
        )
        owner, position, token = seats.long(), positions.long(), tokens.long()
        blocks = self._tables.view(-1)[owner * self._width + position // size]
        max_seq_len = int(lengths.max())
        attention = AttentionMetadata(
            kv_cache=self._kv_cache,
            slot_mapping=blocks.long() * size + position % size,
            block_tables=self._tables[seat_of_row.long(), : -(-max_seq_len // size)],
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
            kv_scales=self._kv_scales,
        )
        at = drawing_rows.long()
        draws = Drawing(drawing, seat_of_row.long()[at], seq_lens.long()[at], query_start_loc.long()[at + 1] - 1)
        token_ids = torch.where(token == UNKNOWN_TOKEN, self._last_tokens[owner], token)
        return token_ids, position, attention, draws

    def _send(self, parts: Sequence[np.ndarray], changes: SeatChanges) -> list[torch.Tensor]:
        """Copy a step's integers over, and enter the new blocks into the tables; returns the parts on the device."""
        *views, cells, blocks = self.staging.send([*parts, changes.cells, changes.blocks])
        if changes.cells:
            self._tables.view(-1)[cells.long()] = blocks
        return views
