"""Kernels as trials: factors of shape, path, split and dtype; the same timing and check as the kernels' benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from experiments.config import load_experiment
from experiments.kernel_settings import KernelSettings
from experiments.plan import trial_key
from tests.experiments.test_config import mistake
from tests.experiments.test_launchers import run

pytest.importorskip("research_engine._C")

KERNELS = """\
description: test
measures: kernels
base:
  op: decode
  sizes: {B: 2, L: 64, Hq: 4, Hkv: 2, D: 32, block: 16}
  device: cpu
  repeats: 3
factors:
  sizes.block: [8, 16]
seeds: [0, 1]
baseline: {sizes.block: 16}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.yaml"
    path.write_text(KERNELS)
    return path


def test_block_size_and_split_are_factors_and_the_table_has_times(file: Path, tmp_path: Path) -> None:
    from experiments.launcher import InTurn

    out = tmp_path / "run"
    report = run(file, out, "factors.split_size=[null, 32]", launcher=InTurn())
    assert (report.finished, report.failed) == (8, {})
    table = (out / "table.md").read_text()
    assert "| Time P50 (us) |" in table and "| Share of roofline (%) |" in table
    assert (out / "bars.png").exists()
    for trial in (out / "trials").iterdir():
        assert len(pd.read_parquet(trial / "runs.parquet")) == 3
        summary = json.loads((trial / "summary.json").read_text())
        assert summary["metrics"]["relative_error"] < 1e-4
        assert summary["kernel"]["shape"].startswith("2x64:4/2/32:")
    assert run(file, out, "factors.split_size=[null, 32]", launcher=InTurn()).reused == 8


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("op: decode", "op: decod", "line 4: op = 'decod': no op 'decod'; valid ones, nearest first: decode"),
        ("B: 2,", "", "sizes: decode needs B (its form is BxL:Hq/Hkv/D:block)"),
        ("B: 2,", "B: 2, T: 3,", "decode has no size 'T'; valid ones, nearest first: "),
        ("Hq: 4", "Hq: 5", "Hq = 5 has to be a multiple of Hkv = 2"),
        ("device: cpu", "path: fast", "path 'fast'; valid ones, nearest first: "),
        ("device: cpu", "variant: {stage: 3}", "no parameter 'stage'; valid ones, nearest first: stages"),
        ("device: cpu", "variant: {stages: 9}", "variant of decode: stages = 9; one of 8, 7"),
        ("device: cpu", "variant: {source: nowhere.cuh}", "source = 'nowhere.cuh': there is no such file"),
        ("device: cpu", "path: simple\n  variant: {stages: 3}", "path 'simple' has none; leave path out, or 'decode'"),
        ("op: decode", "op: rms_norm", "sizes: rms_norm has no size 'B'"),
        ("repeats: 3", "workload: {}", "unknown key 'workload'"),
    ],
)
def test_an_impossible_kernel_is_refused_before_anything_runs(file: Path, old: str, new: str, told: str) -> None:
    assert told in mistake(file, old, new)


def test_a_split_of_what_cannot_be_split_is_refused(file: Path) -> None:
    told = mistake(file, "op: decode\n  sizes: {B: 2, L: 64, Hq: 4, Hkv: 2, D: 32, block: 16}",
                   "op: rms_norm\n  sizes: {T: 2, H: 8}\n  split_size: 4", "factors={}", "baseline={}")  # fmt: skip
    assert "split_size: rms_norm has nothing to split" in told


def test_a_path_of_another_device_is_refused_before_anything_runs(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiments.config import ConfigError
    from experiments.launcher import InTurn

    with pytest.raises(ConfigError, match="path = 'decode_fma': decode on cpu has auto"):
        run(file, tmp_path / "run", "path=decode_fma", launcher=InTurn())
    assert not (tmp_path / "run").exists()


def test_kernels_have_no_scheduler_to_check(file: Path) -> None:
    _, cells = load_experiment(str(file), ["factors={}", "baseline={}"])
    assert [cell.label for cell in cells] == ["decode"]


def test_numbers_of_a_variant_are_factors(file: Path) -> None:
    _, cells = load_experiment(str(file), ["factors.variant.stages=[2, 3]", "factors.variant.warps=[8]", "baseline={}"])
    paths = {cell.settings.kernel_path for cell in cells if isinstance(cell.settings, KernelSettings)}
    assert paths == {"decode[stages=2,warps=8]", "decode[stages=3,warps=8]"}


def test_an_op_without_variants_is_refused(file: Path) -> None:
    told = mistake(file, "op: decode\n  sizes: {B: 2, L: 64, Hq: 4, Hkv: 2, D: 32, block: 16}",
                   "op: rms_norm\n  sizes: {T: 2, H: 8}\n  variant: {stages: 2}",
                   "factors={}", "baseline={}")  # fmt: skip
    assert "variant: rms_norm has none; decode, decode_float8, prefill have" in told


def test_a_variant_on_a_cpu_is_refused_before_anything_runs(file: Path, tmp_path: Path) -> None:
    from experiments.config import ConfigError
    from experiments.launcher import InTurn

    with pytest.raises(ConfigError, match="compiled for CUDA devices alone, and this is cpu"):
        run(file, tmp_path / "run", "variant.stages=3", launcher=InTurn())
    assert not (tmp_path / "run").exists()


def test_an_edit_of_a_variants_source_or_of_its_header_is_another_trial(tmp_path: Path) -> None:
    source, header = tmp_path / "my.cuh", tmp_path / "part.h"
    source.write_text('#include "part.h"\n')
    header.write_text("// one\n")
    settings = KernelSettings(op="decode", sizes={"B": 1, "L": 16}, variant={"source": str(source)})
    keys = [trial_key(settings, 0)]
    header.write_text("// two\n")
    keys.append(trial_key(settings, 0))
    source.write_text('#include "part.h"\n// three\n')
    keys.append(trial_key(settings, 0))
    assert len(set(keys)) == 3
