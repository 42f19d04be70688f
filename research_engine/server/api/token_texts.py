"""Log-probabilities in the two shapes of OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from research_engine.engine.contract import TokenLogprobs

if TYPE_CHECKING:
    from research_engine.loading.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no minus infinity


class TokenTexts:
    """Names tokens. A token that is part of a character has U+FFFD in its text; its bytes are exact.

    Without a tokenizer a token is named `token_id:N`.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def raw(self, token_id: int) -> list[int]:
        if self._tokenizer is None:
            return list(self.text(token_id).encode())
        return list(self._tokenizer.token_bytes(token_id))

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat."""
        return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        def named(token_id: int, logprob: float) -> dict[str, Any]:
            return {"token": self.text(token_id), "logprob": max(logprob, LEAST), "bytes": self.raw(token_id)}

        return {
            **named(entry.token_id, entry.logprob),
            "top_logprobs": [named(token_id, logprob) for token_id, logprob in entry.top],
        }

    def completion(
        self, entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offset: int
    ) -> dict[str, Any]:
        """`choices[].logprobs` of a completion; None stands for a first prompt token, which nothing predicts.

        Args:
            offset: characters of the text before these tokens.
        """
        tokens = [self.text(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        top: list[dict[str, float] | None] = []
        for entry in entries:
            if entry is None:
                top.append(None)
                continue
            named = {self.text(token_id): max(logprob, LEAST) for token_id, logprob in reversed(entry.top)}
            named.setdefault(self.text(entry.token_id), max(entry.logprob, LEAST))
            top.append(dict(sorted(named.items(), key=lambda item: -item[1])))
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else max(entry.logprob, LEAST) for entry in entries],
            "top_logprobs": top,
            "text_offset": offsets,
        }
