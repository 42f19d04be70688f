"""One sequence: its tokens, how many of them are computed, and the blocks that hold them.

A request has no phase. `num_computed_tokens` chases `num_tokens`: prefill, chunk, decode, prefix hit and recompute are
the same thing with other numbers. Schedulers read properties, none of which can be assigned or changed in place; the
engine package alone writes the underscored fields.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .read_only import ReadOnlyList, read_only
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .contract import TokenLogprobs
    from .structured import TokenConstraint
    from .text import TextAssembler


class Status(enum.Enum):
    WAITING = "waiting"  # holds no device blocks; new, or preempted by recompute
    SWAPPED = "swapped"  # waits with its KV in host blocks
    RUNNING = "running"  # holds device blocks
    FINISHED = "finished"


UNKNOWN_TOKEN = -1  # the place of a token that is drawn but has not come back from the device
RUNNING = Status.RUNNING  # as a global it is read faster than as a member, and this is read for every sequence and step


class Request:
    """One continuation of one prompt.

    Args:
        request_id: unique among the live requests.
        prompt_token_ids: at least one token id.
        sampling: with n == 1; `Engine.add_request` makes n requests of one with n > 1.
        arrival_time: scheduled arrival, in the clock's seconds; every latency counts from it.
        max_tokens: output tokens at most, already bounded by the model's length.
        stop_token_ids: end-of-sequence and stop ids together.
        priority: smaller is more urgent.
        client: whom fairness is counted by.
        deadline: clock seconds by which the request wants to be done, or None.
        predicted_tokens: a length predictor's guess of the output length, or None.
        group_id: the id as the user gave it, which all n continuations share; request_id when None.
        sibling: the request with the same prompt whose blocks this one may share (n > 1), or None.
        text: turns its tokens into text, or None.
        constraint: what its output must look like, or None.
        index: position in the order of all requests ever added; breaks ties of arrival time.
        arriving: leading tokens whose KV was computed elsewhere and comes with the request.
    """

    __slots__ = (
        "_admitted_time", "_arrival_time", "_arriving", "_block_ids", "_cached_tokens", "_client", "_computed",
        "_constraint", "_deadline", "_digests", "_finish_reason", "_finish_time", "_first_scheduled_time",
        "_first_token_time", "_group_id", "_host_block_ids", "_id", "_index", "_last_token_time", "_length_limit",
        "_num_prompt", "_peak_computed", "_predicted_tokens", "_preemptions", "_priority", "_prompt_logprobs",
        "_published", "_recomputed", "_sampling", "_seed", "_sibling", "_status", "_stop_ids", "_text", "_token_ids",
        "_tokens",
    )  # fmt: skip

    id: str = read_only("_id")
    index: int = read_only("_index")
    group_id: str = read_only("_group_id")
    sampling: SamplingParams = read_only("_sampling")
    arrival_time: float = read_only("_arrival_time")
    seed: int = read_only("_seed")
    priority: int = read_only("_priority")
    client: str = read_only("_client")
    deadline: float | None = read_only("_deadline")
    predicted_tokens: int | None = read_only("_predicted_tokens")
    sibling: Request | None = read_only("_sibling")
    constraint: TokenConstraint | None = read_only("_constraint")

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        arrival_time: float,
        max_tokens: int,
        seed: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
        predicted_tokens: int | None = None,
        group_id: str | None = None,
        sibling: Request | None = None,
        text: TextAssembler | None = None,
        constraint: TokenConstraint | None = None,
        index: int = 0,
        arriving: int = 0,
    ) -> None:
        self._id = request_id
        self._index = index
        self._group_id = request_id if group_id is None else group_id
        self._sampling = sampling
        self._arrival_time = arrival_time
        self._seed = seed
        self._priority = priority
        self._client = client
        self._deadline = deadline
        self._predicted_tokens = predicted_tokens
        self._sibling = sibling
        self._tokens: list[int] = list(prompt_token_ids)
        self._token_ids = ReadOnlyList(self._tokens)
        self._num_prompt = len(self._tokens)
        self._length_limit = self._num_prompt + max_tokens
        self._stop_ids = stop_token_ids
        self._text = text
        self._constraint = constraint
        self._status = Status.WAITING
        self._computed = 0
        self._arriving = arriving  # until it is admitted
        self._peak_computed = 0  # most tokens ever computed: what lies below it is recompute
        self._recomputed = 0
        self._cached_tokens = 0
        self._preemptions = 0
        self._block_ids: list[int] = []
        self._host_block_ids: list[int] = []
        self._digests: list[bytes] = []  # hash chain over the full blocks of _tokens, extended when asked for
        self._published = 0  # leading blocks known to the prefix cache
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._admitted_time: float | None = None
        self._first_scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None
        self._finish_time: float | None = None
        self._finish_reason: str | None = None

    # What schedulers and executors read.

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far, one that is under way from the device included."""
        return len(self._tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self._tokens) - self._num_prompt

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the cache (on the device or, when swapped, on the host)."""
        return self._computed

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens known and not yet computed; 1 for a request that decodes. A prefix hit may lower it on admission."""
        return len(self._tokens) - self._computed

    @property
    def max_num_tokens(self) -> int:
        """Prompt tokens plus the most output tokens it may have."""
        return self._length_limit

    @property
    def is_decoding(self) -> bool:
        """Its prompt is computed and one token is due."""
        num_tokens = len(self._tokens)
        return self._computed == num_tokens - 1 and num_tokens > self._num_prompt

    @property
    def status(self) -> Status:
        return self._status

    @property
    def is_running(self) -> bool:
        return self._status is RUNNING

    @property
    def is_swapped(self) -> bool:
        return self._status is Status.SWAPPED

    @property
    def is_finished(self) -> bool:
        return self._status is Status.FINISHED

    @property
    def num_preemptions(self) -> int:
        return self._preemptions

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first admission found in the prefix cache."""
        return self._cached_tokens

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed more than once because of preemption."""
        return self._recomputed

    @property
    def num_blocks(self) -> int:
        """Device blocks held."""
        return len(self._block_ids)

    @property
    def block_ids(self) -> Sequence[int]:
        """Its block table."""
        return ReadOnlyList(self._block_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output tokens. The last is UNKNOWN_TOKEN while it is under way."""
        return self._token_ids

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._tokens[: self._num_prompt]

    @property
    def output_token_ids(self) -> list[int]:
        return self._tokens[self._num_prompt :]

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end it: its own stop ids and, unless ignore_eos is set, the model's end tokens."""
        return self._stop_ids

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Entries of the prompt tokens but the first, as far as computed; empty unless its sampling asks for them."""
        return ReadOnlyList(self._prompt_logprobs)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the stop token id of its own that ended it; None for an end token or another reason."""
        if self._text is not None and self._text.stopped_by is not None:
            return self._text.stopped_by
        last = self._tokens[-1]
        return last if self._finish_reason == "stop" and last in self.sampling.stop_token_ids else None

    @property
    def admitted_time(self) -> float | None:
        """When it last went from waiting to running."""
        return self._admitted_time

    @property
    def first_scheduled_time(self) -> float | None:
        return self._first_scheduled_time

    @property
    def first_token_time(self) -> float | None:
        return self._first_token_time

    @property
    def last_token_time(self) -> float | None:
        return self._last_token_time

    @property
    def finish_time(self) -> float | None:
        return self._finish_time

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: "stop", "length", "abort" or "error"; final once finish_time is set."""
        return self._finish_reason

    def __repr__(self) -> str:
        return f"Request({self._id!r}, {self._status.value}, {self._computed}/{len(self._tokens)} tokens computed)"
