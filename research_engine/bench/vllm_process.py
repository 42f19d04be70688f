"""Has vLLM do a job in a process of its own, by an interpreter that need not have this project."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_twin(script: str, job: Mapping[str, Any], vllm_python: str | None, scratch: Path) -> Any:
    """What a script beside this one, called with a job's file and a result's, writes.

    Args:
        script: its name; it imports nothing of this project.
        job: for its first file, as JSON.
        vllm_python: the interpreter; this one when None.
        scratch: a directory for both files.

    Raises:
        ValueError: the interpreter cannot be run, the script failed (with the last lines of its errors), or it wrote no
            result.
    """
    python = vllm_python or sys.executable
    asked, answered = scratch / "job.json", scratch / "result.json"
    asked.write_text(json.dumps(job))
    try:
        command = [python, str(Path(__file__).with_name(script)), str(asked), str(answered)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"vllm_python = {python!r}: cannot be run: {error}") from error
    if ended.returncode:
        last = "\n".join(ended.stderr.strip().splitlines()[-15:])
        raise ValueError(f"vLLM in {python} ended with {ended.returncode}:\n{last}")
    try:
        return json.loads(answered.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"vllm_python = {python!r}: ended well and wrote no result: {error}") from error
