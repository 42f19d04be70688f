"""Runs a job of offline measurements on this engine, as bench/vllm_twin.py does on vLLM."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

import research_engine
from research_engine.bench.device_energy import energy_counter
from research_engine.bench.offline_work import Job, JobResult, random_prompts
from research_engine.engine.sampling_params import SamplingParams
from research_engine.executors.torch_executor import TorchExecutor
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
    joules: dict[str, float] = {}
    on_gpu = _executor(llm).device.type == "cuda"
    joules_now = energy_counter() if on_gpu else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def call(lengths: list[tuple[int, int]]) -> tuple[float, int, float]:
        prompts = random_prompts(lengths, job.vocab_size)
        params = [
            SamplingParams(max_tokens=most, ignore_eos=True, temperature=1.0, detokenize=False) for _, most in lengths
        ]
        used, begin = joules_now() if joules_now else 0.0, time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - begin
        used = joules_now() - used if joules_now else 0.0
        return taken, sum(len(output.outputs[0].token_ids) for output in outputs), used

    try:
        call(job.warmup)
        for name, lengths in job.works.items():
            if on_work is not None:
                on_work(name)
            calls = [call([(int(a), int(b)) for a, b in lengths]) for _ in range(job.repeats.get(name, 1))]
            seconds[name], tokens[name], joules[name] = min(calls)
        extra = _facts(llm) | (_memory(llm) if on_gpu else {})
    finally:
        llm.shutdown()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    if joules_now is None:
        joules = {}
    return JobResult(f"research_engine {research_engine.__version__}", startup, seconds, tokens, joules, extra)


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


def _executor(llm: LLM) -> TorchExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, TorchExecutor)
    return executor


def _memory(llm: LLM) -> dict[str, int]:
    """Bytes of the GPU beside the KV cache: what the plan set aside, and the most that there was since it was made."""
    executor = _executor(llm)
    free, total = torch.cuda.mem_get_info(executor.device)
    others = total - free - torch.cuda.memory_reserved(executor.device)  # the context, and other processes
    peak = torch.cuda.max_memory_reserved(executor.device) + others - executor.kv_cache.nbytes
    plan = executor.memory_plan
    return {"memory_beside_cache": peak} | (
        {} if plan is None else {"memory_planned": plan.weights + plan.activations + plan.other}
    )
