"""LLMServingSim's files: read as they are meant, and their recorded vLLM run foretold from their profile."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path

import pytest

import schedulers
from research_engine import metrics
from research_engine.engine.config import EngineConfig
from research_engine.engine.driver import Arrival, replay
from research_engine.engine.records import RequestRecord
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.build import simulated_engine
from research_engine.simulation.cost_model import Work
from research_engine.simulation.gpu_sheet import load_sheet
from research_engine.simulation.llmservingsim import RecordedRequest, import_profile, read_run
from research_engine.simulation.profiled import ProfiledCost
from research_engine.simulation.roofline import KERNELS_BESIDE, KERNELS_PER_LAYER

LAYERS = ("qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj", "layernorm", "embedding",
          "final_layernorm")  # fmt: skip


def write_profile(directory: Path, **layers: float) -> dict[str, Path]:
    """Three small files: 10 us for a layer of one token unless `layers` says otherwise, twice that for 4 tokens."""
    times = dict.fromkeys(LAYERS, 10.0) | layers
    files = {
        "dense": "layer,tokens,time_us\n"
        + "".join(
            f"{layer},{tokens},{us * scale}\n" for layer, us in times.items() for tokens, scale in ((1, 1), (4, 2))
        ),
        "per_sequence": "layer,sequences,time_us\nlm_head,1,100\nsampler,1,20\n",
        "attention": "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,7\n16,0,0,0,9\n16,0,1,16,11\n",
    }
    for name, text in files.items():
        (directory / f"{name}.csv").write_text(text)
    return {name: directory / f"{name}.csv" for name in files}


def test_layers_are_counted_as_often_as_a_decoder_has_them(tmp_path):
    profile = import_profile(**write_profile(tmp_path), model="m", num_layers=3, machine={"gpu": "g"})
    # 2 norms and 6 others a layer, embedding and last norm once; attention of 3 layers; head and sampler once
    assert profile.dense(1) == pytest.approx((3 * 8 + 2) * 10e-6)
    assert ProfiledCost(profile).price(Work(1, 1, 1, 1, 16, 16)) == pytest.approx(260e-6 + 120e-6 + 3 * 7e-6)
    assert ProfiledCost(profile).price(Work(17, 2, 1, 1, 16, 16, ((16, 0),))) == pytest.approx(
        profile.dense(17) + 120e-6 + 3 * 11e-6
    )


def test_an_unknown_layer_is_refused_by_name(tmp_path):
    files = write_profile(tmp_path, moe=1.0)
    with pytest.raises(ValueError, match="layer 'moe' is not known"):
        import_profile(**files, model="m", num_layers=1, machine={})


def test_a_missing_layer_is_refused_by_name(tmp_path):
    files = write_profile(tmp_path)
    text = files["dense"].read_text().splitlines()
    files["dense"].write_text("\n".join(line for line in text if not line.startswith("o_proj")))
    with pytest.raises(ValueError, match="missing are o_proj"):
        import_profile(**files, model="m", num_layers=1, machine={})


def test_two_clocks_of_a_run_become_one(tmp_path):
    fields = ("request_id", "input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
    rows = [("b", 5, 2, 1001.0, 51.5, 52.0, 53.0), ("a", 4, 3, 1000.0, 50.0, 50.5, 51.0)]
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(dict(zip(fields, row, strict=True))) + "\n" for row in rows))
    assert read_run(path) == [("a", 4, 3, 0.0, 0.5, 1.0), ("b", 5, 2, 1.0, 2.0, 3.0)]


TRACES = os.environ.get("RESEARCH_ENGINE_TRACES")
# the sheets' assumptions, made before this comparison: 1 us a kernel, 5 us a sequence that the host adds
SHEET = load_sheet("h200")
ASSUMED_HOST = (SHEET.kernel_seconds * (32 * KERNELS_PER_LAYER + KERNELS_BESIDE), SHEET.host_seconds_per_sequence)


needs_traces = pytest.mark.skipif(
    not TRACES, reason="RESEARCH_ENGINE_TRACES names no directory with LLMServingSim's files"
)


@lru_cache
def foretell(host: tuple[float, float]) -> tuple[list[RecordedRequest], list[RequestRecord]]:
    """The recorded run and its simulation with these host constants, both by arrival.

    300 ShareGPT requests at 10 a second, Llama-3.1-8B, RTX PRO 6000, vLLM 0.19.
    """
    files = {
        name: Path(TRACES) / f"llmservingsim_RTXPRO6000_llama31-8b_{name}.csv"
        for name in ("dense", "per_sequence", "attention")
    }
    machine = {"gpu": "NVIDIA RTX PRO 6000", "libraries": "vLLM 0.19"}
    profile = import_profile(**files, model="Llama-3.1-8B", num_layers=32, machine=machine, host=host)
    real = read_run(Path(TRACES) / "llmservingsim_RTXPRO6000_vllm_requests.jsonl")
    config = EngineConfig(
        num_blocks=35_000,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        enable_prefix_caching=False,
    )
    engine = simulated_engine(config, schedulers.create("chunked_prefill"), ProfiledCost(profile))
    forced = [SamplingParams(max_tokens=r.output_tokens, ignore_eos=True) for r in real]
    prompts = [range(r.prompt_tokens) for r in real]
    replay(engine, [Arrival(r.arrival, r.request_id, *own) for r, *own in zip(real, prompts, forced, strict=True)])
    return real, sorted(engine.records.requests, key=lambda record: record.arrival_time)


def signed_errors(host: tuple[float, float], part: slice = slice(None)) -> dict[str, dict[str, float]]:
    """Of mean and percentiles, over a part of the requests in their order of arrival."""
    real, simulated = (requests[part] for requests in foretell(host))
    several = [r for r in real if r.output_tokens > 1]
    recorded = {
        "ttft": [r.first_token - r.arrival for r in real],
        "tpot": [(r.last_token - r.first_token) / (r.output_tokens - 1) for r in several],
        "e2e": [r.last_token - r.arrival for r in real],
    }
    foretold = {
        "ttft": [metrics.ttft(s) for s in simulated],
        "tpot": [metrics.tpot(s) for s in simulated if s.output_tokens > 1],
        "e2e": [metrics.e2e(s) for s in simulated],
    }
    errors = {}
    for name, values in recorded.items():
        theirs, ours = metrics.percentiles(values), metrics.percentiles(foretold[name])
        errors[name] = {point: ours[point] / theirs[point] - 1 for point in ("mean", "p50", "p90", "p99")}
        print(f"{name}: " + ", ".join(f"{point} {error:+.1%}" for point, error in errors[name].items()))
    return errors


@needs_traces
@pytest.mark.parametrize(
    ("host", "bars"),
    [((0.0, 0.0), {"ttft": 0.136, "e2e": 0.05, "tpot": 0.035}),
     (ASSUMED_HOST, {"ttft": 0.136, "e2e": 0.022, "tpot": 0.017})],
    ids=["kernels alone", "with the sheet's host time"],
)  # fmt: skip
def test_the_recorded_vllm_run_is_foretold_from_the_profile(host, bars):
    """The bars are the errors that LLMServingSim's authors report for their simulator."""
    errors = signed_errors(host)
    assert {name for name, bar in bars.items() if abs(errors[name]["mean"]) > bar} == set()


@needs_traces
def test_host_time_fitted_to_the_first_half_of_the_requests_foretells_the_second_half():
    """One constant a step, by a secant on the first half's mean TPOT; no assumption of ours is left in it."""
    first, second = slice(0, 150), slice(150, None)
    low, high = 0.0, 1e-3
    at_low, at_high = (signed_errors((a, 0.0), first)["tpot"]["mean"] for a in (low, high))
    fitted = low - at_low * (high - low) / (at_high - at_low)
    print(f"fitted: {fitted * 1e6:.0f} us a step")
    errors = signed_errors((fitted, 0.0), second)
    assert fitted > 0
    assert abs(errors["ttft"]["mean"]) < 0.136
    assert abs(errors["tpot"]["mean"]) < 0.017
    assert abs(errors["e2e"]["mean"]) < 0.022
