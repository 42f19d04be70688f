"""Where the two processes get their parts from: the engine process an engine, the HTTP process a tokenizer.

Both are named as `module:function`, so that a spawned process can import them; tests and benchmarks name their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from research_engine.engine.engine import Engine
from research_engine.options import EngineOptions
from research_engine.server.live_records import LiveRecords

if TYPE_CHECKING:
    from research_engine.loading.tokenizer import Tokenizer

EmbedPrompts = Callable[[Sequence[Sequence[int]], Callable[[int], None]], Sequence[Any]]
"""Prompts as token ids, and what to call with the number of prompts that a step ended -> one vector each, numbers in a
row; raises ValueError for a prompt that it cannot embed."""


@dataclass(frozen=True)
class EngineParts:
    """What the engine process serves with.

    Attributes:
        engine: generates; its records must be the LiveRecords that the builder was given.
        embed: embeds prompts, where the model does.
        generates: whether the engine generates; one that does not refuses prompts to continue.
        facts: what was resolved, for the log and the written configuration.
    """

    engine: Engine
    embed: EmbedPrompts | None = None
    generates: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineSource:
    """How to make both parts.

    Attributes:
        options: of the engine.
        engine: `module:function` of (options, records) -> EngineParts.
        tokenizer: `module:function` of (options) -> Tokenizer or None.
    """

    options: EngineOptions
    engine: str = "research_engine.server.engine_source:build_parts"
    tokenizer: str = "research_engine.server.engine_source:load_tokenizer"

    def build(self, records: LiveRecords) -> EngineParts:
        """The engine process's part; raises what the function named by `engine` raises."""
        parts: EngineParts = _imported(self.engine)(self.options, records)
        return parts

    def load_tokenizer(self) -> Tokenizer | None:
        """The HTTP process's part."""
        tokenizer: Tokenizer | None = _imported(self.tokenizer)(self.options)
        return tokenizer


def build_parts(options: EngineOptions, records: LiveRecords) -> EngineParts:
    """A real engine, and its embedder where that is the task.

    Raises:
        OptionError, LoadError, ValueError: as `research_engine.llm.build_engine`.
    """
    from research_engine.embedding import Embedder, task_of
    from research_engine.llm import build_engine, load

    loaded = load(options)
    engine = build_engine(options, loaded, records=records)
    facts = {"device": str(loaded.model.device), "dtype": str(loaded.model.dtype).removeprefix("torch.")}
    if task_of(options, loaded.config) == "generate":
        return EngineParts(engine, facts=facts)
    embedder = Embedder(engine)

    def embed(prompts: Sequence[Sequence[int]], after_step: Callable[[int], None]) -> list[Any]:
        return [made.dense for made in embedder.embed(prompts, after_step=after_step)]

    return EngineParts(engine, embed, False, facts)


def load_tokenizer(options: EngineOptions) -> Tokenizer | None:
    """The model's tokenizer; None where the options want none. Imports no torch.

    Raises:
        LoadError: the model or its tokenizer cannot be had.
    """
    from research_engine import loading

    if options.skip_tokenizer_init:
        return None
    return loading.load_tokenizer(loading.resolve_model(options.model))


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
