"""The commands of docs/benchmarking.md that need a server run against the project's own, or the stand-in for it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bench.standin import StandIn

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarking.md"
BLOCKS = re.findall(r"<!-- against a server -->\n```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
HAS_SERVER = importlib.util.find_spec("research_engine.server.serve") is not None


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextmanager
def stand_in() -> Iterator[str]:
    with StandIn(info={"scheduler": "fcfs"}) as server:
        yield server.url


@contextmanager
def own_server() -> Iterator[str]:
    """`research-engine serve` on a free port; it says where."""
    command = [sys.executable, "-m", "research_engine.cli", "serve", "dummy:tiny", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = re.search(r"serving .* on (http://\S+)", line)
            if found:
                yield found[1]
                break
        else:
            raise AssertionError("the server ended before it served")
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.timeout(600)
def test_the_commands_of_the_page_run(tmp_path):
    assert len(BLOCKS) >= 4
    with own_server() if HAS_SERVER else stand_in() as url:
        for block in BLOCKS:
            text = block.replace("bench serve ", f"bench serve --base-url {url} ")
            text = text.replace("research-engine chat -", f"research-engine chat --url {url} -")
            done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", text], cwd=tmp_path, env=environment(),
                                  capture_output=True, text=True, check=False)  # fmt: skip
            assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    written = {path.name for path in (tmp_path / "results").iterdir()}
    assert written == {"fcfs.json", "other.json", "sweep.json", "sweep.csv", "sweep.md", "sweep.png"}


def test_the_page_names_no_option_that_does_not_exist():
    from research_engine import chat
    from research_engine.bench import offline, serve_options, step

    parts = [serve_options.TargetOptions, serve_options.DatasetOptions, serve_options.TrafficOptions,
             serve_options.SamplingOptions, serve_options.ReportOptions, chat.ChatOptions,
             offline.LatencyOptions, step.StepOptions]  # fmt: skip
    known = {f"--{name.replace('_', '-')}" for part in parts for name in part.__dataclass_fields__}
    known |= {"--no-self-timed", "--streams", "--seconds"}
    text = PAGE.read_text(encoding="utf-8").replace(engine_rows(), "")
    assert set(re.findall(r"--[a-z][\w-]*", text)) - known == set()


def engine_rows() -> str:
    """The table of what to turn on the server, whose flags are the server's."""
    text = PAGE.read_text(encoding="utf-8")
    begin = text.index("| symptom |")
    return text[begin : text.index("\n\n", begin)]
