"""Turns tokens into text as they come, at a cost per token that does not grow with the text.

Two families of decoders cover the models served: byte-level BPE (GPT-2, Llama 3, SmolLM2, Qwen), where a token is a run
of bytes, and SentencePiece with byte fallback (Llama 2, Mistral), where it is text with U+2581 for a space, or a byte.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any, Protocol

import tokenizers

from research_engine.loading.errors import LoadError


class DecodeStream(Protocol):
    """One text being decoded. What ``push`` and ``finish`` return adds up to the text of all tokens."""

    def push(self, token_id: int) -> str:
        """Text that this token made final; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is left at the end: an incomplete character as U+FFFD. A second call returns nothing."""
        ...


def _byte_alphabet() -> list[str]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTE_TO_CHAR = _byte_alphabet()
"""Byte value -> the character that stands for it in a byte-level vocabulary."""
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


class _Pieces:
    """A vocabulary as ids -> pieces, shared by the streams of one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.bytes_of: dict[int, bytes] = {}  # byte-level only, filled on use

    def piece(self, token_id: int) -> str | None:
        """None beyond the vocabulary."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def byte_run(self, token_id: int) -> bytes:
        """A byte-level token's bytes. An added token that is not spelled in the alphabet stands for its own text."""
        run = self.bytes_of.get(token_id)
        if run is None:
            piece = self.piece(token_id) or ""
            try:
                run = bytes(CHAR_TO_BYTE[char] for char in piece)
            except KeyError:
                run = piece.encode()
            self.bytes_of[token_id] = run
        return run


class ByteLevelStream:
    """Bytes of the tokens, one after the other, as UTF-8; what is not UTF-8 becomes U+FFFD."""

    def __init__(self, pieces: _Pieces, skip_special_tokens: bool) -> None:
        self._pieces = pieces
        self._skipped = pieces.special if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """See DecodeStream."""
        return "" if token_id in self._skipped else self._decoder.decode(self._pieces.byte_run(token_id))

    def finish(self) -> str:
        """See DecodeStream."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class SentencePieceStream:
    """Pieces with U+2581 for spaces. A run of byte tokens is final when it ends: it becomes text if all of it is UTF-8,
    and one U+FFFD a byte otherwise. ``strip`` spaces are taken off the beginning of the text."""

    def __init__(self, pieces: _Pieces, skip_special_tokens: bool, strip: int) -> None:
        self._pieces = pieces
        self._skipped = pieces.special if skip_special_tokens else frozenset()
        self._strip = strip
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        """See DecodeStream."""
        piece = None if token_id in self._skipped else self._pieces.piece(token_id)
        if piece is None:
            return ""
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
            self._run.append(int(piece[3:5], 16))
            return ""
        return self._stripped(self._end_run() + piece.replace("▁", " "))

    def finish(self) -> str:
        """See DecodeStream."""
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text, self._strip = text[1:], self._strip - 1
        return text


def token_bytes_of(backend: tokenizers.Tokenizer) -> Callable[[int], bytes]:
    """What each token stands for, as bytes; nothing beyond the vocabulary."""
    pieces = _Pieces(backend)
    if backend.decoder is not None and json.loads(backend.decoder.__getstate__())["type"] == "ByteLevel":
        return pieces.byte_run

    def sentencepiece(token_id: int) -> bytes:
        piece = pieces.piece(token_id) or ""
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()

    return sentencepiece


def decode_stream_factory(backend: tokenizers.Tokenizer) -> Callable[[bool], DecodeStream]:
    """The stream that equals this tokenizer's own decoder; the argument is ``skip_special_tokens``.

    Raises:
        LoadError: the decoder is of neither family.
    """
    pieces = _Pieces(backend)
    decoder: dict[str, Any] = (
        json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    )
    if decoder["type"] == "ByteLevel":
        return lambda skip: ByteLevelStream(pieces, skip)
    steps = decoder.get("decoders", [])
    kinds = [step["type"] for step in steps]
    if (
        kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
        and steps[0]["pattern"] == {"String": "▁"}
        and steps[0]["content"] == " "
    ):
        if len(steps) == 3:
            return lambda skip: SentencePieceStream(pieces, skip, 0)
        if kinds[3:] == ["Strip"] and steps[3]["content"] == " " and steps[3]["stop"] == 0:
            return lambda skip: SentencePieceStream(pieces, skip, steps[3]["start"])
    raise LoadError(
        f"the tokenizer's decoder {decoder['type']} {kinds or ''} is not supported; supported: ByteLevel, and "
        "Replace, ByteFallback, Fuse, Strip in this order"
    )
