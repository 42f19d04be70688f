"""How many KV blocks a request holds: as its tokens come (paged), or room for tokens to come, reserved on admission.

The three reservations are the baselines of the PagedAttention paper (Kwon et al., SOSP 2023, section 6.1), there built
on contiguous memory as in Orca. They are the same engine with another number of blocks, so nothing else differs.

    paged           what the computed tokens need
    reserve_max     max_model_len slots, whatever the request
    reserve_pow2    the prompt and the next power of two of the output's length: at most twice what is needed
    reserve_oracle  the final length
    buddy_pow2, buddy_oracle
                    the same in a buddy allocator's chunks (what the paper assumes of Orca): rounded up to a power of
                    two of slots. That free chunks may lie apart is left out. reserve_max needs none where
                    max_model_len is a power of two.

None is more than the whole cache. What is known of a request's output beforehand is `known_output_tokens`; where
reserve_pow2 knows nothing it takes the output so far. A request that outgrows its blocks, because a prediction was too
short or the output passed the power of two, gets the blocks that the same rule gives for its length then (for
reserve_pow2: doubled), and those that its tokens need when the rule gives fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from .config import EngineConfig
    from .request import Request

Reservation = Literal["paged", "reserve_max", "reserve_pow2", "reserve_oracle", "buddy_pow2", "buddy_oracle"]
RESERVATIONS: tuple[str, ...] = get_args(Reservation)
BlocksFor = Callable[["Request", int], int]


def blocks_for(config: EngineConfig) -> BlocksFor:
    """The reservation's rule: (request, tokens computed after the step) -> blocks to hold.

    It is asked on admission and whenever a request outgrows its blocks. Never fewer than the tokens need, never more
    than there are, and the more tokens the more blocks.
    """
    size, slots = config.block_size, config.num_slots
    longest = min(config.max_model_len, slots)

    def paged(request: Request, num_tokens: int) -> int:
        return -(-num_tokens // size)

    def reserve_max(request: Request, num_tokens: int) -> int:
        return -(-max(num_tokens, longest) // size)

    def reserve_pow2(request: Request, num_tokens: int) -> int:
        prompt = request.num_prompt_tokens
        output = max(known_output_tokens(request) or 0, num_tokens - prompt, 1)
        return -(-max(num_tokens, min(prompt + (1 << (output - 1).bit_length()), longest)) // size)

    def reserve_oracle(request: Request, num_tokens: int) -> int:
        output = known_output_tokens(request) or request.max_num_tokens - request.num_prompt_tokens
        final = request.num_prompt_tokens + output - 1  # the last token is never stored
        return -(-max(num_tokens, min(final, longest)) // size)

    def in_chunks(rule: BlocksFor) -> BlocksFor:
        def rounded(request: Request, num_tokens: int) -> int:
            chunk = 1 << (rule(request, num_tokens) * size - 1).bit_length()
            return min(-(-chunk // size), config.num_blocks)

        return rounded

    rules: dict[str, BlocksFor] = {
        "paged": paged, "reserve_max": reserve_max, "reserve_pow2": reserve_pow2, "reserve_oracle": reserve_oracle,
        "buddy_pow2": in_chunks(reserve_pow2), "buddy_oracle": in_chunks(reserve_oracle),
    }  # fmt: skip
    return rules[config.reservation]


def known_output_tokens(request: Request) -> int | None:
    """The output's length, as far as it is known beforehand.

    max_tokens where nothing else can end the output (ignore_eos, no stop tokens, no stop strings), as in a workload of
    forced lengths; else the predicted length, bounded by max_tokens; None without a prediction.
    """
    most = request.max_num_tokens - request.num_prompt_tokens
    if not request.stop_token_ids and not request.sampling.stop:
        return most
    return None if request.predicted_tokens is None else min(max(1, request.predicted_tokens), most)
