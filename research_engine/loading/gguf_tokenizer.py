"""Rebuilds a tokenizer from GGUF metadata: byte-level BPE by its pre-tokenizer's name, SentencePiece by its scores."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from research_engine.loading.errors import LoadError

_CONTROL, _UNKNOWN, _USER_DEFINED = 3, 2, 4  # of tokenizer.ggml.token_type

_KINDS: dict[str, tuple[type, ...]] = {  # of the keys of tokenizer.ggml; after a list, that of its items
    "model": (str,),
    "pre": (str,),
    "tokens": (list, str),
    "token_type": (list, int),
    "merges": (list, str),
    "scores": (list, float),
    **dict.fromkeys((f"{name}_token_id" for name in ("unknown", "bos", "eos", "eot", "eom")), (int,)),
}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    """How a byte-level vocabulary's text is cut before merging, by llama.cpp's name for it; None if unknown."""
    if name in ("smollm", "starcoder", "refact", "command-r"):  # digits one by one, then GPT-2's rule
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])
    if name in ("gpt-2", "default"):
        return _byte_level(use_regex=True)
    if name in ("llama-bpe", "llama3", "llama-v3", "qwen2"):
        rule = _LLAMA3 if name != "qwen2" else _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")  # one digit at a time
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(rule), behavior="isolated"), _byte_level(use_regex=False)]
        )
    return None


_PRE_TOKENIZERS = (
    "smollm", "starcoder", "refact", "command-r", "gpt-2", "default", "llama-bpe", "llama3", "llama-v3", "qwen2",
)  # fmt: skip


def build_backend(metadata: Mapping[str, Any], location: str) -> tokenizers.Tokenizer:
    """The tokenizer that ``tokenizer.ggml.*`` describes, without its begin and end tokens.

    Raises:
        LoadError: a key is missing or malformed, or the model or pre-tokenizer is not supported.
    """
    for name, wanted in _KINDS.items():
        value = metadata.get(key := f"tokenizer.ggml.{name}")
        items = value[:1] if isinstance(value, list) else ()  # arrays are of one type throughout
        if value is not None and not (isinstance(value, wanted[0]) and all(isinstance(i, wanted[1:]) for i in items)):
            raise LoadError(f"{location}: corrupt, {key} holds a {type(value).__name__} of another type than it should")
    tokens = metadata.get("tokenizer.ggml.tokens")
    kind = metadata.get("tokenizer.ggml.model")
    if not tokens or kind is None:
        raise LoadError(
            f"{location}: carries no tokenizer (tokenizer.ggml.model and .tokens); pass token ids and "
            "skip_tokenizer_init=True"
        )
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise LoadError(f"{location}: corrupt, {len(tokens)} tokens and {len(types)} token types")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise LoadError(f"{location}: corrupt, {len(tokens) - len(vocabulary)} tokens appear twice in the vocabulary")
    if kind == "gpt2":
        backend = _byte_level_bpe(metadata, vocabulary, location)
    elif kind == "llama":
        backend = _sentencepiece_bpe(metadata, tokens, types, vocabulary, location)
    else:
        raise LoadError(f"{location}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    for number, special in ((_USER_DEFINED, False), (_CONTROL, True)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, t in zip(tokens, types, strict=True)
            if t == number
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    return backend


def _byte_level_bpe(metadata: Mapping[str, Any], vocabulary: dict[str, int], location: str) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre_tokenizer = _pre_tokenizer(name)
    if pre_tokenizer is None:
        close = difflib.get_close_matches(name, _PRE_TOKENIZERS, n=len(_PRE_TOKENIZERS), cutoff=0.0)
        raise LoadError(f"{location}: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(close)}")
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges") or []:
        left, _, right = merge.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise LoadError(f"{location}: corrupt, the merge {merge!r} names a token outside the vocabulary")
        merges.append((left, right))
    if not merges:
        raise LoadError(f"{location}: lacks tokenizer.ggml.merges")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in ("llama-bpe", "llama3", "llama-v3"))
    )
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], vocabulary: dict[str, int], location: str
) -> tokenizers.Tokenizer:
    """SentencePiece merges the adjacent pair whose union has the best score; as a list of merges that is every way to
    cut a piece into two pieces, best union first, and among equals by the ids of the parts."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise LoadError(f"{location}: {len(tokens)} tokens and {len(scores or ())} tokenizer.ggml.scores")
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind == 1:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocabulary and right in vocabulary:
                    ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", types.index(_UNKNOWN) if _UNKNOWN in types else 0)]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for *_, left, right in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    strip = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        strip.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
