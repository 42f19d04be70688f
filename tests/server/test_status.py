"""What the endpoints that only read say: metrics under vLLM's names, the timeline, versions, options."""

from __future__ import annotations

import re

import yaml

from research_engine import __version__
from tests.server.live import LiveServer


def value(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if re.match(rf"{re.escape(name)}(\{{|$)", line)]
    return float(line.rpartition(" ")[2])


NAMES = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total", "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count",
    "vllm:time_per_output_token_seconds_count", "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count", "vllm:request_prompt_tokens_sum", "vllm:request_generation_tokens_sum",
    "vllm:iteration_tokens_total_sum",
)  # fmt: skip


def test_metrics_count_what_was_served(server: LiveServer) -> None:
    before = server.get("/metrics").body.decode()
    server.complete(prompt="a" * 40, max_tokens=7, ignore_eos=True)
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    after = answer.body.decode()
    gained = {name: value(after, name) - value(before, name) for name in NAMES}
    assert gained["vllm:prompt_tokens_total"] == gained["vllm:request_prompt_tokens_sum"] == 40
    assert gained["vllm:generation_tokens_total"] == gained["vllm:request_generation_tokens_sum"] == 7
    assert gained["vllm:inter_token_latency_seconds_count"] == 6
    assert gained["vllm:time_to_first_token_seconds_count"] == gained["vllm:e2e_request_latency_seconds_count"] == 1
    assert gained["vllm:iteration_tokens_total_sum"] == 46
    assert value(after, "vllm:num_requests_running") == value(after, "vllm:kv_cache_usage_perc") == 0
    assert 'model_name="tiny"' in after and 'finished_reason="length"' in after


def test_the_cache_is_described_in_labels(server: LiveServer) -> None:
    (line,) = re.findall(r"^vllm:cache_config_info{(.*)} 1.0$", server.get("/metrics").body.decode(), re.MULTILINE)
    assert {'block_size="16"', 'num_gpu_blocks="1024"', 'enable_prefix_caching="True"'} <= set(line.split(","))


def test_buckets_are_cumulative_and_end_with_the_count(server: LiveServer) -> None:
    server.complete(prompt="a", max_tokens=2, ignore_eos=True)
    text = server.get("/metrics").body.decode()
    buckets = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("vllm:time_to_first_token_seconds_bucket")
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == value(text, "vllm:time_to_first_token_seconds_count") > 0


def test_the_timeline_has_the_steps_after_the_one_that_is_known(server: LiveServer) -> None:
    known = server.get("/stats").json()
    last = known["steps"][-1]["step"] if known["steps"] else -1
    server.complete(prompt=[65, 66, 67], max_tokens=3, ignore_eos=True)
    stats = server.get(f"/stats?since={last}").json()
    assert set(stats) == {
        "now", "running", "waiting", "unanswered", "kv_utilization", "prompt_tokens_total",
        "generation_tokens_total", "model", "scheduler", "steps",
    }  # fmt: skip
    steps = stats["steps"]
    assert [(s["num_tokens"], s["num_prefill_tokens"], s["num_decode_tokens"], s["num_requests"]) for s in steps] == [
        (3, 3, 0, 1), (1, 0, 1, 1), (1, 0, 1, 1),
    ]  # fmt: skip
    assert all(s["started"] <= s["finished"] <= stats["now"] for s in steps)
    assert [s["step"] for s in steps] == list(range(last + 1, last + 4))


def test_version_and_what_the_server_was_started_with(server: LiveServer) -> None:
    assert server.get("/version").json() == {"version": __version__}
    info = server.get("/server_info").json()
    assert info["model"] == "dummy:tiny" and info["resolved"]["engine"]["num_blocks"] == 1024
    (path,) = (server.log.parent / "configs").iterdir()
    assert yaml.safe_load(path.read_text()) == info


def test_the_description_has_every_endpoint_and_its_fields(server: LiveServer) -> None:
    document = server.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/v1/models", "/metrics"} <= set(
        document["paths"]
    )
    assert "max_tokens" in document["components"]["schemas"]["CompletionRequest"]["properties"]
