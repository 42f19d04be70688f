"""Where the parts are put together: options -> model, scheduler, executor, engine; and `LLM`, the offline front on top.

`build_engine` is the one place that does it; experiments and the server call it, too.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from research_engine.call_progress import interrupts_between_steps, progress_bar
from research_engine.embedding import Embedder, build_embedding_engine, task_of
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Clock, TokenLogprobs
from research_engine.engine.engine import Engine
from research_engine.engine.errors import PolicyError
from research_engine.engine.overdue import overdue_calls_end
from research_engine.engine.records import Records, RequestRecord
from research_engine.engine.request import Request
from research_engine.engine.sampling_params import SamplingParams
from research_engine.options import (
    QUANTIZATIONS,
    EngineOptions,
    OptionError,
    choose_device,
    choose_dtype,
    choose_kv_cache_dtype,
)
from research_engine.outputs import (
    CompletionOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    embedding_output,
    merged_record,
)
from research_engine.structured_outputs import GrammarCompiler

if TYPE_CHECKING:
    import torch

    from research_engine.executors.memory_plan import MemoryPlan
    from research_engine.loading import ModelSource
    from research_engine.loading.tokenizer import Tokenizer
    from research_engine.models.config import ModelConfig
    from research_engine.models.decoder import Decoder
    from research_engine.models.fallback import TransformersDecoder

LOG = logging.getLogger(__name__)
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run; one may serve several engines, one after the other."""

    source: ModelSource
    config: ModelConfig
    model: Decoder | TransformersDecoder
    tokenizer: Tokenizer | None


def load(options: EngineOptions, *, progress: bool = True) -> LoadedModel:
    """Find, fetch and load model and tokenizer.

    Raises:
        LoadError: the model or its tokenizer cannot be had.
        OptionError: device or dtype cannot be had here.
    """
    from research_engine import loading

    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    source = loading.resolve_model(options.model, progress=progress)
    config = loading.load_config(source, trust_remote_code=options.trust_remote_code)
    if options.max_model_len is not None and options.max_model_len > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise OptionError(f"max_model_len = {options.max_model_len}: {options.model} has {most} positions at most")
    stored = "gguf" if source.format == "gguf" else config.quantization and config.quantization.method
    if options.quantization is not None and stored not in QUANTIZATIONS[options.quantization]:
        what = f"{options.model} has {f'{stored} weights' if stored else 'weights that are not quantised'}"
        raise OptionError(f"quantization = {options.quantization!r}: {what}, and loading quantises none")
    tokenizer = None
    if not options.skip_tokenizer_init:
        tokenizer = loading.load_tokenizer(source, trust_remote_code=options.trust_remote_code)
    model = loading.load_model(
        source,
        dtype=dtype,
        device=device,
        dummy_weights=options.load_format == "dummy",
        seed=options.seed,
        progress=progress,
        max_model_len=options.max_model_len,
        trust_remote_code=options.trust_remote_code,
        weight_packing=options.weight_packing,
    )
    if options.batch_invariant:
        if not hasattr(model, "make_batch_invariant"):
            what = f"{config.architecture} runs on transformers' modules, which are not"
            raise OptionError(f"batch_invariant = True: {what}")
        try:
            model.make_batch_invariant()
        except ValueError as error:
            raise OptionError(str(error)) from error
    return LoadedModel(source, config, model, tokenizer)


def build_engine(
    options: EngineOptions,
    loaded: LoadedModel | None = None,
    *,
    clock: Clock | None = None,
    records: Records | None = None,
) -> Engine:
    """Put an engine together; one that embeds where that is the task.

    Args:
        loaded: the options' model, when it was loaded before; loaded now when None.
        clock, records: as `Engine` takes them.

    Raises:
        OptionError, LoadError, ValueError: an option, the model or the scheduler's name or parameters.
    """
    import schedulers
    from research_engine.executors.step_graphs import ladder, token_ladder
    from research_engine.executors.torch_executor import TorchExecutor

    scheduler = schedulers.create(options.scheduler, **options.scheduler_params)
    if loaded is None:
        loaded = load(options)
    if task_of(options, loaded.config) == "embed":
        budget = _token_budget(options, loaded.model.device)
        return build_embedding_engine(options, loaded, scheduler, token_budget=budget, clock=clock, records=records)
    model, tokenizer = loaded.model, loaded.tokenizer
    eager = _is_eager(options, model)
    budget = _token_budget(options, model.device)
    graph_sizes = [] if eager else ladder(options.max_num_seqs)
    token_sizes = [] if eager else token_ladder(budget, loaded.config.num_parameters)
    plan = _measure_memory(options, loaded, graph_sizes, token_sizes)
    room = None if plan is None else plan.room
    config = engine_config(options, loaded.config, model.device, model.dtype, tokenizer, room=room)
    LOG.info(
        "KV cache: %d blocks of %d tokens, %.2f requests of %d tokens at once", config.num_blocks, config.block_size,
        config.num_slots / config.max_model_len, config.max_model_len,
    )  # fmt: skip
    if getattr(scheduler, "preemption", None) == "swap" and config.num_host_blocks == 0:
        raise OptionError(
            "the scheduler's preemption = 'swap' needs host blocks: set swap_space (GiB) or num_host_blocks"
        )
    try:
        executor = TorchExecutor(
            model,
            config,
            cache_dtype=choose_kv_cache_dtype(options.kv_cache_dtype, model.dtype),
            graph_sizes=graph_sizes,
            token_sizes=token_sizes,
            memory_plan=plan,
        )
        executor.capture(lambda done, count: LOG.info("CUDA graphs: %d of %d captured", done, count))
    except RuntimeError as error:  # what torch raises when memory is short, on a CPU and on a GPU
        sizes = f"num_blocks = {config.num_blocks}, num_host_blocks = {config.num_host_blocks}"
        raise OptionError(f"no memory for the KV cache of {sizes} of {config.block_size} tokens: {error}") from error
    stream = None if tokenizer is None else lambda sampling: tokenizer.decode_stream(sampling.skip_special_tokens)
    constrain = None if tokenizer is None else GrammarCompiler(tokenizer, config.vocab_size)
    return Engine(config, scheduler, executor, clock=clock, records=records, decode_stream=stream, constrain=constrain)


def engine_config(
    options: EngineOptions,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    tokenizer: Tokenizer | None = None,
    *,
    room: int | None = None,
) -> EngineConfig:
    """Sizes and limits of the core for a model on a device; call it after the weights took their memory.

    Args:
        room: bytes for the KV cache when the options name none; estimated when None.

    Raises:
        OptionError: the memory holds no cache, or swap_space no block; with the numbers.
    """
    from research_engine.executors.kv_sizing import cache_budget, kv_bytes_per_block

    budget_tokens = _token_budget(options, device)
    max_len = options.max_model_len or model.max_position_embeddings
    cache_dtype = choose_kv_cache_dtype(options.kv_cache_dtype, dtype)
    block_bytes = kv_bytes_per_block(model, options.block_size, cache_dtype)
    num_blocks = options.num_blocks
    if num_blocks is None:
        if options.kv_cache_memory is not None:
            room = int(options.kv_cache_memory * 2**30)
        elif room is None:
            room = cache_budget(
                model, device, dtype, max_num_batched_tokens=budget_tokens, max_num_seqs=options.max_num_seqs,
                gpu_memory_utilization=options.gpu_memory_utilization,
            )  # fmt: skip
        num_blocks = min(room // block_bytes, options.max_num_seqs * -(-max_len // options.block_size))
        if num_blocks < 1:
            raise OptionError(
                f"{room / 2**20:.1f} MiB are left for the KV cache, one block of {options.block_size} tokens takes "
                f"{block_bytes / 2**20:.1f} MiB: free memory, set kv_cache_memory, or lower max_num_batched_tokens"
            )
    host_blocks = options.num_host_blocks
    if host_blocks is None:
        host_blocks = int(options.swap_space * 2**30) // block_bytes
        if options.swap_space > 0 and host_blocks == 0:
            raise OptionError(f"swap_space = {options.swap_space} GiB is less than one block of {block_bytes} bytes")
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=options.block_size,
        num_host_blocks=host_blocks,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=budget_tokens,
        max_model_len=options.max_model_len or max(2, min(max_len, num_blocks * options.block_size)),
        max_num_queued=options.max_num_queued,
        reservation=options.reservation,
        on_fault=options.on_fault,
        schedule_limit=options.schedule_limit,
        enable_prefix_caching=options.enable_prefix_caching,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids or (tokenizer.eos_token_ids if tokenizer is not None else ()),
        seed=options.seed,
        check_integrity=options.check_integrity,
        overlap=device.type == "cuda" if options.overlap is None else options.overlap,
    )


def _is_eager(options: EngineOptions, model: Decoder | TransformersDecoder) -> bool:
    """Whether steps are launched kernel by kernel: where there are no CUDA graphs, or they are unwanted."""
    return options.enforce_eager or model.device.type != "cuda" or not model.capturable


def _token_budget(options: EngineOptions, device: torch.device) -> int:
    return options.max_num_batched_tokens or (2048 if device.type == "cpu" else 8192)


def _measure_memory(
    options: EngineOptions, loaded: LoadedModel, graph_sizes: Sequence[int], token_sizes: Sequence[int]
) -> MemoryPlan | None:
    """Where a GPU's memory goes, when the options leave the KV cache what the rest does not need.

    Args:
        graph_sizes, token_sizes: steps that will be CUDA graphs, by their rows and by their tokens.

    Raises:
        OptionError: it holds no request of max_model_len; with the numbers and what to try.
    """
    model = loaded.model
    if model.device.type == "cpu" or options.num_blocks is not None or options.kv_cache_memory is not None:
        return None
    from research_engine.executors.kv_sizing import kv_bytes_per_block
    from research_engine.executors.memory_plan import GIB, NoRoomError
    from research_engine.executors.memory_profile import measured_plan

    cache_dtype = choose_kv_cache_dtype(options.kv_cache_dtype, model.dtype)
    plan = measured_plan(
        model,
        utilization=options.gpu_memory_utilization,
        kv_bytes_per_token=kv_bytes_per_block(loaded.config, 1, cache_dtype),
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=_token_budget(options, model.device),
        graphs=graph_sizes,
        token_graphs=token_sizes,
    )
    for name, size in plan.parts().items():
        LOG.info("memory: %s %.2f GiB", name, size / GIB)
    try:
        plan.check()
    except NoRoomError as error:
        raise OptionError(str(error)) from error
    return plan


@dataclass
class _Draft:
    """One continuation while it is made."""

    request: Request
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class LLM:
    """Offline inference: prompts in, outputs out, in order.

    Args:
        model: what to run, see `EngineOptions.model`.
        options: fields of `EngineOptions` by name.

    Attributes:
        engine: the Engine, with its records; `tokenizer`: the Tokenizer or None; `options`: the EngineOptions.

    Raises:
        OptionError: an unknown option (valid ones listed, nearest first) or one out of range.
        LoadError: the model cannot be had.
        ValueError: the scheduler cannot be made.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.options = EngineOptions.of(model, options)
        loaded = load(self.options)
        self.model_config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.engine = build_engine(self.options, loaded)
        embeds = task_of(self.options, loaded.config) == "embed"
        self._embedder = Embedder(self.engine) if embeds else None
        self._num_calls = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: one or many; each a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: for all of them, or one for each; SamplingParams() when None.
            use_tqdm: show a progress bar on standard error.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt or its parameters can never be served; raised before anything runs.
            PolicyError: the policy broke a rule, raised, took longer than `schedule_limit`, or does not come back at
                all, of which the last is noticed in the main thread alone. All requests of this call are aborted.
            KeyboardInterrupt: Ctrl-C, after the step in progress (at once when pressed twice); all requests of this
                call are aborted, and the engine stays usable. Where somebody else handles SIGINT, as asyncio.run does,
                what Ctrl-C does is theirs to say.
        """
        many = self._many(prompts)
        resolved = [self._resolve(prompt, index) for index, prompt in enumerate(many)]
        return self._run(resolved, self._params_for(many, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template.

        Args:
            messages: one conversation, [{"role": ..., "content": ...}, ...], or a list of them.
            add_generation_prompt: end the prompt where the assistant's answer begins.

        Raises:
            ValueError: as `generate`; or there is no tokenizer or chat template, or the template refuses a message.
        """
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer; this LLM was made with skip_tokenizer_init=True")
        many = _listed("messages", messages)
        if many and isinstance(many[0], Mapping):
            many = [many]
        prompts: list[tuple[str | None, list[int]]] = []
        for conversation in many:
            ids = self.tokenizer.apply_chat_template(conversation, add_generation_prompt)
            prompts.append((self.tokenizer.decode(ids, skip_special_tokens=False), ids))
        return self._run(prompts, self._params_for(many, sampling_params), use_tqdm)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        sparse: bool = False,
        multi_vector: bool = False,
        truncate: bool = False,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Turn texts into vectors, with the model's own pooling.

        Args:
            texts: one or many, in any of the forms that `generate` takes.
            sparse, multi_vector: make lexical weights, and vectors of the tokens, too, of a model with heads for it.
            truncate: cut texts that are longer than the model takes instead of raising.
            use_tqdm: show a progress bar on standard error.

        Returns:
            One output a text, in the order of the texts.

        Raises:
            ValueError: the model does not embed or has no such heads, or a text is empty or too long; raised before
                anything runs.
            KeyboardInterrupt: as `generate`.
        """
        if self._embedder is None:
            raise ValueError(f"{self.options.model} was loaded to generate; LLM(..., task='embed') embeds")
        many = self._many(texts)
        resolved = self._resolve_all(many, self._embedder.max_tokens if truncate else None)
        with (
            overdue_calls_end(self.engine),
            progress_bar(len(many), enabled=use_tqdm) as advance,
            interrupts_between_steps() as check_interrupt,
        ):

            def after_step(ended: int) -> None:
                advance(ended, 0)
                check_interrupt()

            extras = [name for name, wanted in (("lexical", sparse), ("multi", multi_vector)) if wanted]
            made = self._embedder.embed([ids for _, ids in resolved], extras, after_step=after_step)
        return [
            EmbeddingRequestOutput(text, ids, embedding_output(ids, vectors))
            for (text, ids), vectors in zip(resolved, made, strict=True)
        ]

    def shutdown(self) -> None:
        """Give the model's and the cache's memory back; the LLM is of no use afterwards."""
        self.engine.executor.shutdown()

    @staticmethod
    def _many(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
        many: list[Any] = [prompts] if isinstance(prompts, (str, Mapping)) else _listed("prompts", prompts)
        return [many] if many and isinstance(many[0], Integral) else many

    def _resolve_all(self, prompts: list[Any], max_tokens: int | None) -> list[tuple[str | None, list[int]]]:
        """`_resolve` of each, texts all at once; those of more than max_tokens are cut to it."""
        if self.tokenizer is not None and all(isinstance(prompt, str) for prompt in prompts):
            return list(zip(prompts, self.tokenizer.encode_batch(prompts, max_tokens), strict=True))
        resolved = [self._resolve(prompt, index) for index, prompt in enumerate(prompts)]
        return [(text, ids[:max_tokens]) for text, ids in resolved]

    def _resolve(self, prompt: Any, index: int) -> tuple[str | None, list[int]]:
        """Text, if there is one, and token ids of a prompt in any of its forms."""
        text, ids = prompt, None
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise ValueError(
                    f"prompt {index} has the keys {sorted(map(str, prompt))}; it takes 'prompt' or 'prompt_token_ids'"
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif not isinstance(prompt, str):
            text, ids = None, prompt
        if ids is None:
            if not isinstance(text, str):
                raise ValueError(f"prompt {index} is {prompt!r}; it must be a text or a list of token ids")
            if self.tokenizer is None:
                raise ValueError(
                    f"prompt {index} is a text, which needs a tokenizer; skip_tokenizer_init=True takes token ids"
                )
            return text, self.tokenizer.encode(text)
        try:
            return text, [operator.index(token) for token in ids]
        except TypeError:
            raise ValueError(f"prompt {index} is {prompt!r}; token ids must be a list of integers") from None

    def _params_for(
        self, prompts: Sequence[Any], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        params = SamplingParams() if given is None else given
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        params = _listed("sampling_params", params)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling_params for {len(prompts)} prompts; give one, or one for each")
        return params

    def _run(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        if self._embedder is not None:
            raise ValueError(f"{self.options.model} embeds (task = 'embed') and does not generate; use LLM.embed")
        self._num_calls += 1
        groups: list[list[_Draft]] = []
        with overdue_calls_end(self.engine):
            try:
                for index, ((_, ids), sampling) in enumerate(zip(prompts, params, strict=True)):
                    added = self.engine.add_request(f"{self._num_calls}-{index}", ids, sampling)
                    groups.append([_Draft(request) for request in added])
                with (
                    progress_bar(len(groups), enabled=use_tqdm) as advance,
                    interrupts_between_steps() as check_interrupt,
                ):
                    self._serve(groups, advance, check_interrupt)
            except BaseException:
                for index in range(len(prompts)):  # the one whose arrival the policy failed at included
                    with suppress(PolicyError):  # of an event that fails again; the first error is the one to tell
                        self.engine.abort(f"{self._num_calls}-{index}")
                raise
        return [self._output(text, group) for (text, _), group in zip(prompts, groups, strict=True)]

    def _serve(
        self,
        groups: Sequence[Sequence[_Draft]],
        advance: Callable[[int, int], None],
        check_interrupt: Callable[[], None],
    ) -> None:
        """Step until every draft is finished; tokens of requests that are not this call's are passed over."""
        drafts = {draft.request.id: draft for group in groups for draft in group}
        unfinished = {group[0].request.group_id: len(group) for group in groups}
        while unfinished:
            ended = 0
            outputs = self.engine.step()
            for output in outputs:
                draft = drafts.get(output.request.id)
                if draft is None:
                    continue
                if output.text:
                    draft.text.append(output.text)
                if output.logprobs is not None:
                    draft.logprobs.append(output.logprobs)
                if output.finish_reason is not None:
                    name = output.request.group_id
                    unfinished[name] -= 1
                    if not unfinished[name]:
                        del unfinished[name]
                        ended += 1
            advance(ended, len(outputs))
            check_interrupt()

    def _output(self, text: str | None, group: Sequence[_Draft]) -> RequestOutput:
        first = group[0].request
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if first.sampling.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self._named(entry) for entry in first.prompt_logprobs)]
        return RequestOutput(
            request_id=first.group_id,
            prompt=text,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._completion(index, draft) for index, draft in enumerate(group)],
            finished=True,
            metrics=merged_record([RequestRecord.of(draft.request) for draft in group]),
        )

    def _completion(self, index: int, draft: _Draft) -> CompletionOutput:
        request, wanted = draft.request, draft.request.sampling.logprobs is not None
        return CompletionOutput(
            index=index,
            text="".join(draft.text),
            token_ids=request.output_token_ids,
            cumulative_logprob=sum(entry.logprob for entry in draft.logprobs) if wanted else None,
            logprobs=[self._named(entry) for entry in draft.logprobs] if wanted else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

    def _named(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token itself first, then the most probable ones."""

        def text(token_id: int) -> str | None:
            return None if self.tokenizer is None else self.tokenizer.decode([token_id], skip_special_tokens=False)

        named = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            named.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
        return named


def _listed(name: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise ValueError(f"{name} is {values!r}; it must be one of its kind, or a list of them") from None
