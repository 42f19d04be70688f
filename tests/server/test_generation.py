"""What waits for a reader is merged and bounded, and nothing of it is lost."""

from __future__ import annotations

import asyncio

import pytest

from research_engine.engine.contract import TokenLogprobs
from research_engine.options import EngineOptions
from research_engine.server import engine_client
from research_engine.server.engine_client import EngineClient, Generation, RefusedError
from research_engine.server.engine_source import EngineSource
from research_engine.server.wire import Delta, Finish


def generation(n: int = 1) -> Generation:
    made = EngineClient(EngineSource(EngineOptions("stub")))
    return Generation(made, range(5, 6), n)


def test_unread_deltas_are_merged_by_continuation_in_order() -> None:
    mine = generation(n=2)
    for token in range(100):
        mine.feed(Delta(5, token % 2, [token], chr(65 + token % 26), [TokenLogprobs(token, -1.0, 1, ())]))
    mine.feed(Delta(5, 0, [100], "!", finish=Finish("stop", None, 0)))
    deltas = asyncio.run(mine.next())
    assert len(deltas) <= 10
    for index in range(2):
        own = [delta for delta in deltas if delta.index == index]
        tokens = [token for delta in own for token in delta.token_ids]
        assert tokens == [t for t in range(100) if t % 2 == index] + ([100] if index == 0 else [])
        assert [entry.token_id for delta in own for entry in delta.logprobs or []] == list(range(index, 100, 2))
        assert sum(len(delta.text) for delta in own) == len(tokens)
    assert [delta.finish is not None for delta in deltas if delta.index == 0][-1]
    assert mine.keys == {5: 1} and not mine.has_ended


def test_a_reader_too_far_behind_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "MAX_UNREAD", 100)
    mine = generation()
    for token in range(101):
        mine.feed(Delta(5, 0, [token], "a"))
    with pytest.raises(RefusedError, match="too slowly"):
        asyncio.run(mine.next())
    assert mine.keys == {}


def test_one_that_keeps_up_never_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "MAX_UNREAD", 100)

    async def run() -> int:
        mine, taken = generation(), 0
        for token in range(1000):
            mine.feed(Delta(5, 0, [token], "a"))
            if token % 50 == 0:
                taken += sum(len(delta.token_ids) for delta in await mine.next())
        return taken

    assert asyncio.run(run()) == 951
