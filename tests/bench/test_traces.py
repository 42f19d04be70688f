"""Traces in the forms in which they are published: lengths, times, and errors that name the record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from research_engine.bench.traces import TraceRow, read_trace


def written(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azures_form_has_dates_with_seven_digits(tmp_path):
    lines = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:47,10,0\n"
    rows = read_trace(written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines))
    assert [row[:2] for row in rows] == [(374, 44), (396, 109)]  # one without an output is left out
    assert [row.arrival for row in rows] == pytest.approx([0.0, 4.314579], abs=1e-6)


def test_mooncakes_form_has_milliseconds_and_prefix_blocks(tmp_path):
    lines = (
        '{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 2]}\n\n'
        '{"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}\n'
    )
    rows = read_trace(written(tmp_path, lines, "trace.jsonl"))
    assert rows == [TraceRow(600, 3, 0.0, (0, 1)), TraceRow(700, 5, 2.0, (0, 2))]


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens", "5,GPT-4,12,34,46"),
        ("request_id,input_toks,output_toks,arrival_time", "a,12,34,5"),
        ("prompt_tokens,output_tokens,arrival", "12,34,5"),
    ],
)
def test_other_forms_with_times(tmp_path, header, line):
    assert read_trace(written(tmp_path, f"{header}\n{line}\n")) == [TraceRow(12, 34, 0.0)]


@pytest.mark.parametrize("header", ["num_prefill_tokens,num_decode_tokens", "prompt_tokens,output_tokens"])
def test_forms_without_times(tmp_path, header):
    assert read_trace(written(tmp_path, f"{header}\n12.0,34\n")) == [TraceRow(12, 34, None)]


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("a,b\n1,2\n", "t.csv", "record 1: has a, b; it must have: ContextTokens"),
        ("prompt_tokens,output_tokens\n1,many\n", "t.csv", "record 1.*many"),
        ("prompt_tokens,output_tokens,arrival\n1,2,nan\n", "t.csv", "no time"),
        ("prompt_tokens,output_tokens\n", "t.csv", "holds no request"),
        ("[1]\n", "t.jsonl", "line 1.*no JSON object"),
        ("{\n", "t.jsonl", "cannot be read"),
        ("", "t.txt", ".csv and .jsonl"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_record(tmp_path, text, name, reason):
    with pytest.raises(ValueError, match=reason):
        read_trace(written(tmp_path, text, name))


PUBLISHED = {  # file -> requests, seconds
    "AzureLLMInferenceTrace_conv_2023.csv": (19_366, 3501.7),
    "mooncake_conversation_trace.jsonl": (12_031, 3537.0),
    "llmservingsim_RTXPRO6000_vllm_requests.jsonl": (300, None),
    "etalon_sharegpt_8k.csv": (30_731, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_traces_are_read_whole(name):
    folder = os.environ.get("RESEARCH_ENGINE_TRACES")
    if folder is None:
        pytest.skip("set RESEARCH_ENGINE_TRACES to the directory of the public traces")
    rows, (count, seconds) = read_trace(Path(folder) / name), PUBLISHED[name]
    assert len(rows) == count
    if seconds is not None:
        assert rows[-1].arrival == pytest.approx(seconds, abs=3)
