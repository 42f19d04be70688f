"""Prompts of an exact number of tokens, as text that a tokenizer takes apart again as it was put together."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

_LOOKED_AT = 6000  # tokens of the vocabulary that are tried as words
_ENOUGH = 64
_TRIES = 8


class TokenizerLike(Protocol):
    """What is needed of a tokenizer (`research_engine.loading.tokenizer.Tokenizer`)."""

    vocab_size: int

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """An independent random stream by name: another way to draw lengths leaves the arrivals as they were."""
    key = tuple(zlib.crc32(str(name).encode()) for name in names)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


class PromptMaker:
    """Makes random prompts.

    Words are tokens that stay themselves when text is taken apart (" word": a space is where tokenizers split), so
    their number is that of the prompt's tokens. Without a tokenizer a prompt is token ids below 256, which every model
    has, or (`as_text`) letters, whose number of tokens only the server knows.

    Args:
        tokenizer: of the model, or None.
        seed: of the choice of words.
        as_text: the endpoint takes no token ids.
    """

    def __init__(self, tokenizer: TokenizerLike | None, seed: int, *, as_text: bool) -> None:
        self._tokenizer, self._as_text = tokenizer, as_text
        self._added = 0
        self._words: list[str] = []
        if tokenizer is not None:
            self._added = len(tokenizer.encode(""))
            self._words = _stable_words(tokenizer, stream(seed, "words"))
        elif as_text:
            self._words = [f" {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]

    def words(self, count: int, rng: np.random.Generator) -> list[int]:
        """`count` words (or, without a tokenizer, token ids) as numbers that `prompt` takes."""
        if not self._words:
            return rng.integers(10, 256, count).tolist()  # below 10 are the special tokens of many models
        return rng.integers(0, len(self._words), count).tolist()

    def prompt(self, words: Sequence[int]) -> tuple[str | list[int], int | None]:
        """The prompt of these words, and how many tokens it has (None: not known here).

        One word a token, begin and end tokens that the tokenizer adds included: as many words are left out.
        """
        if not self._words:
            return list(words), len(words)
        kept = words[self._added :] or words[:1]
        text = "".join(self._words[word] for word in kept)
        if self._tokenizer is None:
            return text, None
        want, count = len(words), len(self._tokenizer.encode(text))
        for _ in range(_TRIES):  # where words do run into each other after all
            if count == want or len(kept) + want - count < 1:
                break
            kept = (list(kept) * 2)[: len(kept) + want - count]
            text = "".join(self._words[word] for word in kept)
            count = len(self._tokenizer.encode(text))
        return text, count


def _stable_words(tokenizer: TokenizerLike, rng: np.random.Generator) -> list[str]:
    tried = rng.permutation(tokenizer.vocab_size)[:_LOOKED_AT].tolist()
    texts = [tokenizer.decode([token]) for token in tried]

    def whole(text: str) -> bool:
        return len(tokenizer.encode(text, add_special_tokens=False)) == 1

    words = [text for text in texts if text[:1] == " " and text[1:].isascii() and text[1:].isalpha() and whole(text)]
    if len(words) >= _ENOUGH:
        return words
    # no words with a space before them (bytes, or the space is taken off): any plain text that is one token
    plain = [text for text in texts if text and text.isascii() and text.isprintable() and whole(text)]
    if not plain:
        raise ValueError("the tokenizer has no tokens that could make up a random prompt; use another dataset")
    return plain
