"""`research-engine explain RUN REQUEST`: finds the trial, reads what it left behind, and tells a request's life."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from research_engine.engine.decision_log import DecisionLog
from research_engine.engine.records import Records

from .life import life_of
from .picture import draw, terminal
from .words import tell

DECISIONS = "decisions.jsonl"


def main(
    run: Annotated[Path, tyro.conf.Positional],
    request: Annotated[str, tyro.conf.Positional],
    /,
    *,
    trial: str = "",
    out: Path | None = None,
    others: int = 8,
) -> int:
    """Tell the life of one request: arrived, waited behind whom and why, admitted, preempted by whom, finished.

    Args:
        run: directory of a run made with --explain, or of one of its trials.
        request: its id; those of experiments are request-0000, request-0001 ...
        trial: which trial of the run, by a part of its directory's name, such as vtc-seed0.
        out: where the picture goes (.png, .pdf or .svg); explain-REQUEST.png in the trial's directory by default.
        others: so many other requests are drawn beside it at most.
    """
    if others < 0:
        raise ValueError(f"others = {others}: must be >= 0")
    if out is not None and out.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"out = {out}: its name must end with .png, .pdf or .svg")
    directory = find_trial(run, trial)
    records, log = read_trial(directory)
    life = life_of(records, log.decisions, request, others=others)
    console = Console(highlight=False)
    console.print(f"{directory.name}, policy {log.policy}", style="bold", markup=False)
    lines = tell(life)
    refused = _refusals(directory).get(request)
    if refused is not None and life.record.finish_reason == "refused":
        lines[-1] = f"It was refused when it was added: {refused}"
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if life.events:
        console.print()
        console.print(terminal(life, max(40, console.width)), end="", soft_wrap=True)
        path = out or directory / f"explain-{re.sub('[^A-Za-z0-9._-]+', '-', request)}.png"
        draw(life, path)
        console.print(f"picture: {path}", markup=False, soft_wrap=True)
    return 0


def find_trial(run: Path, trial: str) -> Path:
    """The directory of the one trial that is meant.

    Raises:
        ValueError: none, or several, or one without a decision log; says what there is.
    """
    if not run.is_dir():
        raise ValueError(f"no directory {str(run)!r}")
    if (run / "requests.parquet").is_file():
        found = [run]
    else:
        found = sorted(path.parent for path in run.glob("trials/*/requests.parquet"))
    names = ", ".join(path.name for path in found)
    chosen = [path for path in found if trial in path.name]
    if not found:
        raise ValueError(f"{run} is no run directory: it holds no trials that have finished")
    if not chosen:
        raise ValueError(f"no trial {trial!r} in {run}; there are: {names}")
    if len(chosen) > 1:
        raise ValueError(f"{len(chosen)} trials are meant; name one by --trial: {', '.join(p.name for p in chosen)}")
    if not (chosen[0] / DECISIONS).is_file():
        raise ValueError(f"{chosen[0]} holds no {DECISIONS}: run the experiment again with --explain")
    return chosen[0]


def read_trial(directory: Path) -> tuple[Records, DecisionLog]:
    """The records and the decisions that a trial left behind."""
    import pandas as pd

    from research_engine import metrics

    frames = [pd.read_parquet(directory / f"{name}.parquet") for name in ("requests", "steps")]
    return metrics.read_frames(*frames), DecisionLog.read(directory / DECISIONS)


def _refusals(directory: Path) -> dict[str, str]:
    """Request id -> why, of those that were refused."""
    path = directory / "summary.json"
    refused = json.loads(path.read_text(encoding="utf-8")).get("refused", {}) if path.is_file() else {}
    return dict(refused)
