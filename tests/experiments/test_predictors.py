"""Length predictors: as good as asked for, with randomness of their own, and errors of a real one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from experiments.workloads import WorkloadSettings, build_workload
from experiments.workloads.predictors import Predictions, kendall_tau, predict
from experiments.workloads.samples import WorkloadError

TRACES = os.environ.get("RESEARCH_ENGINE_TRACES")
FILE = "ssjf_predictions_warmup_multi_cls.csv"


def predictions(true: list[int], seed: int = 0, **predictor: Any) -> Predictions:
    settings = WorkloadSettings(predictor=predictor).predictor
    return predict(settings, true, np.random.default_rng(seed))


def lengths(count: int, seed: int = 3) -> list[int]:
    return np.rint(np.random.default_rng(seed).lognormal(4.9, 0.85, count)).clip(1).astype(int).tolist()


def test_the_oracle_tells_the_forced_length_and_none_tells_nothing() -> None:
    oracle, none = (
        build_workload(WorkloadSettings(num_requests=9, predictor={"kind": kind}), 1, vocab_size=50)
        for kind in ("oracle", "none")
    )
    assert [a.predicted_tokens for a in oracle.arrivals] == [a.sampling.max_tokens for a in oracle.arrivals]
    assert oracle.statistics["predictor_kendall_tau"] == pytest.approx(1.0)
    assert [a.predicted_tokens for a in none.arrivals] == [None] * 9


def test_a_predictor_changes_nothing_else_of_the_workload() -> None:
    first, second = (
        build_workload(WorkloadSettings(num_requests=20, arrivals={"process": "poisson", "rate": 2.0}, predictor=p), 1,
                       vocab_size=50).arrivals
        for p in ({"kind": "none"}, {"kind": "noisy", "log_std": 1.0})
    )  # fmt: skip
    assert [(a.time, a.prompt_token_ids, a.sampling) for a in first] == [
        (a.time, a.prompt_token_ids, a.sampling) for a in second
    ]
    assert all(a.predicted_tokens is not None and a.predicted_tokens >= 1 for a in second)


@pytest.mark.parametrize("wanted", [0.0, 0.1, 0.35, 0.5, 0.64, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("count", [64, 1000])
def test_noise_is_calibrated_to_a_kendall_tau(wanted: float, count: int) -> None:
    from scipy.stats import kendalltau

    for seed in range(3):
        true = lengths(count, seed)
        made = predictions(true, seed, kind="noisy", kendall_tau=wanted)
        assert abs(kendalltau(true, made.lengths).statistic - wanted) <= 0.02
        assert made.kendall_tau == pytest.approx(kendalltau(true, made.lengths).statistic)
        assert made.warnings == ()


def test_noise_of_a_given_size_is_log_normal() -> None:
    true = [10_000] * 4000
    made = predictions(true, kind="noisy", log_std=0.5)
    errors = np.log(np.array(made.lengths, dtype=float) / 10_000)
    assert abs(errors.mean()) < 0.03
    assert abs(errors.std() - 0.5) < 0.02
    assert made.kendall_tau is None  # all true lengths alike


def test_no_noise_is_the_oracle() -> None:
    true = lengths(50)
    assert predictions(true, kind="noisy", log_std=0.0).lengths == true


def test_a_tau_that_few_requests_cannot_have_is_told_with_the_nearest() -> None:
    made = predictions([10, 20, 30], kind="noisy", kendall_tau=0.6)
    assert made.kendall_tau is not None and abs(made.kendall_tau - 0.6) > 0.02
    nearest = f"the nearest, {made.kendall_tau:.3f}, is used"
    assert made.warnings == (f"of 3 requests no noise gives Kendall tau 0.6; {nearest}",)


def test_lengths_all_alike_have_no_tau_and_are_told_exactly() -> None:
    made = predictions([7] * 5, kind="noisy", kendall_tau=0.6)
    assert made.lengths == [7] * 5
    assert "all alike" in made.warnings[0]


def test_predictions_are_the_same_for_a_seed_and_others_for_another() -> None:
    true = lengths(100)
    one, again, other = (predictions(true, seed, kind="noisy", kendall_tau=0.5).lengths for seed in (1, 1, 2))
    assert one == again != other


def class_file(tmp_path: Path) -> Path:
    """Short outputs are class 0 and long ones class 1, but for one in seven of the long ones."""
    rows = [f"{i},{10 + i % 5},0,0.01" for i in range(400)]
    rows += [f"{i},{100 + i % 5},{0 if i % 7 == 0 else 1},0.01" for i in range(400)]
    path = tmp_path / "classes.csv"
    path.write_text("\n".join([",output_token_length,predicted_length,latency", *rows]) + "\n")
    return path


def test_classes_err_as_often_as_those_of_the_file(tmp_path: Path) -> None:
    path = str(class_file(tmp_path))
    made = predictions([12] * 1000 + [103] * 1000 + [5000] * 1000, kind="classes", path=path)
    short, long, beyond = (made.lengths[at : at + 1000] for at in (0, 1000, 2000))
    assert set(short) == {12}  # the median of class 0
    assert set(long) == set(beyond) == {12, 102}
    assert 90 < long.count(12) < 200 and 90 < beyond.count(12) < 200


@pytest.mark.skipif(TRACES is None, reason="RESEARCH_ENGINE_TRACES does not name the directory of public traces")
def test_classes_of_the_ssjf_file_rank_as_its_predictor_does() -> None:
    """Its own lengths get predictions of the tau-b that its predictions have, 0.63."""
    import csv

    path = Path(str(TRACES)) / FILE
    with path.open() as file:
        rows = [(int(r["output_token_length"]), int(r["predicted_length"])) for r in csv.DictReader(file)]
    true, classes = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    published = kendall_tau(true, classes)
    assert published == pytest.approx(0.635, abs=0.001)
    sample = np.random.default_rng(0).choice(true, 5000, replace=False).astype(int).tolist()
    made = predictions(sample, kind="classes", path=str(path))
    assert made.kendall_tau == pytest.approx(published, abs=0.02)


@pytest.mark.parametrize(
    ("predictor", "message"),
    [
        ({"kind": "noisy"}, "give either log_std or kendall_tau"),
        ({"kind": "noisy", "log_std": 1.0, "kendall_tau": 0.5}, "give either log_std or kendall_tau"),
        ({"kind": "noisy", "kendall_tau": 1.5}, "less than or equal to 1"),
        ({"kind": "psychic"}, "psychic"),
        ({"kind": "oracle", "log_std": 1.0}, "unknown key 'log_std'"),
    ],
)
def test_a_predictor_asked_for_wrongly_is_refused(predictor: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        WorkloadSettings(predictor=predictor)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output_token_length,klass\n3,1\n", r"no column 'predicted_length'; valid ones, nearest first: .*klass"),
        ("output_token_length,predicted_length\n3,long\n", r"record 1: .*predicted_length = 'long': must be numbers"),
        ("output_token_length,predicted_length\nnan,1\n", "output_token_length = 'nan'.*: must be numbers"),
        ("output_token_length,predicted_length\n3,1e99\n", "predicted_length = '1e99': must be numbers"),
        ("output_token_length,predicted_length\n", "it has no records"),
        ("output_token_length\udcff,predicted_length\n3,1\n", "cannot be read"),
    ],
)
def test_a_file_of_another_shape_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "odd.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(WorkloadError, match=message):
        predictions([5], kind="classes", path=str(path))
    with pytest.raises(WorkloadError, match="no file"):
        predictions([5], kind="classes", path=str(tmp_path / "none.csv"))
