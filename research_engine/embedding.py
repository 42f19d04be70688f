"""Texts to vectors: an engine whose requests take one step and hold no KV, and `Embedder`, the front on top of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Clock, Scheduler
from research_engine.engine.engine import Engine
from research_engine.engine.errors import PolicyError
from research_engine.engine.records import Records
from research_engine.engine.sampling_params import SamplingParams
from research_engine.options import EngineOptions, OptionError

if TYPE_CHECKING:
    from research_engine.executors.embedding import EmbeddingExecutor, Vectors
    from research_engine.llm import LoadedModel
    from research_engine.models.config import ModelConfig
    from research_engine.models.pooling import Pooling

_ONE_STEP = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def task_of(options: EngineOptions, config: ModelConfig) -> str:
    """What a model is run for, "generate" or "embed".

    Raises:
        OptionError: it is to generate and cannot.
    """
    generates = config.causal and config.head
    if options.task == "generate" and not generates:
        what = "has no output projection" if config.causal else "is an encoder"
        raise OptionError(
            f"task = 'generate': {options.model} ({config.architecture}) {what}: it embeds (task='embed')"
        )
    if options.pooling != "auto" and options.task != "embed" and generates:
        raise OptionError(f"pooling = {options.pooling!r} is of embedders: set task='embed'")
    return options.task if options.task != "auto" else "generate" if generates else "embed"


def build_embedding_engine(
    options: EngineOptions,
    loaded: LoadedModel,
    scheduler: Scheduler,
    *,
    token_budget: int,
    clock: Clock | None = None,
    records: Records | None = None,
) -> Engine:
    """Put an engine together that embeds.

    Every policy serves it. A text is one block on the books and no memory: a block is as long as the longest text.

    Args:
        token_budget: tokens of a step; one text may be longer.
        clock, records: as `Engine` takes them.

    Raises:
        LoadError: the model's pooling or heads.
    """
    from research_engine.executors.embedding import EmbeddingExecutor
    from research_engine.loading.pooling import load_pooling
    from research_engine.loading.token_heads import load_token_heads

    pooling = load_pooling(loaded.source, loaded.config)
    if options.pooling != "auto":
        pooling = replace(pooling, kind=options.pooling)
    longest = options.max_model_len or pooling.max_tokens or loaded.config.max_position_embeddings
    on_gpu = loaded.model.device.type != "cpu"
    config = EngineConfig(
        num_blocks=options.max_num_seqs,
        block_size=longest + 1,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(token_budget, longest),
        max_model_len=longest + 1,  # the core keeps room for the token that ends a request
        max_num_queued=options.max_num_queued,
        on_fault=options.on_fault,
        schedule_limit=options.schedule_limit,
        enable_prefix_caching=False,
        vocab_size=loaded.config.vocab_size,
        seed=options.seed,
        check_integrity=options.check_integrity,
        overlap=on_gpu if options.overlap is None else options.overlap,
    )
    model = loaded.model
    heads = load_token_heads(loaded.source, loaded.config.hidden_size, dtype=model.dtype, device=model.device)
    return Engine(config, scheduler, EmbeddingExecutor(model, pooling, heads), clock=clock, records=records)


class Embedder:
    """Embeds prompts of token ids through an engine made by `build_embedding_engine`.

    Attributes:
        max_tokens: of a text at most; pooling: the rule.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._executor: EmbeddingExecutor = engine.executor  # type: ignore[assignment]
        self.max_tokens = engine.config.max_model_len - 1
        self._num_calls = 0

    @property
    def pooling(self) -> Pooling:
        return self._executor.pooling

    def embed(
        self,
        prompts: Sequence[Sequence[int]],
        extras: Collection[str] = (),
        *,
        after_step: Callable[[int], None] = lambda ended: None,
    ) -> list[Vectors]:
        """The vectors of every prompt, in their order.

        Args:
            extras: which of executors.embedding.EXTRAS to make beside the dense vectors.
            after_step: called with the number of texts that a step ended; what it raises ends the call.

        Raises:
            ValueError: a prompt that can never be served, or extras that the model has no heads for; raised before
                anything runs.
        """
        if extras and self._executor.heads is None:
            raise ValueError(
                "sparse and multi_vector need a model with sparse_linear.pt and colbert_linear.pt beside its weights, "
                "such as BGE-M3; this one has none"
            )
        for index, prompt in enumerate(prompts):
            if len(prompt) > self.max_tokens:
                raise ValueError(
                    f"text {index} has {len(prompt)} tokens: the model takes {self.max_tokens} at most; shorten or "
                    "truncate it"
                )
        self._num_calls += 1
        names = [f"embed-{self._num_calls}-{index}" for index in range(len(prompts))]
        left = set(names)
        try:
            for name, prompt in zip(names, prompts, strict=True):
                self._executor.expect(name, extras)
                self._engine.add_request(name, prompt, _ONE_STEP)
            while left:
                ended = {output.request.id for output in self._engine.step()} & left
                left -= ended
                after_step(len(ended))
            made = [self._executor.take(name) for name in names]
            return [vectors for vectors in made if vectors is not None]
        finally:
            for name in left:
                with suppress(PolicyError):  # of an event that fails again; the first error is the one to tell
                    self._engine.abort(name)
            for name in names:  # what an error left there
                self._executor.take(name)
