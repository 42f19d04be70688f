"""Runs a job of offline measurements on this engine, as bench/vllm_twin.py does on vLLM."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import research_engine
from research_engine.bench.offline_work import Job, JobResult, random_prompts
from research_engine.engine.sampling_params import SamplingParams
from research_engine.llm import LLM


def run_job(job: Job, *, on_work: Callable[[str], None] | None = None) -> JobResult:
    """Load the model, warm up, time every work. The model's memory is given back at the end.

    Args:
        job: what to do.
        on_work: called with a work's name before it is run.
    """
    began = time.perf_counter()
    llm = LLM(job.model, **job.options)
    startup = time.perf_counter() - began
    seconds: dict[str, float] = {}
    tokens: dict[str, int] = {}

    def call(lengths: list[tuple[int, int]]) -> tuple[float, int]:
        prompts = random_prompts(lengths, job.vocab_size)
        params = [
            SamplingParams(max_tokens=most, ignore_eos=True, temperature=1.0, detokenize=False) for _, most in lengths
        ]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin, sum(len(output.outputs[0].token_ids) for output in outputs)

    try:
        call(job.warmup)
        for name, lengths in job.works.items():
            if on_work is not None:
                on_work(name)
            taken = [call([(int(a), int(b)) for a, b in lengths]) for _ in range(job.repeats)]
            seconds[name], tokens[name] = min(taken)
        extra = _facts(llm)
    finally:
        llm.shutdown()
        gc.collect()
        _empty_cache()
    return JobResult(f"research_engine {research_engine.__version__}", startup, seconds, tokens, extra)


def _facts(llm: LLM) -> dict[str, Any]:
    config = llm.engine.config
    return {
        "num_blocks": config.num_blocks,
        "block_size": config.block_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "scheduler": llm.options.scheduler,
        "overlap": config.overlap,
    }


def _empty_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
