"""A result for eyes and for files: vLLM's block of lines, and JSON that is whole or not there."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from research_engine.bench.result_file import rescue, save
from research_engine.bench.serve_options import ServeBenchOptions, TrafficOptions, pairs
from research_engine.bench.serve_result import DETAILS

_WIDTH = 50
_HEADERS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
}


def report_lines(result: Mapping[str, Any], options: ServeBenchOptions) -> list[str]:
    """The block that `vllm bench serve` prints, and a section more: how the load arrived and how the client did."""
    traffic, report = options.traffic, options.report
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    lines += [_line("Successful requests:", result["completed"]), _line("Failed requests:", result["failed"])]
    if result["unfinished"]:
        lines.append(_line("Unfinished requests:", result["unfinished"]))
    if traffic.max_concurrency is not None:
        lines.append(_line("Maximum request concurrency:", traffic.max_concurrency))
    if result["request_rate"] != "inf":
        lines.append(_line("Request rate configured (RPS):", float(result["request_rate"])))
    lines.append(_line("Benchmark duration (s):", result["duration"]))
    lines.append(_line("Total input tokens:", result["total_input_tokens"]))
    generates = options.target.backend != "openai-embeddings"
    if generates:
        lines.append(_line("Total generated tokens:", result["total_output_tokens"]))
    lines.append(_line("Request throughput (req/s):", result["request_throughput"]))
    if result["request_goodput"] is not None:
        lines.append(_line("Request goodput (req/s):", result["request_goodput"]))
        lines.append(_line("SLO attainment (%):", 100 * (result["slo_attainment"] or 0.0)))
    if generates:
        lines.append(_line("Output token throughput (tok/s):", result["output_throughput"]))
        lines.append(_line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]))
        lines.append(_line("Peak concurrent requests:", result["max_concurrent_requests"]))
    lines.append(_line("Total token throughput (tok/s):", result["total_token_throughput"]))
    for name in report.metrics_of(options.target.is_streamed):
        short, title = _HEADERS[name]
        lines.append(f"{title:-^{_WIDTH}}")
        lines.append(_line(f"Mean {short} (ms):", result[f"mean_{name}_ms"]))
        lines.append(_line(f"Median {short} (ms):", result[f"median_{name}_ms"]))
        lines += [_line(f"P{point:g} {short} (ms):", result[f"p{point:g}_{name}_ms"]) for point in report.percentiles]
    client = result["client"]
    lines.append(f"{'Load and Client':-^{_WIDTH}}")
    if result["planned_send_rate"] != "inf":
        lines.append(_line("Planned to be sent (req/s):", result["planned_send_rate"]))
        lines.append(_line("Sent (req/s):", result["send_rate"]))
    lines.append(_line("Late sends P99 (ms):", client["late_send_p99_ms"]))
    lines.append(_line("Client event loop lag P99 (ms):", client["loop_lag_p99_ms"]))
    lines.append(_line("Client CPU (% of a core):", 100 * client["cpu_share"]))
    lines.append("=" * _WIDTH)
    return lines + remarks(result)


def remarks(result: Mapping[str, Any]) -> list[str]:
    """What the reader must know before the numbers are used."""
    lines = [f"VOID: {why}" for why in result["void"]]
    if result["interrupted"]:
        lines.append("INTERRUPTED: a part of the load; requests under way at the end are unfinished")
    if result["unstable"]:
        lines.append("UNSTABLE: the queue grew to the end, so latencies depend on how long one looks")
    lines += [f"WARNING: {warning}" for warning in result["warnings"]]
    return lines + errors_of(result)


def errors_of(result: Mapping[str, Any]) -> list[str]:
    """The first kinds of failure, each once with its number."""
    errors = [error for error in result["errors"] if error and error != "unfinished"]
    return [f"ERROR ({errors.count(kind)}x): {kind}" for kind in list(dict.fromkeys(errors))[:10]]


def _line(label: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{label:<40} {'-' if math.isnan(value) else f'{value:.2f}':<10}".rstrip()
    return f"{label:<40} {value:<10}".rstrip()


def result_path(options: ServeBenchOptions, result: Mapping[str, Any]) -> Path:
    """The JSON file that the options name, or that the result gives its name to."""
    report = options.report
    return Path(report.result_dir or ".") / (report.result_filename or default_name(result))


def save_result(result: Mapping[str, Any], options: ServeBenchOptions) -> bool:
    """Write the JSON file that the options name, and say so; False where it had to go elsewhere."""
    report, path = options.report, result_path(options, result)
    kept = {key: value for key, value in result.items() if report.save_detailed or key not in DETAILS}
    line = json.dumps(finite(kept), ensure_ascii=False) + "\n"
    before = ""
    if report.append_result and path.exists():
        try:
            before = path.read_text(encoding="utf-8").rstrip("\n") + "\n"
        except (OSError, UnicodeDecodeError) as error:
            rescue(path, line, error)
            return False
    if not save(path, before + line):
        return False
    print(f"wrote {path}")
    return True


def default_name(result: Mapping[str, Any], suffix: str = ".json") -> str:
    """As vLLM's benchmark names its files: label, rate, concurrency, model and time."""
    limit = result["max_concurrency"]
    concurrency = f"-concurrency{limit}" if limit is not None else ""
    model = re.sub(r"[^\w.-]+", "-", str(result["model_id"]).rsplit("/", 1)[-1])
    rate = "sweep" if result["request_rate"] == "sweep" else f"{result['request_rate']}qps"
    return f"{result['label']}-{rate}{concurrency}-{model}-{result['date']}{suffix}"


def header_of(
    options: ServeBenchOptions, traffic: TrafficOptions, *, model_id: str, tokenizer_id: str | None
) -> dict[str, Any]:
    """The first keys of a result: what was asked for, with vLLM's names."""
    return {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.target.backend,
        "backend": options.target.backend,
        "label": options.report.label or options.target.backend,
        "model_id": model_id,
        "tokenizer_id": tokenizer_id,
        "num_prompts": traffic.num_prompts,
        **pairs(options.report.metadata),
        "request_rate": traffic.request_rate if math.isfinite(traffic.request_rate) else "inf",
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
        "seed": traffic.seed,
    }


def finite(value: Any) -> Any:
    """For JSON: numbers that are not finite become null, tuples lists."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
