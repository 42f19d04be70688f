"""Frames survive any cut, and parameters come out as they went in."""

from __future__ import annotations

import socket

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research_engine.engine.sampling_params import SamplingParams
from research_engine.engine.structured import StructuredOutputsParams
from research_engine.server.wire import (
    Abort,
    Add,
    EngineEnd,
    Progress,
    ToEngine,
    decode_sampling,
    encode_sampling,
    frame,
    frames,
)

MESSAGES = [Add(1, "a", [1, 2], b"x", True, 0.5), Abort(2), Add(3, "b", [], b"", False, 1.0, -1, "c")]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_messages_come_whole_however_the_stream_is_cut(sizes: list[int]) -> None:
    stream = b"".join(map(frame, MESSAGES))
    decoder, buffer, got, at = msgspec.msgpack.Decoder(ToEngine), bytearray(), [], 0
    while at < len(stream):
        size = sizes[at % len(sizes)]
        buffer += stream[at : at + size]
        at += size
        got += [decoder.decode(body) for body in frames(buffer)]
    assert got == MESSAGES and not buffer


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(
            n=3, temperature=0.5, top_k=4, top_p=0.5, min_p=0.1, seed=2**63, stop=["a", "b"], stop_token_ids=[1],
            min_tokens=1, max_tokens=None, logprobs=2, prompt_logprobs=1, logit_bias={3: -1.5}, ignore_eos=True,
        ),
        SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object", "properties": {"a": {}}})),
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"])),
    ],
)  # fmt: skip
def test_parameters_come_out_as_they_went_in(sampling: SamplingParams) -> None:
    assert decode_sampling(encode_sampling(sampling)) == sampling


def test_the_engine_does_not_wait_for_a_server_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end = EngineEnd(theirs)
        for _ in range(2000):  # far more than the socket holds
            end.send(Progress([], [], None))
            end.send(Progress([], [], None))
        assert end.receive(0.0) == []
        ours.sendall(frame(MESSAGES[0]))
        assert end.receive(None) == MESSAGES[:1]
        ours.close()
        with pytest.raises(EOFError):
            end.receive(None)
