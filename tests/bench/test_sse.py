"""Server-sent events: the same events come out however the bytes are cut, and odd cases of the standard."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from research_engine.bench.sse import DONE, EventReader

DATA = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1).filter(
    lambda text: not text.startswith("\ufeff")
)
LINES = st.lists(DATA, min_size=1, max_size=3)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault
NOISE = st.sampled_from(["", ": a comment\n", "event: message\n", "id: 7\n", "retry: 10\n", ":\n", "data\n\n", "\n"])


def read(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


@unhurried
@given(
    events=st.lists(st.tuples(LINES, NOISE), max_size=6),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_events_are_the_same_wherever_the_stream_is_cut(events, ending, cuts):
    wanted = []
    text = ""
    for lines, noise in events:
        if noise == "data\n\n":
            wanted.append(b"")
        text += noise + "".join(f"data: {line}\n" for line in lines) + "\n"
        wanted.append("\n".join(lines).encode())
    stream = text.replace("\n", ending).encode()
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[begin:end] for begin, end in pairwise(edges)]
    reader = EventReader()
    found = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
    assert found == wanted
    assert read([bytes([byte]) for byte in stream] + [b"\n"]) == wanted


@pytest.mark.parametrize(
    ("stream", "wanted"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": ping\n\ndata: a\n\n", [b"a"]),
        (b"event: done\n\n", []),
        (b"database: a\n\n", []),
        (b"data: a\r\rdata: b\r\r\n", [b"a", b"b"]),
    ],
)
def test_the_standards_forms(stream, wanted):
    assert read([stream]) == wanted


def test_an_event_without_its_blank_line_comes_at_the_end_of_the_stream():
    reader = EventReader()
    assert reader.feed(b"data: x\n\ndata: [DONE]") == [b"x"]
    assert reader.finish() == [DONE]
    assert EventReader().finish() == []
