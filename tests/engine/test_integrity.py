"""Books of the KV cache that do not add up are noticed, whichever of them is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import schedulers
from research_engine.engine.engine import Engine
from research_engine.engine.errors import IntegrityError
from research_engine.engine.kv_cache import KVCache
from research_engine.engine.sampling_params import SamplingParams
from tests.engine.shadow import drain, make_engine


@pytest.fixture
def engine() -> Engine:
    """Used, shared, evictable, published and free blocks: one request ended, two that begin alike run."""
    made = make_engine(schedulers.create("chunked_prefill"), num_blocks=40, num_host_blocks=4, check_integrity=False)
    made.add_request("ended", list(range(100, 120)), SamplingParams(max_tokens=2))
    drain(made)
    for name in ("a", "b"):
        made.add_request(name, list(range(10, 33)), SamplingParams(max_tokens=50, ignore_eos=True))
        made.step()
    cache = made.kv_cache
    assert cache.num_used_blocks and cache.num_cached_blocks and cache._free and cache._extra_refs
    cache.check_integrity(made.queues.live.values())
    return made


def used(cache: KVCache) -> int:
    return next(block for block, count in enumerate(cache._refs) if count)


def too_few_holders(cache: KVCache) -> None:
    cache._refs[used(cache)] += 1


def a_reference_to_a_free_block(cache: KVCache) -> None:
    cache._refs[cache._free[0]] = 1


def a_used_block_without_reference(cache: KVCache) -> None:
    cache._refs[used(cache)] = 0


def a_block_that_is_lost(cache: KVCache) -> None:
    cache._free.pop()


def a_block_that_is_free_twice(cache: KVCache) -> None:
    cache._free[0] = cache._free[1]


def a_block_that_does_not_exist(cache: KVCache) -> None:
    cache._free[0] = cache.num_blocks


def a_block_of_negative_number(cache: KVCache) -> None:
    cache._free[0] = -1


def a_used_block_that_is_free(cache: KVCache) -> None:
    cache._free.append(used(cache))


def a_host_block_that_is_lost(cache: KVCache) -> None:
    cache._free_host.pop()


def a_digest_of_two_blocks(cache: KVCache) -> None:
    one, other = list(cache._block_of)[:2]
    cache._block_of[one] = cache._block_of[other]


def a_digest_that_is_not_found(cache: KVCache) -> None:
    cache._block_of.popitem()


def a_free_block_that_is_published(cache: KVCache) -> None:
    cache._digest_of[cache._free[0]] = b"new"
    cache._block_of[b"new"] = cache._free[0]


def an_evictable_block_that_is_not_published(cache: KVCache) -> None:
    block = next(iter(cache._evictable))
    del cache._block_of[cache._digest_of[block]]  # type: ignore[arg-type]  # it is published
    cache._digest_of[block] = None


def a_count_of_running_requests(cache: KVCache) -> None:
    cache.num_running += 1


def a_count_of_shared_references(cache: KVCache) -> None:
    cache._extra_refs -= 1


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (too_few_holders, "reference count"),
        (a_reference_to_a_free_block, "reference count"),
        (a_used_block_without_reference, "reference count"),
        (a_block_that_is_lost, "do not add up"),
        (a_block_that_is_free_twice, "do not add up"),
        (a_block_that_does_not_exist, "do not add up"),
        (a_block_of_negative_number, "do not add up"),
        (a_used_block_that_is_free, "do not add up"),
        (a_host_block_that_is_lost, "host blocks"),
        (a_digest_of_two_blocks, "one to one"),
        (a_digest_that_is_not_found, "one to one"),
        (a_free_block_that_is_published, "must be unpublished"),
        (an_evictable_block_that_is_not_published, "evictable ones published"),
        (a_count_of_running_requests, "the books say"),
        (a_count_of_shared_references, "the books say"),
    ],
)
def test_a_book_that_is_wrong_is_noticed(engine: Engine, breaks: Callable[[KVCache], None], says: str) -> None:
    breaks(engine.kv_cache)
    with pytest.raises(IntegrityError, match=says):
        engine.kv_cache.check_integrity(engine.queues.live.values())


@pytest.mark.parametrize("number", [-1, 40])
def test_a_request_that_holds_a_block_that_does_not_exist_is_noticed(engine: Engine, number: int) -> None:
    next(iter(engine.queues.live.values()))._block_ids[-1] = number
    with pytest.raises(IntegrityError, match="reference count"):
        engine.kv_cache.check_integrity(engine.queues.live.values())


@pytest.mark.parametrize("later", [False, True])
def test_an_idle_engines_books_are_balanced_by_its_last_step_or_when_that_is_asked_for(later: bool) -> None:
    made = make_engine(schedulers.create("fcfs"), num_blocks=8, num_host_blocks=1, check_integrity=False)
    made.kv_cache.balances_later = later
    made.add_request("a", [1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    a_host_block_that_is_lost(made.kv_cache)
    if not later:
        with pytest.raises(IntegrityError, match="host blocks"):
            drain(made)
        return
    drain(made)
    with pytest.raises(IntegrityError, match="host blocks"):
        made.kv_cache.balance_if_earned()
