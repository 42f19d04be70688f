"""The loading benchmark reports a real load, writes a dummy's files first, and refuses what has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from research_engine.bench import loading as loading_bench
from research_engine.bench.loading import LoadBenchOptions, main, write_dummy
from research_engine.loading import load_model, resolve_model
from tests.models.tiny_llama import make_reference, saved


def test_it_says_what_was_loaded_and_how_fast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(make_reference(num_hidden_layers=1), tmp_path)
    assert main(LoadBenchOptions(str(tmp_path), dtype="bfloat16", device="cpu", repeats=1)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "GiB in 1 files to torch.bfloat16 on cpu" in said and "GB/s" in said


def test_a_dummy_is_written_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_bench, "_SHARD_BYTES", 200_000)
    assert main(LoadBenchOptions("dummy:tiny", device="cpu", repeats=1, scratch=tmp_path)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "dummy:tiny: 0.00 GiB in 10 files to torch.float32 on cpu" in said and "; peak " in said
    assert not list(tmp_path.iterdir())
    write_dummy("dummy:tiny", tmp_path, torch.float32, torch.device("cpu"))
    made = load_model(resolve_model("dummy:tiny"), dtype=torch.float32, device="cpu", progress=False)
    read = load_model(resolve_model(str(tmp_path)), dtype=torch.float32, device="cpu", progress=False)
    assert torch.equal(*(model.compute_logits(torch.ones(1, 128)) for model in (made, read)))


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model = 'dummy:tiny-awq': a quantised dummy has no files' form"):
        main(LoadBenchOptions("dummy:tiny-awq", device="cpu"))
    with pytest.raises(ValueError, match="scratch = '.*none': there is no such directory"):
        LoadBenchOptions("dummy:tiny", scratch=tmp_path / "none")
    with pytest.raises(ValueError, match="repeats = 0: must be >= 1"):
        LoadBenchOptions("dummy:tiny", repeats=0)
