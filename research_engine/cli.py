"""The command line, `research-engine COMMAND ...`: finds the command's function, which alone is imported, and runs it.

Exit codes: 0 for success, 2 for a user's mistake, 1 for a failure of ours, 130 for Ctrl-C, 141 when nobody reads the
output any more.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from research_engine.closed_pipe import ending_quietly


class Command(NamedTuple):
    """`module:function`, whose typed parameters become the command's arguments and which returns an exit code.

    One that `parses_itself` takes the words after the command instead.
    """

    target: str
    summary: str
    parses_itself: bool = False


COMMANDS = {
    "serve": Command(
        "research_engine.server.serve:main", "a model over HTTP with OpenAI's protocol", parses_itself=True
    ),
    "doctor": Command(
        "research_engine.doctor:main", "what was built, what this machine has, and what to do about the rest"
    ),
    "memory": Command("research_engine.memory:main", "what a GPU's memory would go to, from config.json alone"),
    "chat": Command("research_engine.chat:main", "talk to a model in the terminal, over HTTP or in this process"),
    "bench serve": Command(
        "research_engine.bench.serve:main", "load on a server: latency, throughput, goodput, saturation point"
    ),
    "bench compare": Command("research_engine.bench.compare:main", "results of bench serve against each other"),
    "bench client": Command(
        "research_engine.bench.client_ceiling:main", "how much load bench serve can make and read on this machine"
    ),
    "bench throughput": Command(
        "research_engine.bench.offline:throughput", "a pile of requests offline, alone or beside vLLM"
    ),
    "bench latency": Command(
        "research_engine.bench.offline:latency", "time per output token and to the first, alone or beside vLLM"
    ),
    "bench engine": Command(
        "research_engine.bench.engine:main", "throughput, latency, energy and memory in one go, alone or beside vLLM"
    ),
    "bench step": Command(
        "research_engine.bench.step:main", "where the time of a decode step goes, host and device, with a picture"
    ),
    "new scheduler": Command("research_engine.new.scheduler:main", "a policy of your own to begin with, and its test"),
    "explain": Command(
        "research_engine.explain.command:main", "the life of one request of a run, in words and as a timeline"
    ),
    "bench cpu": Command(
        "research_engine.bench.cpu:main", "decode and prefill against transformers; --loop: host time"
    ),
    "bench embed": Command(
        "research_engine.bench.embed:main", "texts to vectors on this CPU against sentence-transformers"
    ),
    "profile": Command(
        "research_engine.calibration.profile:main", "measure this machine for the simulator: a profile with its error"
    ),
    "bench load": Command(
        "research_engine.bench.loading:main", "a model from the page cache: seconds, bytes per second"
    ),
    "validate": Command(
        "experiments.validation.command:main", "the simulator against this machine: same arrivals, signed errors"
    ),
    "capacity": Command(
        "experiments.capacity.command:main", "the highest rate within limits on latency, simulated; GPUs for a traffic"
    ),
    "bench server": Command(
        "research_engine.bench.server:main",
        "the HTTP server around a stub engine, against plain FastAPI; --soak: leaks",
    ),
    "bench scheduler": Command(
        "research_engine.bench.scheduler:main", "a decision with a long queue, every policy; the loop against vLLM's"
    ),
    "bench kernels": Command(
        "research_engine.bench.kernels:main", "the ops against the measured roofline, torch and other libraries"
    ),
    "compare": Command("experiments.compare:main", "two runs: what differs in configuration, environment and result"),
    "report": Command("experiments.report_command:main", "tables, plots and the page of finished runs, made again"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; `args` are those of the process when None. Returns the exit code."""
    words = list(sys.argv[1:] if args is None else args)
    return ending_quietly(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        from research_engine import __version__

        print(f"research_engine {__version__}")
        return 0
    name = next((name for name in COMMANDS if words[: name.count(" ") + 1] == name.split()), None)
    if name is None:
        return _unknown(words)
    import tyro

    try:
        function = _import(COMMANDS[name].target)
        if COMMANDS[name].parses_itself:
            return function(words[name.count(" ") + 1 :])
        return tyro.cli(function, prog=f"research-engine {name}", args=words[name.count(" ") + 1 :])
    except ValueError as error:  # the project's word for a wrong value, and the message says which
        print(f"research-engine {name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # of a place that was named: not there, not allowed, full; any other is a fault of ours
        places = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
        if not isinstance(error, places) and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise
        print(f"research-engine {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _import(target: str) -> Callable[..., int]:
    module, _, function = target.partition(":")
    found: Callable[..., int] = getattr(importlib.import_module(module), function)
    return found


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    usage = "usage: research-engine COMMAND [--help] [options]"
    return "\n".join([usage, "", "commands:", *lines, "", "research-engine COMMAND --help lists a command's options."])


def _unknown(words: Sequence[str]) -> int:
    """Says which commands there are: those of the group when its name alone was given, else all, nearest first."""
    group = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print("\n".join(f"research-engine {name}: {COMMANDS[name].summary}" for name in group))
        return 0 if len(words) > 1 else 2
    given = " ".join(words[:2] if group else words[:1])
    near = sorted(COMMANDS, key=lambda name: -difflib.SequenceMatcher(None, given, name).ratio())
    print(f"research-engine: no command {given!r}; there are, nearest first: {', '.join(near)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
