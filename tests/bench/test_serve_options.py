"""Options of bench serve: vLLM's words are understood, and a wrong value is refused with the rule."""

from __future__ import annotations

import math
from typing import Annotated

import pytest
import tyro

from research_engine.bench.serve_options import (
    DatasetOptions,
    ReportOptions,
    SamplingOptions,
    ServeBenchOptions,
    TargetOptions,
    TrafficOptions,
)


def parsed(*words: str) -> ServeBenchOptions:
    found: list[ServeBenchOptions] = []

    def main(options: Annotated[ServeBenchOptions, tyro.conf.arg(name="")]) -> None:
        found.append(options)

    tyro.cli(main, args=list(words))
    return found[0]


def test_a_command_line_of_vllms_is_understood():
    words = """--backend vllm --host 10.0.0.1 --port 9000 --model org/name --served-model-name name
        --dataset-name random --random-input-len 256 --random-output-len 64 --random-range-ratio 0.2
        --num-prompts 200 --request-rate inf --burstiness 0.5 --max-concurrency 16 --seed 7 --ignore-eos
        --goodput ttft:500 tpot:50 --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99
        --save-result --save-detailed --result-dir out --result-filename r.json --metadata a=1 b=2
        --temperature 0 --top-p 0.9 --extra-body {"top_k":5} --disable-tqdm --num-warmups 3"""
    options = parsed(*words.split())
    assert options.target.url == "http://10.0.0.1:9000"
    assert math.isinf(options.traffic.request_rate) and options.traffic.max_concurrency == 16
    assert options.report.slo is not None and (options.report.slo.ttft, options.report.slo.tpot) == (0.5, 0.05)
    assert options.report.percentiles == [50, 90, 99]
    assert options.sampling.body("vllm") == {"temperature": 0, "top_p": 0.9, "top_k": 5}
    assert options.report.save_detailed and options.traffic.num_warmups == 3


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_base_url_may_end_as_openais_clients_want_it(url):
    assert TargetOptions(base_url=url).url == "http://h:1"


def test_an_address_of_ip_version_6():
    assert TargetOptions(host="::1").url == "http://[::1]:8000"


def test_short_lengths_stand_for_those_of_the_dataset():
    options = DatasetOptions(input_len=5, output_len=6)
    assert (options.random_input_len, options.random_output_len, options.sharegpt_output_len) == (5, 6, 6)


def test_latencies_reported_are_those_that_the_kind_of_answer_has():
    assert parsed().report.metrics_of(parsed().target.is_streamed) == ("ttft", "tpot", "itl")
    assert not parsed("--backend", "openai-embeddings").target.is_streamed
    assert not parsed("--non-streaming").target.is_streamed


def test_answers_have_the_length_asked_for_where_prompts_are_made_up():
    assert parsed().ignores_eos
    assert not parsed("--dataset-name", "sharegpt").ignores_eos
    assert parsed("--dataset-name", "sharegpt", "--ignore-eos").ignores_eos


def test_log_probabilities_are_asked_for_as_the_endpoint_wants_it():
    assert SamplingOptions(logprobs=2).body("openai") == {"logprobs": 2}
    assert SamplingOptions(logprobs=2).body("openai-chat") == {"logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize(
    ("group", "values", "rule"),
    [
        (TrafficOptions, {"num_prompts": 0}, "num_prompts = 0: must be >= 1"),
        (TrafficOptions, {"request_rate": 0.0}, "request_rate = 0.0: must be above 0"),
        (TrafficOptions, {"request_rate": math.nan}, "request_rate = nan"),
        (TrafficOptions, {"max_concurrency": 0}, "max_concurrency = 0"),
        (TrafficOptions, {"burstiness": -1.0}, "burstiness"),
        (TrafficOptions, {"sweep_rates": "1,two"}, "auto or rates above 0"),
        (TrafficOptions, {"sweep_rates": "1,inf"}, "auto or rates above 0"),
        (TrafficOptions, {"sweep_rates": "1", "request_rate": 2.0}, "a sweep sets the rate"),
        (TrafficOptions, {"ramp_up_strategy": "linear"}, "0 < start <= end"),
        (TrafficOptions, {"ramp_up_start_rps": 1.0}, "need ramp_up_strategy"),
        (TrafficOptions, {"ramp_up_strategy": "linear", "request_rate": 1.0}, "leave one of them out"),
        (DatasetOptions, {"random_range_ratio": 1.0}, r"\[0, 1\)"),
        (DatasetOptions, {"random_input_len": 0}, "random_input_len = 0"),
        (DatasetOptions, {"custom_output_len": 0}, "custom_output_len = 0"),
        (DatasetOptions, {"dataset_path": "x"}, "reads no file"),
        (TargetOptions, {"port": 0}, "port = 0: must be >= 1 and <= 65535"),
        (TargetOptions, {"header": ("a",)}, "header 'a': must be KEY=VALUE"),
        (SamplingOptions, {"extra_body": "[1]"}, "must be a JSON object"),
        (SamplingOptions, {"extra_body": "{"}, "extra_body"),
        (ReportOptions, {"goodput": ("ttft=5",)}, "NAME:MILLISECONDS"),
        (ReportOptions, {"goodput": ("ttft:x",)}, "no number of milliseconds"),
        (ReportOptions, {"goodput": ("ttft:0",)}, "must be a number of seconds > 0"),
        (ReportOptions, {"metric_percentiles": "101"}, "of 0 to 100"),
        (ReportOptions, {"percentile_metrics": "ttft,tpto"}, "'tpto' is none of ttft"),
        (ReportOptions, {"metadata": ("=x",)}, "metadata"),
    ],
)
def test_a_wrong_value_is_refused_with_the_rule(group, values, rule):
    with pytest.raises(ValueError, match=rule):
        group(**values)


def test_the_files_of_a_sweep_must_not_take_each_others_names():
    with pytest.raises(ValueError, match=r"must end in \.json"):
        ServeBenchOptions(traffic=TrafficOptions(sweep_rates="1"), report=ReportOptions(result_filename="x.md"))


def test_limits_on_tokens_need_a_stream():
    with pytest.raises(ValueError, match="ttft"):
        ServeBenchOptions(TargetOptions(non_streaming=True), report=ReportOptions(goodput=("ttft:5",)))
