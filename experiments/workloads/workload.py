"""A workload: arrivals, lengths, prompts and priorities, a pure function of settings, seed and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, field_validator

from experiments.settings import Settings
from experiments.workloads.arrivals import ArrivalSettings, arrival_times
from experiments.workloads.lengths import Encoder, LengthSettings, LogNormalLengths, draw_lengths
from experiments.workloads.predictors import NoPredictor, PredictorSettings, predict
from experiments.workloads.streams import stream
from research_engine.engine.driver import Arrival
from research_engine.engine.sampling_params import SamplingParams


class WorkloadSettings(Settings):
    """What arrives when.

    Args:
        num_requests: how many.
        arrivals: the arrival process.
        lengths: where prompt and output lengths come from. Output lengths are forced: a request goes on past the
            end-of-sequence token until it has its length, so that every policy serves the same work.
        priorities: priority -> share of the requests that carry it, at random; smaller is more urgent.
        clients: name -> share of the requests that it sends, at random; what fairness is counted by.
        temperature: of sampling; 0 is greedy.
        predictor: what policies are told of output lengths, as `Request.predicted_tokens`.
    """

    num_requests: int = Field(default=64, ge=1)
    arrivals: ArrivalSettings = ArrivalSettings(process="at_once")
    lengths: LengthSettings = LogNormalLengths(source="lognormal")
    priorities: Mapping[int, float] = Field(default_factory=lambda: {0: 1.0})
    clients: Mapping[str, float] = Field(default_factory=lambda: {"": 1.0})
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    predictor: PredictorSettings = NoPredictor()

    @field_validator("priorities", "clients")
    @classmethod
    def _shares(cls, shares: Mapping[Any, float]) -> Mapping[Any, float]:
        if not shares or any(not share > 0 for share in shares.values()) or abs(sum(shares.values()) - 1) > 1e-6:
            raise ValueError(f"shares {dict(shares)} must be above 0 and sum to 1")
        return shares


@dataclass(frozen=True)
class Workload:
    """Arrivals in order of time, and what the table says of them."""

    arrivals: list[Arrival]
    origin: str
    warnings: tuple[str, ...] = ()
    statistics: Mapping[str, Any] = field(default_factory=dict)


def build_workload(
    settings: WorkloadSettings, seed: int, *, vocab_size: int, tokenizer: Encoder | None = None
) -> Workload:
    """The same arrivals, lengths, prompts and priorities for every policy that a comparison gives the same seed.

    Args:
        settings: what to make.
        seed: base of the streams "arrivals", "lengths", "tokens", "priorities", "clients", "sampling" and
            "predictions".
        vocab_size: random prompts are drawn below it.
        tokenizer: turns texts into prompts, where the source of lengths has texts.

    Raises:
        WorkloadError: see `draw_lengths` and `predict`.
    """
    count = settings.num_requests
    times = arrival_times(settings.arrivals, count, stream(seed, "arrivals"))
    lengths = draw_lengths(settings.lengths, count, stream(seed, "lengths"), tokenizer)
    tokens, classes = stream(seed, "tokens"), sorted(settings.priorities)
    shares = [settings.priorities[value] for value in classes]
    priorities = stream(seed, "priorities").choice(len(classes), size=count, p=shares).tolist()
    names = list(settings.clients)
    clients = stream(seed, "clients").choice(len(names), size=count, p=list(settings.clients.values())).tolist()
    seeds = stream(seed, "sampling").integers(0, 2**31, count).tolist()
    outputs = [sample.output_tokens for sample in lengths.samples]
    predictions = predict(settings.predictor, outputs, stream(seed, "predictions"))
    arrivals = []
    for index, (time, sample) in enumerate(zip(times, lengths.samples, strict=True)):
        prompt = sample.prompt_token_ids
        if prompt is None:
            prompt = tokens.integers(0, vocab_size, sample.prompt_tokens).tolist()
        sampling = SamplingParams(
            temperature=settings.temperature,
            seed=seeds[index],
            max_tokens=sample.output_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        arrivals.append(
            Arrival(
                time,
                f"request-{index:04d}",
                prompt,
                sampling,
                priority=classes[priorities[index]],
                client=names[clients[index]],
                predicted_tokens=predictions.lengths[index],
            )
        )
    statistics = {
        "num_requests": count,
        "prompt_tokens": sum(sample.prompt_tokens for sample in lengths.samples),
        "output_tokens": sum(outputs),
        "longest_prompt": max(sample.prompt_tokens for sample in lengths.samples),
        "longest_total": max(sample.prompt_tokens + sample.output_tokens for sample in lengths.samples),
        "last_arrival": times[-1],
        "predictor": settings.predictor.kind,
        "predictor_kendall_tau": predictions.kendall_tau,
    }
    return Workload(arrivals, lengths.origin, (*lengths.warnings, *predictions.warnings), statistics)
