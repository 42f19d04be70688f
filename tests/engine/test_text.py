"""Text of an output: stop strings over token borders, min_tokens, incomplete characters; streaming loses nothing."""

from __future__ import annotations

import codecs
import random

import pytest

from research_engine.engine.errors import RequestError
from research_engine.engine.sampling_params import SamplingParams
from research_engine.engine.text import TextAssembler
from schedulers.fcfs import FCFS

from .shadow import drain, make_engine


class Bytes:
    """A DecodeStream whose tokens are runs of bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self.decoder.decode(self.pieces[token_id])

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


def serve(pieces: list[str | bytes], **sampling):
    """Let an engine put out the pieces, one token each; returns (streamed texts, request, last output)."""
    encoded = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    engine = make_engine(
        FCFS(),
        choose=lambda request, _: min(request.num_output_tokens, len(encoded) - 1),
        decode_stream=lambda params: Bytes(encoded),
        num_blocks=120,
    )
    params = SamplingParams(**{"max_tokens": len(encoded), "ignore_eos": True, **sampling})
    (request,) = engine.add_request("r", [0], params)
    outputs = drain(engine)
    return [output.text for output in outputs], request, outputs[-1]


def test_nothing_of_a_stop_string_over_several_tokens_is_streamed():
    """S16: stop "DEFGHIJ" as DEF, G, HI, J."""
    texts, request, last = serve(["ABC", "DEF", "G", "HI", "J", "never"], stop="DEFGHIJ")
    assert texts == ["ABC", "", "", "", ""]
    assert last.finish_reason == "stop" and request.stop_reason == "DEFGHIJ"
    assert request.num_output_tokens == 5


def test_text_that_only_could_have_begun_a_stop_string_comes_out():
    """S16: DEF is held back, and let go when the next token shows that it was no stop string."""
    texts, _, last = serve(["ABC", "DEF", "GX", "DE"], stop="DEFGHIJ")
    assert texts == ["ABC", "", "DEFGX", "DE"] and last.finish_reason == "length"


def test_a_stop_string_that_begins_inside_another_candidate_is_found():
    """S16: of "ababac", the stop "abac" begins at the third character."""
    texts, *_ = serve(["ab", "ab", "ac", "x"], stop="abac")
    assert "".join(texts) == "ab"


def test_include_stop_str_keeps_the_stop_string_and_cuts_behind_it():
    texts, *_ = serve(["one", " EN", "D of it"], stop=["END"], include_stop_str_in_output=True)
    assert "".join(texts) == "one END"


def test_the_earliest_of_several_stop_strings_cuts():
    texts, request, _ = serve(["a;b\n", "c"], stop=["\n", ";"])
    assert "".join(texts) == "a" and request.stop_reason == ";"


def test_the_longest_of_the_stop_strings_at_one_place_cuts():
    texts, request, _ = serve(["one END", "x"], stop=["EN", "END"], include_stop_str_in_output=True)
    assert "".join(texts) == "one END" and request.stop_reason == "END"


def test_a_stop_string_does_not_count_before_min_tokens():
    """S17: it stands in every token, and ends the output at the 200th."""
    texts, request, last = serve(["x."] * 250, stop=".", min_tokens=200)
    assert (request.num_output_tokens, last.finish_reason) == (200, "stop")
    assert texts == ["x."] * 199 + ["x"], "a stop string that does not count is no reason to hold text back"


def test_an_incomplete_character_at_the_end_is_flushed_once():
    """S26: the output stops in the middle of an emoji."""
    emoji = "😀".encode()
    texts, request, _ = serve(["hi ", emoji[:2], emoji[2:], emoji[:3]])
    assert texts == ["hi ", "", "😀", "�"]
    assert request._text.text == "".join(texts)
    assert request._text.finish() == ""


def test_a_stop_string_completed_by_the_tail_means_stop():
    """S26 and S18: the replacement character of the incomplete one completes it, at the length limit."""
    texts, request, last = serve(["ok", "😀".encode()[:2]], stop="�")
    assert "".join(texts) == "ok" and last.finish_reason == request.finish_reason == "stop"


@pytest.mark.parametrize("keep", [False, True])
def test_the_text_of_a_stop_token_is_kept_only_when_asked_for(keep):
    texts, *_ = serve(["a", "<end>", "b"], stop_token_ids=[1], include_stop_str_in_output=keep)
    assert "".join(texts) == ("a<end>" if keep else "a")


def test_text_held_back_for_a_stop_string_comes_out_when_a_stop_token_ends_the_output():
    texts, *_ = serve(["a", "DE", "<end>"], stop="DEF", stop_token_ids=[2])
    assert texts == ["a", "", "DE"]


def test_stop_strings_without_a_tokenizer_are_refused():
    engine = make_engine(FCFS())
    with pytest.raises(RequestError, match="needs a tokenizer"):
        engine.add_request("r", [1], SamplingParams(stop="x"))
    assert not engine.has_unfinished


def test_streamed_text_is_the_text_up_to_the_first_stop_wherever_tokens_end():
    """S16, S26 as a law: random texts, stops and token borders; no holding back beyond what could begin a stop."""
    rng = random.Random(0)
    stopped = 0
    for _ in range(3000):
        whole = "".join(rng.choice("ab😀c") for _ in range(rng.randint(1, 24)))
        stop = "".join(rng.choice("ab😀") for _ in range(rng.randint(1, 4)))
        raw, pieces = whole.encode(), []
        while raw:
            size = rng.randint(1, 6)
            pieces.append(raw[:size])
            raw = raw[size:]
        assembler = TextAssembler(Bytes(pieces), (stop,))
        shown = ""
        for token_id in range(len(pieces)):
            shown += assembler.push(token_id)
            if assembler.stopped_by is not None:
                break
            known = b"".join(pieces[: token_id + 1]).decode(errors="ignore")
            assert known.startswith(shown) and len(known) - len(shown) < len(stop)
            assert stop.startswith(known[len(shown) :]), "held back without a reason"
        shown += assembler.finish()
        at = whole.find(stop)
        stopped += at >= 0
        assert shown == assembler.text == (whole if at < 0 else whole[:at])
        assert (assembler.stopped_by is not None) == (at >= 0)
    assert 500 < stopped < 2500
