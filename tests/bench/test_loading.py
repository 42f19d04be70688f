"""The loading benchmark reports a real load, and refuses what has no files."""

from __future__ import annotations

from pathlib import Path

import pytest

from research_engine.bench.loading import LoadBenchOptions, main
from research_engine.loading import LoadError
from tests.models.tiny_llama import make_reference, saved


def test_it_says_what_was_loaded_and_how_fast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(make_reference(num_hidden_layers=1), tmp_path)
    assert main(LoadBenchOptions(str(tmp_path), dtype="bfloat16", device="cpu", repeats=1)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "GiB in 1 files to torch.bfloat16 on cpu" in said and "GB/s" in said


def test_what_has_no_files_and_no_repeats_are_refused() -> None:
    with pytest.raises(LoadError, match="dummy:tiny: has no files to load"):
        main(LoadBenchOptions("dummy:tiny", device="cpu"))
    with pytest.raises(ValueError, match="repeats = 0: must be >= 1"):
        LoadBenchOptions("dummy:tiny", repeats=0)
