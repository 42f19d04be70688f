"""What the endpoints share: the engine's client, the tokenizer, the model's names and the server's limits."""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from research_engine.server.engine_client import EngineClient
from research_engine.server.errors import ApiError, invalid
from research_engine.server.ignored_fields import IgnoredFields
from research_engine.structured_outputs import GrammarCompiler

if TYPE_CHECKING:
    from research_engine.loading.tokenizer import Tokenizer

T = TypeVar("T")
_IN_A_THREAD = 8192  # characters, bytes or tokens from which work is done beside the event loop


async def off_the_loop(size: int, work: Callable[[], T]) -> T:
    """What `work` returns. Large work runs in a thread, so that other requests go on meanwhile."""
    return work() if size < _IN_A_THREAD else await asyncio.to_thread(work)


@dataclass
class ServerContext:
    """One model being served.

    Attributes:
        client: of the engine that serves now.
        model_names: what requests may call the model; answers carry the first.
        reports_cached_tokens: usage says how many prompt tokens the prefix cache held.
        max_logprobs: most probable tokens that a request may ask for beside each token.
        draining: no new request is taken.
        ignored: fields of requests that nobody here knows.
    """

    client: EngineClient
    tokenizer: Tokenizer | None
    model_names: Sequence[str]
    max_logprobs: int = 20
    reports_cached_tokens: bool = False
    draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    ignored: IgnoredFields = field(default_factory=IgnoredFields)
    _grammars: GrammarCompiler | None = None

    @property
    def model(self) -> str:
        return self.model_names[0]

    def check_generates(self) -> None:
        """Raises ApiError: 400, the model embeds."""
        if self.client.ready is not None and self.client.ready.embeds:
            raise invalid(f"the model {self.model!r} embeds and does not generate; /v1/embeddings takes texts", "model")

    def check_model(self, name: str | None) -> None:
        """A request that names no model means the one that is there.

        Raises:
            ApiError: 404, with the names there are.
        """
        if name is None or name in self.model_names:
            return
        names = sorted(self.model_names, key=lambda n: -difflib.SequenceMatcher(None, name.lower(), n.lower()).ratio())
        message = f"the model {name!r} does not exist; this server has {', '.join(map(repr, names))}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def require_tokenizer(self) -> Tokenizer:
        """Raises ApiError (400) where the server has none."""
        if self.tokenizer is None:
            raise invalid(
                "this server has no tokenizer (skip_tokenizer_init): prompts are lists of token ids", "prompt"
            )
        return self.tokenizer

    def check_token_ids(self, ids: Sequence[int], field: str) -> None:
        """Raises ApiError (400): an id is outside the model's vocabulary."""
        ready = self.client.ready
        if not ids or ready is None or not ready.vocab_size:
            return
        bad = low if (low := min(ids)) < 0 else max(ids)
        if bad < 0 or bad >= ready.vocab_size:
            top = f"{ready.vocab_size - 1} (vocabulary of {ready.vocab_size})"
            raise invalid(f"{field} holds token id {bad}; ids go from 0 to {top}", field)

    @property
    def grammars(self) -> GrammarCompiler:
        """Checks grammars before the engine sees them."""
        if self._grammars is None:
            assert self.client.ready is not None
            self._grammars = GrammarCompiler(self.require_tokenizer(), self.client.ready.vocab_size)
        return self._grammars

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of texts.

        Raises:
            ApiError: 400, a text is no valid Unicode.
        """
        if not texts:
            return []
        tokenizer = self.require_tokenizer()
        try:
            return await off_the_loop(
                sum(map(len, texts)), lambda: [tokenizer.encode(text, add_special_tokens) for text in texts]
            )
        except ValueError:
            raise invalid("the text is no valid Unicode: it holds a lone surrogate", "prompt") from None
