"""Public traces: read as published, replaced by their statistics when absent, named when damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from experiments.workloads import WorkloadSettings, build_workload, text_lengths
from experiments.workloads.fits import SHARES, Fit, fit_of, shipped_fits
from experiments.workloads.public_traces import all_fits
from experiments.workloads.samples import WorkloadError
from experiments.workloads.trace_files import TRACES

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
2023-11-16 18:15:51.3910170,91,16
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 0, "input_length": 1024, "output_length": 6, "hash_ids": [7, 8]},
    {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [7, 11]},
    {"timestamp": 5999, "input_length": 512, "output_length": 8, "hash_ids": [12]},
]
VTC = {"result": {"responses": [
    {"adapter_dir": "lora-2", "prompt_len": 5, "output_len": 3, "req_time": 1.5},
    {"adapter_dir": "lora-13", "prompt_len": 4, "output_len": 2, "req_time": 0.5},
]}}  # fmt: skip
FILES = {
    "AzureLLMInferenceTrace_conv.csv": AZURE,
    "mooncake_conversation_trace.jsonl": "\n".join(map(json.dumps, MOONCAKE)),
    "etalon_bwb_4k.csv": "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n1047,1368,2415,0.7\n",
    "vtc_real_FCFS.jsonl": json.dumps(VTC) + "\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv(TRACES, str(tmp_path))
    return tmp_path


def arrivals(count: int, lengths: dict[str, Any], seed: int = 0, **more: Any) -> list[Any]:
    settings = WorkloadSettings(num_requests=count, lengths=lengths, **more)
    return build_workload(settings, seed, vocab_size=50_000).arrivals


def lengths_of(made: list[Any]) -> list[tuple[int, int]]:
    return [(len(a.prompt_token_ids), a.sampling.max_tokens) for a in made]


def test_azures_requests_come_at_their_recorded_times(folder: Path) -> None:
    made = arrivals(4, {"source": "azure", "order": "file"}, arrivals={"process": "trace"})
    assert lengths_of(made) == [(374, 44), (396, 109), (879, 55), (91, 16)]
    assert [a.time for a in made] == pytest.approx([0.0, 4.314579, 4.541877, 4.710427], abs=1e-6)


def test_a_recorded_process_is_stretched_to_a_rate(folder: Path) -> None:
    made = arrivals(4, {"source": "azure", "order": "file"}, arrivals={"process": "trace", "rate": 6.0})
    assert made[-1].time == pytest.approx(0.5)
    assert made[1].time / made[-1].time == pytest.approx(4.314579 / 4.710427, rel=1e-5)


def test_a_window_is_a_run_of_records_that_the_seed_chooses(folder: Path) -> None:
    seen = {tuple(lengths_of(arrivals(2, {"source": "azure", "order": "window"}, seed))) for seed in range(20)}
    whole = [(374, 44), (396, 109), (879, 55), (91, 16)]
    assert seen == {tuple(whole[i : i + 2]) for i in range(3)}


def test_prompts_of_mooncake_share_the_prefixes_that_their_hashes_share(folder: Path) -> None:
    first, second, third, fourth = (a.prompt_token_ids for a in arrivals(4, {"source": "mooncake", "order": "file"}))
    assert [len(prompt) for prompt in (first, second, third, fourth)] == [1100, 1024, 600, 512]
    assert first[:1024] == second
    assert first[:512] == third[:512]
    assert first[512:600] != third[512:]
    assert fourth[:10] != first[:10]


def test_ticks_of_mooncake_are_spread_and_keep_their_order(folder: Path) -> None:
    made = arrivals(4, {"source": "mooncake", "order": "file"}, arrivals={"process": "trace"})
    times = [a.time for a in made]
    assert times == sorted(times)
    assert len(set(times)) == 4
    assert 0 <= times[-1] <= 9.0
    other = arrivals(4, {"source": "mooncake", "order": "file"}, 1, arrivals={"process": "trace"})
    assert [a.time for a in other] != times


def test_the_arena_log_names_its_clients_and_a_share_overrides_them(folder: Path) -> None:
    made = arrivals(2, {"source": "vtc", "order": "file"}, arrivals={"process": "trace"})
    assert [(a.client, a.time) for a in made] == [("client-13", 0.0), ("client-2", 1.0)]
    assert lengths_of(made) == [(4, 2), (5, 3)]
    shared = arrivals(2, {"source": "vtc", "order": "file"}, clients={"only": 1.0})
    assert {a.client for a in shared} == {"only"}


def test_vidurs_length_files_are_read(folder: Path) -> None:
    assert lengths_of(arrivals(1, {"source": "etalon", "trace": "bwb_4k"})) == [(1047, 1368)]


def test_any_columns_are_read_by_a_map_with_times_and_clients(folder: Path) -> None:
    (folder / "own.jsonl").write_text(
        '{"in": 5, "out": 2, "ms": 1000, "who": "a"}\n{"in": 6, "out": 3, "ms": 1500, "who": "b"}\n'
    )
    lengths = {"source": "file", "path": "own.jsonl", "prompt_column": "in", "output_column": "out", "min_tokens": 1,
               "time_column": "ms", "time_scale": 0.001, "client_column": "who", "order": "file"}  # fmt: skip
    made = arrivals(2, lengths, arrivals={"process": "trace"})
    assert [(a.time, a.client) for a in made] == [(0.0, "a"), (pytest.approx(0.5), "b")]


def test_an_absent_trace_is_replaced_by_its_statistics_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACES, str(tmp_path))
    settings = WorkloadSettings(num_requests=50, lengths={"source": "azure", "max_prompt": 3000})
    workload = build_workload(settings, 0, vocab_size=9)
    assert workload.origin == "statistics of Azure 2023 conversation, random tokens"
    assert "AzureLLMInferenceTrace_conv_2023.csv" in workload.warnings[0]
    assert workload.statistics["longest_prompt"] <= 3000
    assert settings.files() == []
    with pytest.raises(WorkloadError, match="order: file needs the file AzureLLMInferenceTrace_conv_2023.csv"):
        arrivals(2, {"source": "azure", "order": "file"}, arrivals={"process": "trace"})
    with pytest.raises(WorkloadError, match="no file 'gone.csv', nor in"):
        arrivals(2, {"source": "file", "path": "gone.csv"})


@pytest.mark.parametrize(
    ("name", "text", "lengths", "told"),
    [
        ("AzureLLMInferenceTrace_conv.csv", "TIMESTAMP,ContextTokens\nx,1\n", {"source": "azure"},
         "record 1: no column 'GeneratedTokens'; valid ones, nearest first: "),
        ("AzureLLMInferenceTrace_conv.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", {"source": "azure"},
         "TIMESTAMP = 'noon' is neither a number of seconds nor a date"),
        ("AzureLLMInferenceTrace_conv.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nNaT,1,2\n", {"source": "azure"},
         "TIMESTAMP = 'NaT' is neither a number of seconds nor a date"),
        ("AzureLLMInferenceTrace_conv.csv", f"TIMESTAMP,ContextTokens,GeneratedTokens\n0,1,{10**18}\n",
         {"source": "azure"}, "is no number of tokens up to 100,000,000"),
        ("vtc_real_FCFS.jsonl", json.dumps({"result": {"responses": [{"adapter_dir": "a-1", "prompt_len": "x",
         "output_len": 1, "req_time": 0}]}}), {"source": "vtc"}, "response 1: prompt_len = 'x' is no number of tokens"),
        ("vtc_real_FCFS.jsonl", json.dumps({"result": {"responses": [{"adapter_dir": 3, "prompt_len": 1,
         "output_len": 1, "req_time": 0}]}}), {"source": "vtc"}, "no results of the VTC artifact: AttributeError"),
        ("mooncake_conversation_trace.jsonl", json.dumps(MOONCAKE[2] | {"hash_ids": [1]}), {"source": "mooncake"},
         "a hash for every 512 of 600 tokens"),
        ("vtc_real_FCFS.jsonl", "{}", {"source": "vtc"}, "no results of the VTC artifact: KeyError"),
    ],
)  # fmt: skip
def test_a_damaged_trace_is_named(folder: Path, name: str, text: str, lengths: dict[str, Any], told: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(WorkloadError, match=told):
        arrivals(1, lengths)


def test_times_of_day_count_their_offset_from_utc(tmp_path: Path) -> None:
    times = ("2023-11-16T18:00:00Z", "2023-11-16 20:00:01+02:00", "2023-11-16 18:00:02.5")
    (tmp_path / "own.csv").write_text("prompt_tokens,output_tokens,at\n" + "".join(f"9,9,{time}\n" for time in times))
    lengths = {"source": "file", "path": str(tmp_path / "own.csv"), "time_column": "at", "order": "file"}
    found = arrivals(3, lengths, arrivals={"process": "trace"})
    assert [arrival.time for arrival in found] == [0.0, 1.0, 2.5]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"lengths": {"source": "azure"}}, "needs lengths.order: file or window"),
        ({"lengths": {"source": "fixed", "prompt": 1, "output": 1}}, "lengths of source fixed have no times"),
        ({"lengths": {"source": "etalon", "order": "file"}}, "lengths of source etalon have no times"),
    ],
)
def test_recorded_times_need_a_source_in_its_order(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        WorkloadSettings(arrivals={"process": "trace"}, **more)


def test_times_that_do_not_ascend_are_refused(folder: Path) -> None:
    (folder / "own.csv").write_text("prompt_tokens,output_tokens,t\n9,9,2\n9,9,1\n")
    lengths = {"source": "file", "path": "own.csv", "time_column": "t", "order": "file"}
    with pytest.raises(WorkloadError, match="must ascend, and record 2 is earlier"):
        arrivals(2, lengths, arrivals={"process": "trace"})


def test_lengths_drawn_from_a_fit_have_its_quantiles_and_its_correlation() -> None:
    from scipy.stats import spearmanr

    for fit in shipped_fits().values():
        prompts, outputs = fit.draw(40_000, np.random.default_rng(1))
        for drawn, quantiles in ((prompts, fit.prompt), (outputs, fit.output)):
            for share in (0.1, 0.5, 0.9):
                wanted = quantiles[SHARES.index(share)]
                assert np.mean(np.array(drawn) <= wanted + 0.5) >= share - 0.01
                assert np.mean(np.array(drawn) < wanted - 0.5) <= share + 0.01
        assert spearmanr(prompts, outputs).statistic == pytest.approx(fit.spearman, abs=0.03)


@pytest.fixture(scope="module")
def fits_made_again() -> dict[str, Fit]:
    folder = os.environ.get("RESEARCH_ENGINE_TRACES")
    if not folder or not Path(folder).is_dir():
        pytest.skip("RESEARCH_ENGINE_TRACES is not set: it names a folder with public traces")
    return all_fits(Path(folder))


@pytest.mark.parametrize("name", shipped_fits())
def test_the_shipped_statistics_are_those_of_the_file(name: str, fits_made_again: dict[str, Fit]) -> None:
    fit, made = shipped_fits()[name], fits_made_again.get(name)
    if made is None:
        pytest.skip(f"RESEARCH_ENGINE_TRACES lacks the file of {name}")
    assert made.records == fit.records
    assert made.prompt == pytest.approx(fit.prompt, rel=1e-4)
    assert made.output == pytest.approx(fit.output, rel=1e-4)
    assert made.spearman == pytest.approx(fit.spearman, abs=1e-4)
    for found, shipped in ((made.rate, fit.rate), (made.cv, fit.cv)):
        assert found is shipped is None or found == pytest.approx(shipped, rel=1e-4)


def test_a_fit_is_scaled_to_means_within_the_bounds() -> None:
    lengths = {"source": "fitted", "trace": "sharegpt_first_round", "means": [161.31, 337.99], "max_total": 2047}
    made = lengths_of(arrivals(20_000, lengths))
    prompts, outputs = np.array(made).T
    assert max(prompts + outputs) <= 2047
    assert prompts.mean() == pytest.approx(161.31, rel=0.03)
    assert outputs.mean() == pytest.approx(337.99, rel=0.03)


@pytest.mark.parametrize(
    ("means", "told"),
    [
        ([0.5, 10], r"\[0.5, 10.0\] must be two numbers of tokens >= 1"),
        ([5000, 300], r"means = \[5000.0, 300.0\]: no factors give them within the bounds"),
    ],
)
def test_means_that_cannot_be_had_are_refused(means: list[float], told: str) -> None:
    lengths = {"source": "fitted", "trace": "sharegpt", "means": means, "max_total": 2047}
    with pytest.raises((ValidationError, WorkloadError), match=told):
        arrivals(3, lengths)


def test_texts_become_lengths_first_rounds_alone(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"x": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    def talk(name: str, *turns: tuple[str, int]) -> dict[str, Any]:
        return {"id": name, "conversations": [{"from": who, "value": " ".join("x" * n)} for who, n in turns]}

    records = [
        talk("a_0", ("human", 3), ("gpt", 5), ("human", 1), ("gpt", 1)),
        talk("a_1", ("human", 7), ("gpt", 7)),  # goes on with a_0
        talk("b", ("gpt", 2), ("human", 2), ("gpt", 2)),  # does not begin with the user
        talk("c", ("human", 2000), ("gpt", 48)),  # too long together
        talk("d", ("human", 2000), ("gpt", 47)),
        talk("e", ("human", 4)),
        {"instruction": "x x", "input": "x", "output": "x x x x"},
        {"instruction": "x x", "input": "", "output": "x"},
        ["neither"],
    ]
    (tmp_path / "texts.json").write_text(json.dumps(records))
    text_lengths.main(tmp_path / "texts.json", tmp_path / "tokenizer.json", tmp_path / "out.csv")
    rows = (tmp_path / "out.csv").read_text().split()
    assert rows == ["prompt_tokens,output_tokens", "3,5", "2000,47", "3,4", "2,1"]


def test_a_fit_of_times_gives_rate_and_burstiness() -> None:
    fit = fit_of("x", [1, 2, 3], [3, 2, 1], [0.0, 1.0, 4.0])
    assert (fit.rate, fit.cv, fit.spearman) == (0.5, 0.5, pytest.approx(-1.0))
