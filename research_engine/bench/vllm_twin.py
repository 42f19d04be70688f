"""Runs a job of offline measurements on vLLM: `python vllm_twin.py JOB.json RESULT.json`.

Stands alone, since that interpreter need not have this project. The same calls are timed as in offline_engine.py.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(job_file: str, result_file: str) -> None:
    """Read a job, do it, write what it took."""
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]  # else this directory's names hide others
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    job = json.loads(Path(job_file).read_text())
    begin = time.perf_counter()
    llm = vllm.LLM(model=job["model"], disable_log_stats=True, **job["options"])
    startup = time.perf_counter() - begin
    vocab_size = job["vocab_size"]
    low, high = (10, vocab_size - 10) if vocab_size > 40 else (0, vocab_size)

    joules_now = runpy.run_path(str(HERE / "device_energy.py"))["energy_counter"]()

    def call(lengths: list[list[int]]) -> tuple[float, int, float]:
        rng = random.Random(0)
        prompts = [{"prompt_token_ids": [rng.randrange(low, high) for _ in range(prompt)]} for prompt, _ in lengths]
        params = [
            vllm.SamplingParams(max_tokens=most, ignore_eos=True, temperature=1.0, detokenize=False)
            for _, most in lengths
        ]
        used, begin = joules_now() if joules_now else 0.0, time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        used = joules_now() - used if joules_now else 0.0
        return seconds, sum(len(output.outputs[0].token_ids) for output in outputs), used

    call(job["warmup"])
    seconds, tokens, joules = {}, {}, {}
    for name, lengths in job["works"].items():
        print(name, flush=True)
        seconds[name], tokens[name], joules[name] = min(call(lengths) for _ in range(job["repeats"].get(name, 1)))
    result = {"engine": f"vLLM {vllm.__version__}", "startup": startup, "seconds": seconds, "output_tokens": tokens}
    Path(result_file).write_text(json.dumps({**result, "joules": joules if joules_now else {}, "extra": {}}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
