"""The recorded steps of a run directory, for calibration."""

from __future__ import annotations

from pathlib import Path

from research_engine.engine.records import StepRecord


def read_steps(run: Path) -> list[StepRecord]:
    """The steps of every real trial of a run by `experiments/run.py`, or of one trial's directory.

    Raises:
        ValueError: there is no run, none of its trials is real, or a file has other columns; names it.
    """
    import json

    import pandas as pd

    from research_engine.metrics import read_frames

    files = [run / "steps.parquet"] if (run / "steps.parquet").exists() else sorted(run.glob("trials/*/steps.parquet"))
    if not files:
        raise ValueError(f"{run}: no run directory: neither steps.parquet nor trials/*/steps.parquet is there")
    steps: list[StepRecord] = []
    for file in files:
        try:
            if json.loads((file.parent / "summary.json").read_text(encoding="utf-8")).get("kind") != "real":
                continue
            frames = [pd.read_parquet(file.parent / f"{name}.parquet") for name in ("requests", "steps")]
            steps += read_frames(*frames).steps
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file.parent}: no recorded trial: {error}") from error
    if not steps:
        raise ValueError(f"{run}: every trial is simulated; a profile is fitted to real steps")
    return steps
