"""Offline measurements: the work is what was asked for, both engines get the same, and what cannot be is refused."""

from __future__ import annotations

import json
import sys

import pytest

from research_engine import cli
from research_engine.bench.offline_work import lengths_from_csv, random_prompts

FAKE_VLLM = """
import json, os
__version__ = "0.0-fake"
class SamplingParams:
    def __init__(self, **fields): self.fields = fields
class LLM:
    def __init__(self, **options):
        with open(os.environ["FAKE_VLLM_LOG"], "a") as log: log.write(json.dumps(options) + "\\n")
    def generate(self, prompts, params, use_tqdm):
        class Output: pass
        outputs = []
        for prompt, sampling in zip(prompts, params):
            output, completion = Output(), Output()
            completion.token_ids = [0] * sampling.fields["max_tokens"]
            output.outputs = [completion]
            outputs.append(output)
        return outputs
"""


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt,output\n3,9\n20,5\n500,5\n10,6\n8,300\n7,4\n")
    return path


def test_lengths_are_the_first_that_keep_the_bounds(lengths):
    assert lengths_from_csv(lengths, 3, max_prompt=100, max_total=200) == [(20, 5), (10, 6), (7, 4)]


def test_too_few_lengths_are_an_error_that_says_how_many_there_are(lengths):
    with pytest.raises(ValueError, match="3 pairs have prompts of 4 to 100 tokens and 200 in all; 4 were asked for"):
        lengths_from_csv(lengths, 4, max_prompt=100, max_total=200)


def test_a_file_that_holds_something_else_names_the_line(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n5,6\nx,y\n")
    with pytest.raises(ValueError, match=r"x\.csv, line 3"):
        lengths_from_csv(path, 9, max_prompt=100, max_total=200)
    with pytest.raises(ValueError, match="cannot be read"):
        lengths_from_csv(tmp_path / "none.csv", 1, max_prompt=100, max_total=200)


def test_prompts_have_the_lengths_asked_for_and_ids_of_the_vocabulary():
    prompts = random_prompts([(5, 1), (9, 1)], 259)
    assert [len(prompt) for prompt in prompts] == [5, 9]
    assert all(0 <= token < 259 for prompt in prompts for token in prompt) and prompts[0] != prompts[1][:5]


def test_throughput_counts_every_token_and_saves_job_and_result(lengths, tmp_path, capsys):
    saved = tmp_path / "result.json"
    arguments = ["bench", "throughput", "dummy:tiny", "--lengths", str(lengths), "--num-prompts", "3",
                 "--max-prompt", "100", "--max-total", "200", "--max-model-len", "256",
                 "--save", str(saved)]  # fmt: skip
    assert cli.main(arguments) == 0
    content = json.loads(saved.read_text())
    (result,) = content["results"]
    assert list(result["output_tokens"].values()) == [15]
    assert content["job"]["options"]["enable_prefix_caching"] is False
    assert "3 of lengths.csv" in capsys.readouterr().out


def test_latency_takes_the_same_prompts_with_one_token_and_with_more(capsys):
    arguments = ["bench", "latency", "dummy:tiny", "--batches", "1", "2", "--input-len", "8", "--output-len", "4",
                 "--prompts", "16", "--repeats", "1", "--max-model-len", "256"]  # fmt: skip
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "per output token, batch 2, 8 in" in out and "to the first token, 16 in" in out


def test_the_other_engine_gets_the_same_settings_in_its_own_process(tmp_path, monkeypatch, capsys):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "log"))
    arguments = ["bench", "throughput", "dummy:tiny", "--num-prompts", "2", "--input-len", "8",
                 "--output-len", "2", "--max-num-seqs", "8", "--max-model-len", "64", "--compare", "vllm",
                 "--vllm-python", sys.executable]  # fmt: skip
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "0.0-fake" in out and "theirs" in out  # a narrow terminal breaks the lines
    (options,) = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert options["load_format"] == "dummy" and options["max_num_seqs"] == 8 and options["max_model_len"] == 64
    assert not options["enable_prefix_caching"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["throughput", "--num-prompts", "0"], "num_prompts = 0: must be an integer >= 1"),
        (["throughput", "--input-len", "9000"], "max_model_len = 8192: the longest request has 9128 tokens"),
        (["throughput", "--vllm-python", "x"], "vllm_python = 'x': used by --compare vllm alone"),
        (["throughput", "--save", "/no/such/place.json"], "there is no directory /no/such"),
        (["throughput", "--save", "/"], "save = '/': is a directory; it must be a file"),
        (["latency", "--batches", "300"], "at most max_num_seqs = 256 run together"),
        (["engine", "--pile", "0", "0", "0", "--batches", "--prompts"], "nothing to measure"),
        (["engine", "--pile", "1", "0", "1"], "must be three integers >= 1, or 0 0 0 for none"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(arguments, rule, capsys):
    assert cli.main(["bench", arguments[0], "dummy:tiny", *arguments[1:]]) == 2
    assert rule in capsys.readouterr().err


def test_an_interpreter_without_the_other_engine_is_named_with_its_error(capsys, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("raise ImportError('no such engine here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = ["bench", "throughput", "dummy:tiny", "--num-prompts", "1", "--input-len", "4",
                 "--output-len", "1", "--max-model-len", "16", "--compare", "vllm",
                 "--save", str(tmp_path / "own.json")]  # fmt: skip
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert "no such engine here" in printed.err
    assert "requests/s" in printed.out  # what was measured before it is not lost
    assert len(json.loads((tmp_path / "own.json").read_text())["results"]) == 1


def test_one_start_measures_piles_and_batches_beside_the_other_engine(lengths, tmp_path, monkeypatch, capsys):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("COLUMNS", "200")
    saved = tmp_path / "result.json"
    arguments = ["bench", "engine", "dummy:tiny", "--lengths", str(lengths), "--num-prompts", "3", "--max-prompt",
                 "100", "--max-total", "200", "--pile", "2", "8", "3", "--batches", "2", "--input-len", "8",
                 "--output-len", "4", "--prompts", "16", "--repeats", "2", "--max-num-seqs", "8",
                 "--max-model-len", "64", "--compare", "vllm", "--vllm-python", sys.executable,
                 "--save", str(saved)]  # fmt: skip
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    for row in ("per output token, batch 2", "to the first token, 16 in", "requests/s, 3 of lengths.csv",
                "requests/s, 2 x (8 in, 3 out)", "start-up, s", "ours / theirs"):  # fmt: skip
        assert row in out
    assert len((tmp_path / "log").read_text().splitlines()) == 1  # one start for all
    content = json.loads(saved.read_text())
    assert content["job"]["repeats"] == {"2: one token": 2, "2: all tokens": 2, "prompt of 16": 2}
    assert [result["output_tokens"]["2 x (8 in, 3 out)"] for result in content["results"]] == [6, 6]


def test_the_other_engine_does_not_see_this_projects_modules_as_its_own(tmp_path, monkeypatch):
    """bench/datasets.py must not stand in for the package of that name."""
    (tmp_path / "vllm.py").write_text(
        FAKE_VLLM + "\nimport sys\nassert not any('bench' in path for path in sys.path)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "log"))
    arguments = ["bench", "throughput", "dummy:tiny", "--num-prompts", "1", "--input-len", "4",
                 "--output-len", "1", "--max-model-len", "16", "--compare", "vllm"]  # fmt: skip
    assert cli.main(arguments) == 0


def test_requests_as_long_as_the_model_takes_are_measured():
    arguments = ["bench", "engine", "dummy:tiny", "--pile", "0", "0", "0", "--batches", "1", "--prompts", "10",
                 "--input-len", "10", "--output-len", "9", "--repeats", "1", "--max-num-seqs", "4",
                 "--max-model-len", "20"]  # fmt: skip
    assert cli.main(arguments) == 0


def test_an_interpreter_that_writes_no_result_loses_nothing_of_ours(tmp_path, capsys):
    saved = tmp_path / "own.json"
    arguments = ["bench", "throughput", "dummy:tiny", "--num-prompts", "1", "--input-len", "4", "--output-len", "1",
                 "--max-model-len", "16", "--compare", "vllm", "--vllm-python", "/bin/true",
                 "--save", str(saved)]  # fmt: skip
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert "ended well and wrote no result" in printed.err and "requests/s" in printed.out
    assert len(json.loads(saved.read_text())["results"]) == 1
