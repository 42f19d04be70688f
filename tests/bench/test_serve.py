"""bench serve against the stand-in: what it sends, what it prints and keeps, and that no fault makes it lie."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from research_engine.cli import main
from tests.bench.standin import Reply, StandIn

ROOT = Path(__file__).resolve().parents[2]
FEW = ("--num-prompts", "6", "--random-input-len", "10", "--random-output-len", "4", "--disable-tqdm")


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def bench(server: StandIn, tmp_path: Path, *options: str) -> tuple[int, dict]:
    """Exit code, and the result of a run of few requests; {} where none was written."""
    code = main(["bench", "serve", "--base-url", server.url, *FEW, "--save-result", "--save-detailed",
                 "--result-dir", str(tmp_path), "--result-filename", "r.json", *options])  # fmt: skip
    file = tmp_path / "r.json"
    return code, json.loads(file.read_text()) if file.exists() else {}


def test_a_run_is_printed_in_vllms_layout_and_kept_under_its_keys(tmp_path, capsys):
    with StandIn() as server:
        code, result = bench(server, tmp_path, "--goodput", "ttft:60000", "--percentile-metrics", "ttft,tpot,itl,e2el",
                             "--metadata", "gpu=none", "--temperature", "0")  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith(
        "============ Serving Benchmark Result ============\nSuccessful requests:                     6"
    )
    for line in ("Total generated tokens:                  24", "Request goodput (req/s):", "P99 TTFT (ms):",
                 "-----Time per Output Token (excl. 1st token)------", "Mean ITL (ms):", "Median E2EL (ms):",
                 "Peak concurrent requests:", "Total token throughput (tok/s):", "=" * 50):  # fmt: skip
        assert line in out
    wanted = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
              "request_goodput", "output_throughput", "total_token_throughput", "mean_ttft_ms", "median_ttft_ms",
              "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "mean_e2el_ms", "input_lens", "output_lens",
              "ttfts", "itls", "generated_texts", "errors", "start_times", "date", "endpoint_type", "backend", "label",
              "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency",
              "max_output_tokens_per_s", "max_concurrent_requests"}  # fmt: skip
    assert wanted <= result.keys()
    assert (result["completed"], result["total_output_tokens"], result["request_rate"]) == (6, 24, "inf")
    assert result["gpu"] == "none" and result["model_id"] == result["tokenizer_id"] == "dummy:tiny"
    assert result["output_lens"] == [4] * 6 and result["generated_texts"] == ["x x x x "] * 6
    body = server.bodies[0]
    assert body["ignore_eos"] is True and body["max_tokens"] == 4 and body["temperature"] == 0
    assert {headers["x-request-id"] for headers in server.headers} == {f"bench-0-{index}" for index in range(6)}


def test_a_model_that_the_server_does_not_have_is_told_with_the_one_it_has(tmp_path, capsys):
    with StandIn() as server:
        code, _ = bench(server, tmp_path, "--model", "dummy:tinny")
    assert code == 2
    told = capsys.readouterr().err
    assert told.startswith("research-engine bench serve: no tokenizer for 'dummy:tinny'")
    assert told.endswith("This server's model is 'dummy:tiny', the default of --model\n")


def test_without_save_detailed_the_file_is_small(tmp_path):
    with StandIn() as server:
        _, result = bench(server, tmp_path, "--no-save-detailed")
    assert "completed" in result and not {"ttfts", "itls", "generated_texts", "errors"} & result.keys()


def test_a_result_holds_what_the_server_says_of_itself(tmp_path):
    with StandIn(info={"scheduler": "fcfs"}) as server:
        _, result = bench(server, tmp_path)
    assert result["server"]["version"] == {"version": "stand-in 1"}
    assert result["server"]["server_info"] == {"scheduler": "fcfs"}
    assert result["server"]["models"]["data"][0]["id"] == "dummy:tiny"
    assert result["server"]["counters"] == {"vllm:num_preemptions_total": 6.0}


FAULTS = {
    "429": (Reply(status=429), "HTTP 429: refused by the script"),
    "500": (Reply(status=500), "HTTP 500: refused by the script"),
    "cut": (Reply.of(4, cut_after=2), "closed before the answer ended"),
    "error": (Reply.of(4, event=b'data: {"error": {"message": "boom"}}\n\n'), "boom"),
    "nonsense": (Reply.of(4, event=b"data: <html>\n\n"), "no answer of this protocol"),
    "unfinished": (Reply.of(4, finish=False), "without a finish reason"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_requests_are_counted_told_and_left_out_of_latencies(fault, tmp_path, capsys):
    reply, reason = FAULTS[fault]
    with StandIn(lambda body, index: reply if index % 3 == 0 else Reply.of(4)) as server:
        code, result = bench(server, tmp_path, "--goodput", "e2el:600000")
    assert code == 0
    assert (result["completed"], result["failed"]) == (4, 2)
    assert result["slo_attainment"] == pytest.approx(4 / 6)
    assert sum(reason in error for error in result["errors"]) == 2
    assert len([gaps for gaps in result["itls"] if gaps]) == 4
    out = capsys.readouterr().out
    assert "Failed requests:                         2" in out and "ERROR (2x): " in out and reason in out


def test_a_run_that_fails_whole_has_an_exit_code_of_its_own(tmp_path, capsys):
    with StandIn(lambda body, index: Reply(status=503)) as server:
        code, result = bench(server, tmp_path)
    assert code == 1 and result["completed"] == 0 and result["failed"] == 6
    assert "Mean TTFT (ms):                          -" in capsys.readouterr().out
    assert result["mean_ttft_ms"] is None


def test_a_stream_in_any_pieces_is_read(tmp_path):
    chunk = b'data: {"choices":[{"text":"\xc3\xa9","finish_reason":null}]}\r\n\r\n'
    finish = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\r\n\r\n: ping\r\n\r\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\r\n\r\n'
    whole = chunk * 3 + finish + usage + b"data: [DONE]\r\n\r\n"
    pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    with StandIn(lambda body, index: Reply(pieces=pieces)) as server:
        _, result = bench(server, tmp_path)
    assert result["completed"] == 6 and result["output_lens"] == [5] * 6
    assert result["generated_texts"] == ["ééé"] * 6
    assert all(len(gaps) == 4 and gaps[2:] == [0.0, 0.0] for gaps in result["itls"])


def test_a_server_without_usage_is_counted_by_the_tokenizer(tmp_path, capsys):
    with StandIn(lambda body, index: Reply(chunks=["ab", "cde"], usage=False)) as server:
        _, result = bench(server, tmp_path)
    assert result["output_lens"] == [5] * 6  # of bytes, which are dummy:tiny's tokens
    assert "WARNING: the server sends no usage" in capsys.readouterr().out


def test_max_concurrency_holds_and_a_closed_loop_is_due_when_a_place_gets_free(tmp_path):
    with StandIn() as server:
        _, result = bench(server, tmp_path, "--max-concurrency", "2", "--num-prompts", "20")
    assert server.most_under_way <= 2 and result["max_concurrent_requests"] == 2
    assert result["completed"] == 20 and result["void"] == []
    assert result["scheduled_times"][:2] == [0.0, 0.0] and min(result["scheduled_times"][2:]) > 0.0


def test_all_at_once_sends_everything_before_the_first_answer(tmp_path):
    gate = threading.Event()

    def script(body, index):
        if index == 5:
            gate.set()
        return Reply.of(4, until=gate)

    with StandIn(script) as server:
        _, result = bench(server, tmp_path)
    assert result["completed"] == 6 and server.most_under_way == 6


def test_warm_up_is_sent_and_not_counted_and_has_other_prompts(tmp_path):
    with StandIn() as server:
        _, result = bench(server, tmp_path, "--num-warmups", "3")
    assert len(server.bodies) == 9 and result["completed"] == 6
    assert len({body["prompt"] for body in server.bodies}) == 9
    assert [headers["x-request-id"] for headers in server.headers[:3]].count("bench-warmup-0") == 1


def test_the_same_seed_sends_the_same_requests(tmp_path):
    sent = []
    for seed in ("4", "4", "5"):
        with StandIn() as server:
            bench(server, tmp_path, "--seed", seed, "--max-concurrency", "1")
        sent.append([body["prompt"] for body in server.bodies])
    assert sent[0] == sent[1] != sent[2]


def test_chat(tmp_path):
    with StandIn() as server:
        _, result = bench(server, tmp_path, "--backend", "openai-chat")
    assert result["completed"] == 6 and result["output_lens"] == [4] * 6
    assert server.bodies[0]["messages"][0]["role"] == "user" and server.bodies[0]["max_completion_tokens"] == 4


@pytest.mark.parametrize("options", [("--backend", "openai-embeddings"), ("--non-streaming",)])
def test_answers_in_one_piece(options, tmp_path, capsys):
    with StandIn() as server:
        _, result = bench(server, tmp_path, *options)
    assert result["completed"] == 6 and result["mean_e2el_ms"] > 0
    assert "mean_ttft_ms" not in result and "Mean E2EL (ms)" in capsys.readouterr().out


def test_a_trace_is_sent_at_its_own_times_scaled(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens,arrival\n9,4,100\n9,4,140\n9,4,180\n", encoding="utf-8")
    with StandIn() as server:
        _, result = bench(server, tmp_path, "--dataset-name", "trace", "--dataset-path", str(path),
                          "--trace-time-scale", "0.001", "--num-prompts", "3")  # fmt: skip
    assert result["scheduled_times"] == pytest.approx([0.0, 0.04, 0.08])
    assert all(sent >= due for sent, due in zip(result["start_times"], result["scheduled_times"], strict=True))
    assert result["dataset"] == "trace, t.csv, with its times"


def test_a_rate_takes_the_place_of_a_traces_own_times(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens,arrival\n9,4,0\n9,4,1000\n", encoding="utf-8")
    with StandIn() as server:
        _, result = bench(server, tmp_path, "--dataset-name", "trace", "--dataset-path", str(path),
                          "--request-rate", "1000")  # fmt: skip
    assert result["completed"] == 6 and max(result["scheduled_times"]) < 1.0
    assert result["dataset"] == "trace, t.csv"


def test_the_key_is_sent_and_its_absence_is_told_without_a_traceback(tmp_path, capsys, monkeypatch):
    with StandIn(key="secret") as server:
        assert bench(server, tmp_path)[0] == 2
        assert "HTTP 401: Invalid API key; set OPENAI_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        code, result = bench(server, tmp_path)
    assert code == 0 and result["completed"] == 6
    assert "secret" not in (tmp_path / "r.json").read_text()


def test_no_server_is_a_users_mistake_with_the_address(capsys):
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1", *FEW]) == 2
    assert "http://127.0.0.1:1: no connection to 127.0.0.1:1" in capsys.readouterr().err


def test_a_server_that_is_still_starting_is_waited_for(tmp_path):
    models: list[dict] = []
    with StandIn(models=models) as server:
        timer = threading.Timer(0.3, lambda: models.append({"id": "dummy:tiny"}))
        timer.start()
        code, _ = bench(server, tmp_path, "--ready-check-timeout-sec", "60")
    assert code == 0


def test_a_model_without_a_known_tokenizer_says_what_to_do(tmp_path, capsys):
    with StandIn(models=[{"id": "my-model"}]) as server:
        assert bench(server, tmp_path)[0] == 2
        assert "--tokenizer, or do without: --skip-tokenizer-init" in capsys.readouterr().err
        code, result = bench(server, tmp_path, "--skip-tokenizer-init")
    assert code == 0 and result["tokenizer_id"] is None
    assert all(isinstance(token, int) for token in server.bodies[0]["prompt"])


def test_the_path_behind_a_served_name_has_the_tokenizer(tmp_path):
    with StandIn(models=[{"id": "my-model", "root": "dummy:tiny"}]) as server:
        _, result = bench(server, tmp_path)
    assert (result["model_id"], result["tokenizer_id"]) == ("my-model", "dummy:tiny")
    assert server.bodies[0]["model"] == "my-model"


def test_prompts_sent_twice_are_told(tmp_path, capsys):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    with StandIn() as server:
        bench(server, tmp_path, "--dataset-name", "custom", "--dataset-path", str(path))
    assert "WARNING: 4 of 6 prompts were sent before" in capsys.readouterr().out


def test_a_request_that_takes_too_long_has_failed(tmp_path):
    never = threading.Event()
    with StandIn(lambda body, index: Reply.of(4, until=never if index == 0 else None)) as server:
        _, result = bench(server, tmp_path, "--request-timeout-sec", "0.5")
        never.set()
    assert result["failed"] >= 1 and result["completed"] + result["failed"] == 6
    assert any("no whole answer within 0.5 s" in error for error in result["errors"])


def test_results_can_be_appended(tmp_path):
    with StandIn() as server:
        for _ in range(2):
            main(["bench", "serve", "--base-url", server.url, *FEW, "--append-result", "--result-dir", str(tmp_path),
                  "--result-filename", "r.json"])  # fmt: skip
    runs = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert [run["completed"] for run in runs] == [6, 6]


def test_a_result_that_cannot_be_written_is_printed_and_kept_elsewhere(tmp_path, capsys, monkeypatch):
    place = tmp_path / "place"

    def script(body, index):
        if place.is_dir():  # gone since the run began
            place.rmdir()
            place.write_text("")
        return Reply.of(4)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with StandIn(script) as server:
        code, _ = bench(server, place)
    printed = capsys.readouterr()
    assert code == 1
    assert "Successful requests" in printed.out and "the result is not saved" in printed.err
    kept = Path(printed.err.rpartition("it is in ")[2].strip())
    assert json.loads(kept.read_text())["completed"] == 6


def test_a_place_where_nothing_can_be_written_is_told_before_the_run(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with StandIn() as server:
        code, _ = bench(server, tmp_path / "file")
    assert code == 2
    assert "result file = " in capsys.readouterr().err and not server.bodies


@pytest.mark.timeout(120)
def test_ctrl_c_leaves_a_whole_file_that_says_it_is_a_part(tmp_path):
    seen, never = threading.Event(), threading.Event()

    def script(body, index):
        if index == 4:
            seen.set()
        return Reply.of(4, until=never if index >= 3 else None)

    with StandIn(script) as server:
        command = [sys.executable, "-m", "research_engine.cli", "bench", "serve", "--base-url", server.url, *FEW,
                   "--num-prompts", "50", "--max-concurrency", "2", "--save-result", "--save-detailed",
                   "--result-dir", str(tmp_path), "--result-filename", "r.json"]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert seen.wait(60)  # three are answered, two wait for ever
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        never.set()
    assert process.returncode == 130, err
    assert "INTERRUPTED" in out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["interrupted"] is True
    assert (result["completed"], result["failed"], result["unfinished"]) == (3, 0, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
