"""`| head`: whatever writes to a reader that has gone ends with 141 and no word; another broken pipe is still told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from research_engine.closed_pipe import ending_quietly

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "own help": ["-m", "research_engine.cli", "--help"],
    "a command's help": ["-m", "research_engine.cli", "capacity", "--help"],
    "a server's help": ["-m", "research_engine.cli", "serve", "--help"],
    "an answer": ["-m", "research_engine.cli", "--version"],
    "experiments": ["experiments/run.py", "--list"],
    "help of experiments": ["experiments/run.py", "--help"],
    "a command that catches OSError": ["experiments/run.py", "quickstart", "model=dummy:tiny", "--dry-run"],
}
PROGRAM = "from research_engine.closed_pipe import ending_quietly\n{body}\nraise SystemExit(ending_quietly(main))"
BODIES = {
    "a table of rich": "def main():\n    from rich.console import Console\n    Console().print('x'); return 0",
    "unbuffered": "def main():\n    print('x', flush=True); return 0",
    "a user's mistake with code 2": "def main():\n    print('x'); return 2",
}


def written_to_nobody(arguments: list[str], *, stderr: int | None = None) -> tuple[int, str]:
    """Exit code and standard error of Python with a pipe as output whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdout=writer,
            stderr=writer if stderr is not None else subprocess.PIPE,
            cwd=ROOT,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_command_whose_reader_has_gone_ends_quietly(arguments):
    code, told = written_to_nobody(arguments)
    assert code in (0, 141) and told == ""  # argparse passes over a failing write of its help itself, which leaves 0


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_every_way_of_writing_ends_quietly(body):
    assert written_to_nobody(["-c", PROGRAM.format(body=body)]) == (141, "")


def test_errors_that_nobody_reads_end_quietly_too():
    assert written_to_nobody(["-m", "research_engine.cli", "docter"], stderr=subprocess.STDOUT)[0] == 141


def test_a_pipe_to_a_worker_that_breaks_is_a_fault_of_ours():
    def main() -> int:
        raise BrokenPipeError("the worker's")

    with pytest.raises(BrokenPipeError, match="the worker's"):
        ending_quietly(main)


@pytest.mark.parametrize("code", [0, 2])
def test_an_exit_code_is_passed_on(code):
    assert ending_quietly(lambda: code) == code


def test_a_server_outlives_the_reader_of_its_first_line():
    code = PROGRAM.format(
        body="import os\ndef main():\n    print('serving', flush=True); os.read(0, 1)\n"
        "    a, b = os.pipe(); os.close(a)\n"
        "    try:\n        os.write(b, b'x')\n    except BrokenPipeError:\n        return 7"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as own:
        assert own.stdin is not None and own.stdout is not None
        assert own.stdout.readline() == b"serving\n"
        own.stdout.close()
        own.stdin.write(b"x")
        own.stdin.close()
        assert own.wait(60) == 7  # a client that hangs up is an exception for the server, not its end
