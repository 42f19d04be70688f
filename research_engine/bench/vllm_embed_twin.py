"""Embeds the prompts of a job on vLLM: `python vllm_embed_twin.py JOB.json RESULT.json`.

Stands alone, since that interpreter need not have this project. The same calls are timed as in embed.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main(job_file: str, result_file: str) -> None:
    """Read a job, do it, write what it took and the vectors."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    job = json.loads(Path(job_file).read_text())
    llm = vllm.LLM(model=job["model"], runner="pooling", **job["options"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    seconds = []
    for repeat in range(job["repeats"] + 1):  # the first warms up
        begin = time.perf_counter()
        outputs = llm.embed(prompts, use_tqdm=False)
        if repeat:
            seconds.append(time.perf_counter() - begin)
    vectors = [list(output.outputs.embedding) for output in outputs]
    Path(result_file).write_text(
        json.dumps({"engine": f"vLLM {vllm.__version__}", "seconds": seconds, "vectors": vectors})
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # the result is written; vLLM 0.22.1's pooling aborts while the interpreter ends
