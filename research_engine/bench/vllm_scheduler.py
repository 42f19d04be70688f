"""vLLM's V1 scheduler without a model: prints the microseconds of its two halves as one JSON line.

Started by bench/scheduler.py with the Python of an environment that has vLLM; imports nothing of this project. Every
step of `running` decoding sequences calls schedule() and then update_from_output() with one token for each. No GPU and
no weights are needed: a configuration of Llama-3.1-8B's shape is enough for the scheduler.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def make_scheduler(running: int, num_tokens: int, folder: Path) -> Any:
    """A scheduler with seats for `running` sequences and blocks for `num_tokens` tokens of each."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    longest = max(8192, num_tokens)
    num_blocks = running * (num_tokens // BLOCK_SIZE + 2)
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=longest
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=running, max_num_batched_tokens=8192, max_model_len=longest, is_encoder_decoder=False
        ),
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = num_blocks
    layout = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    blocks = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layout)]
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def measure(running: int, prompt_tokens: int, steps: int) -> dict[str, float]:
    """Microseconds a step of schedule() and update_from_output(), once all prompts are computed: medians, and what a
    tenth of the steps stays below.
    """
    from vllm import SamplingParams, __version__
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    warmup = 10 + running * prompt_tokens // 8192 + 1
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(running, prompt_tokens + warmup + steps + 1, Path(folder))
        sampling = SamplingParams(max_tokens=warmup + steps + 1, ignore_eos=True)
        for index in range(running):
            scheduler.add_request(
                Request(
                    request_id=str(index),
                    prompt_token_ids=list(range(index, index + prompt_tokens)),
                    sampling_params=sampling,
                    pooling_params=None,
                )
            )
        clock, planned, updated = time.perf_counter, [], []
        for step in range(warmup + steps):
            begin = clock()
            output = scheduler.schedule()
            middle = clock()
            names = list(output.num_scheduled_tokens)
            result = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[[7]] * len(names),
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            ready = clock()
            scheduler.update_from_output(output, result)
            end = clock()
            if step >= warmup:
                assert len(names) == running, f"{len(names)} of {running} sequences were scheduled"
                planned.append((middle - begin) * 1e6)
                updated.append((end - ready) * 1e6)
    totals = sorted(sum(parts) for parts in zip(planned, updated, strict=True))
    return {
        "version": __version__,
        "schedule": statistics.median(planned),
        "update": statistics.median(updated),
        "total": statistics.median(totals),
        "fastest_tenth": totals[len(totals) // 10],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--running", 256), ("--prompt-tokens", 128), ("--steps", 300)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    print(json.dumps(measure(options.running, options.prompt_tokens, options.steps)))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    main()
