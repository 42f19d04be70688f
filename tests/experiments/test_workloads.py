"""Workloads: the same for every policy, streams independent, damaged files read as far as they go."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from experiments.workloads import WorkloadSettings, build_workload
from experiments.workloads.arrivals import ArrivalSettings, arrival_times
from experiments.workloads.columns import FileLengths
from experiments.workloads.samples import WorkloadError
from experiments.workloads.sharegpt_lengths import ShareGPTLengths
from experiments.workloads.streams import stream
from experiments.workloads.synthetic import FixedLengths, LogNormalLengths, UniformLengths
from research_engine.loading.errors import LoadError
from tests.datasets.test_sharegpt import conversations


class Words:
    """Counts words."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_streams_do_not_depend_on_each_other() -> None:
    settings = {"num_requests": 20, "arrivals": {"process": "poisson", "rate": 2.0}}
    short = WorkloadSettings(**settings, lengths={"source": "fixed", "prompt": 4, "output": 4})
    other = WorkloadSettings(
        **settings, lengths={"source": "uniform", "prompt": [1, 9], "output": [1, 9]}, priorities={0: 0.5, 1: 0.5}
    )
    first, second = (build_workload(s, 5, vocab_size=50).arrivals for s in (short, other))
    assert [a.time for a in first] == [a.time for a in second]
    assert [a.sampling.seed for a in first] == [a.sampling.seed for a in second]
    assert [a.prompt_token_ids for a in first] != [a.prompt_token_ids for a in second]
    assert stream(5, "arrivals").random() != stream(5, "lengths").random() != stream(6, "lengths").random()


def test_a_seed_gives_the_same_workload_again_and_another_seed_another() -> None:
    settings = WorkloadSettings(num_requests=10, arrivals={"process": "gamma", "rate": 2.0, "cv": 3.0})
    one, again, other = (build_workload(settings, seed, vocab_size=50).arrivals for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_output_lengths_are_forced() -> None:
    settings = WorkloadSettings(num_requests=3, lengths={"source": "fixed", "prompt": 5, "output": 9})
    for arrival in build_workload(settings, 0, vocab_size=50).arrivals:
        assert arrival.sampling.ignore_eos
        assert arrival.sampling.max_tokens == 9
        assert len(arrival.prompt_token_ids) == 5


@pytest.mark.parametrize(("settings", "cv"), [({"process": "poisson"}, 1.0), ({"process": "gamma", "cv": 2.5}, 2.5),
                                              ({"process": "constant"}, 0.0)])  # fmt: skip
def test_arrivals_have_their_rate_and_burstiness(settings: dict[str, object], cv: float) -> None:
    times = arrival_times(ArrivalSettings(rate=4.0, **settings), 40_000, np.random.default_rng(0)).times  # type: ignore[arg-type]
    gaps = np.diff([0.0, *times])
    assert 1 / gaps.mean() == pytest.approx(4.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_another_rate_stretches_the_same_pattern() -> None:
    slow, fast = (arrival_times(ArrivalSettings(rate=r), 9, np.random.default_rng(3)).times for r in (1.0, 4.0))
    assert slow == pytest.approx([4 * time for time in fast])


@pytest.mark.parametrize(
    "wrong",
    [
        {"process": "poisson"},
        {"process": "at_once", "rate": 1.0},
        {"process": "gamma", "rate": 1.0},
        {"process": "poisson", "rate": 1.0, "cv": 2.0},
        {"process": "poisson", "rate": 0.0},
    ],
)
def test_arrivals_that_lack_or_waste_a_parameter_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ArrivalSettings(**wrong)  # type: ignore[arg-type]


def test_the_fit_reproduces_the_statistics_of_sharegpt() -> None:
    samples = LogNormalLengths(source="lognormal").draw(20_000, np.random.default_rng(0), None).samples
    prompt, output = (np.array([getattr(s, name) for s in samples]) for name in ("prompt_tokens", "output_tokens"))
    for values, (mean, median, p99) in ((prompt, (235.6, 108, 954)), (output, (217.4, 140, 945))):
        assert values.mean() == pytest.approx(mean, rel=0.12)
        assert np.median(values) == pytest.approx(median, rel=0.12)
        assert np.percentile(values, 99) == pytest.approx(p99, rel=0.06)


def test_the_dataset_that_cannot_be_had_is_replaced_by_its_fit_within_the_same_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline() -> Path:
        raise LoadError("no network")

    monkeypatch.setattr("experiments.workloads.sharegpt_lengths.packaged_file", offline)
    lengths = ShareGPTLengths(max_prompt=50, max_output=60).draw(30, np.random.default_rng(0), Words())
    assert lengths.origin == "log-normal fit of ShareGPT, random tokens"
    assert "no network" in lengths.warnings[0]
    assert all(4 <= s.prompt_tokens <= 50 and 4 <= s.output_tokens <= 60 for s in lengths.samples)


def test_texts_come_from_the_file_and_keep_the_bounds(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(conversations(10), encoding="utf-8")
    lengths = ShareGPTLengths(path=str(path)).draw(10, np.random.default_rng(0), Words())
    assert all(
        s.prompt_token_ids is not None and len(s.prompt_token_ids) == 8 == s.output_tokens for s in lengths.samples
    )
    with pytest.raises(WorkloadError, match="0 of 10 conversations keep the bounds, 1 are wanted"):
        ShareGPTLengths(path=str(path), max_prompt=7).draw(1, np.random.default_rng(0), Words())


def test_columns_of_csv_and_jsonl_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("num_prefill_tokens,num_decode_tokens\n10,5\n20,6\n")
    (tmp_path / "a.jsonl").write_text(
        '{"num_prefill_tokens": 10, "num_decode_tokens": 5}\n{"num_prefill_tokens": 20, "num_decode_tokens": 6}\n'
    )
    for name in ("a.csv", "a.jsonl"):
        settings = FileLengths(source="file", path=str(tmp_path / name), prompt_column="num_prefill_tokens",
                               output_column="num_decode_tokens", order="file")  # fmt: skip
        samples = settings.draw(2, np.random.default_rng(0), None).samples
        assert [(s.prompt_tokens, s.output_tokens) for s in samples] == [(10, 5), (20, 6)]
    wrong = FileLengths(source="file", path=str(tmp_path / "a.csv"), prompt_column="num_prefil_tokens")
    with pytest.raises(
        WorkloadError, match="record 1: no column 'num_prefil_tokens'; valid ones, nearest first: num_prefill_tokens"
    ):
        wrong.draw(1, np.random.default_rng(0), None)


def test_fixed_and_uniform_lengths_keep_their_bounds() -> None:
    rng = np.random.default_rng(0)
    assert {
        (s.prompt_tokens, s.output_tokens)
        for s in FixedLengths(source="fixed", prompt=3, output=2).draw(9, rng, None).samples
    } == {(3, 2)}
    drawn = UniformLengths(source="uniform", prompt=(2, 4), output=(1, 2)).draw(200, rng, None).samples
    assert {s.prompt_tokens for s in drawn} == {2, 3, 4}
    assert {s.output_tokens for s in drawn} == {1, 2}


def test_priorities_have_their_shares() -> None:
    settings = WorkloadSettings(
        num_requests=2000, priorities={-1: 0.25, 3: 0.75}, lengths={"source": "fixed", "prompt": 1, "output": 1}
    )
    drawn = [a.priority for a in build_workload(settings, 0, vocab_size=9).arrivals]
    assert set(drawn) == {-1, 3}
    assert drawn.count(-1) == pytest.approx(500, abs=80)


def test_public_length_traces_are_read() -> None:
    folder = os.environ.get("RESEARCH_ENGINE_TRACES")
    if not folder:
        pytest.skip("RESEARCH_ENGINE_TRACES is not set: it names a folder with public traces")
    path = Path(folder) / "sharegpt_v3_lengths.csv"
    if not path.exists():
        pytest.skip(f"{path.name} is not in RESEARCH_ENGINE_TRACES")
    source = FileLengths(source="file", path=str(path), order="file")
    samples = source.draw(15_417, np.random.default_rng(0), None).samples
    assert np.mean([s.prompt_tokens for s in samples]) == pytest.approx(235.6, abs=0.05)
    assert np.mean([s.output_tokens for s in samples]) == pytest.approx(217.4, abs=0.05)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", b"{bad", "cannot be read"),
        ("b.jsonl", b"[1, 2]", r"line 1: '\[1, 2\]' is no JSON object"),
        ("c.csv", b"prompt_tokens,output_tokens\n\xff,3\n", "cannot be read"),
        ("d.txt", b"", ".csv and .jsonl"),
    ],
)
def test_a_file_of_lengths_that_cannot_be_read_is_named(name: str, content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    settings = FileLengths(source="file", path=str(tmp_path / name))
    with pytest.raises(WorkloadError, match=named):
        settings.draw(1, np.random.default_rng(0), None)


def test_clients_send_their_shares_and_change_nothing_else() -> None:
    one, two = (
        build_workload(WorkloadSettings(num_requests=400, clients=clients), 1, vocab_size=50).arrivals
        for clients in ({"": 1.0}, {"heavy": 0.75, "light": 0.25})
    )
    assert {a.client for a in one} == {""}
    assert 260 < [a.client for a in two].count("heavy") < 340
    assert [(a.prompt_token_ids, a.sampling, a.priority) for a in one] == [
        (a.prompt_token_ids, a.sampling, a.priority) for a in two
    ]
    with pytest.raises(ValidationError, match="must be above 0 and sum to 1"):
        WorkloadSettings(clients={"a": 0.5})
