"""A workload: arrivals, lengths, prompts and priorities, a pure function of settings, seed and tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, field_validator, model_validator

from experiments.settings import Settings
from experiments.workloads.arrivals import ArrivalSettings, arrival_times
from experiments.workloads.file_notice import FileNotice
from experiments.workloads.follow_ups import ConversationSettings, FollowUps, PrefixSettings, Turn
from experiments.workloads.lengths import LengthSettings
from experiments.workloads.predictors import ClassPredictor, NoPredictor, PredictorSettings, predict
from experiments.workloads.samples import Encoder, Sample, Segment
from experiments.workloads.streams import stream
from experiments.workloads.synthetic import LogNormalLengths
from experiments.workloads.trace_files import TraceLengths, existing_file
from research_engine.engine.driver import Arrival
from research_engine.engine.sampling_params import SamplingParams


class WorkloadSettings(Settings):
    """What arrives when.

    Args:
        num_requests: how many; every turn of a conversation is one.
        arrivals: the arrival process; of conversations, that of their first turns.
        lengths: where prompt and output lengths come from. Output lengths are forced: a request goes on past the
            end-of-sequence token until it has its length, so that every policy serves the same work.
        shared_prefixes: texts that prompts begin with; they come on top of the lengths.
        conversations: join requests to conversations; a prompt's length is then that of its own tokens alone.
        priorities: priority -> share of the requests that carry it, at random; smaller is more urgent.
        clients: name -> share of the requests that it sends, at random; what fairness is counted by. None takes the
            clients that the arrivals or the lengths name, and one of no name where they don't.
        temperature: of sampling; 0 is greedy.
        predictor: what policies are told of output lengths, as `Request.predicted_tokens`.
    """

    num_requests: int = Field(default=64, ge=1, le=10_000_000)
    arrivals: ArrivalSettings = ArrivalSettings(process="at_once")
    lengths: LengthSettings = LogNormalLengths(source="lognormal")
    shared_prefixes: PrefixSettings | None = None
    conversations: ConversationSettings | None = None
    priorities: Mapping[int, float] = Field(default_factory=lambda: {0: 1.0})
    clients: Mapping[str, float] | None = None
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    predictor: PredictorSettings = NoPredictor()

    @field_validator("priorities", "clients")
    @classmethod
    def _shares(cls, shares: Mapping[Any, float] | None) -> Mapping[Any, float] | None:
        if shares is None:
            return None
        if not shares or any(not share > 0 for share in shares.values()) or abs(sum(shares.values()) - 1) > 1e-6:
            raise ValueError(f"shares {dict(shares)} must be above 0 and sum to 1")
        return shares

    @model_validator(mode="after")
    def _times_are_there(self) -> WorkloadSettings:
        if self.arrivals.process == "trace":
            if not (isinstance(self.lengths, TraceLengths) and self.lengths.has_times):
                raise ValueError(f"arrivals: process trace: lengths of source {self.lengths.source} have no times")
            if self.lengths.order == "shuffle":
                raise ValueError("arrivals: process trace needs lengths.order: file or window; shuffle loses the times")
            if self.conversations is not None:
                raise ValueError("arrivals: process trace and conversations exclude each other")
        return self

    def files(self) -> list[Path]:
        """Every file that the workload is made of, for the trial's key. Raises WorkloadError: one is missing."""
        named = [existing_file(path) for path in self.arrivals.clients or ()]
        if isinstance(self.predictor, ClassPredictor):
            named.append(existing_file(self.predictor.path))
        if isinstance(self.lengths, TraceLengths):
            public = self.lengths.file()
            return named if public is None else [*named, public]
        own = getattr(self.lengths, "path", None)
        return named if own is None else [*named, existing_file(own)]


@dataclass(frozen=True)
class Workload:
    """Arrivals in order of time, and what the table says of them.

    Attributes:
        arrivals: those whose time is known beforehand.
        follow_ups: what comes after their ends; None when nothing does, as in an open loop.
        notice: one of the warnings that is about a file, and worth hearing once.
    """

    arrivals: list[Arrival]
    origin: str
    warnings: tuple[str, ...] = ()
    statistics: Mapping[str, Any] = field(default_factory=dict)
    follow_ups: FollowUps | None = None
    notice: FileNotice | None = None


def build_workload(
    settings: WorkloadSettings, seed: int, *, vocab_size: int, tokenizer: Encoder | None = None
) -> Workload:
    """The same arrivals, lengths, prompts and priorities for every policy that a comparison gives the same seed.

    Args:
        settings: what to make.
        seed: base of the streams "arrivals", "lengths", "tokens", "prefixes", "turns", "priorities", "clients",
            "sampling" and "predictions".
        vocab_size: random prompts are drawn below it.
        tokenizer: turns texts into prompts, where the source of lengths has texts.

    Raises:
        WorkloadError: see `LengthSettings`, `arrival_times` and `predict`.
    """
    count = settings.num_requests
    lengths = settings.lengths.draw(count, stream(seed, "lengths"), tokenizer)
    samples = _with_prefixes(settings.shared_prefixes, lengths.samples, stream(seed, "prefixes"))
    sizes, thinks = _conversations(settings.conversations, count, stream(seed, "turns"))
    tick = settings.lengths.tick if isinstance(settings.lengths, TraceLengths) else 0.0
    times = arrival_times(settings.arrivals, len(sizes), stream(seed, "arrivals"), samples, tick)
    firsts = np.cumsum([0, *sizes[:-1]]).tolist()
    outputs = [sample.output_tokens for sample in samples]
    predictions = predict(settings.predictor, outputs, stream(seed, "predictions"))
    requests = _requests(settings, seed, samples, predictions.lengths, vocab_size)
    if settings.clients is None and times.clients is not None:
        for index, client in zip(firsts, times.clients, strict=True):
            requests[index] = replace(requests[index], client=client)
    next_turn: dict[str, Turn] = {}
    totals, starts = [], []
    for first, size, time in zip(firsts, sizes, times.times, strict=True):
        opening = replace(requests[first], time=time)
        starts.append(opening)
        history = 0
        for index in range(first, first + size):
            history += samples[index].prompt_tokens + outputs[index]
            totals.append(history)
            if index > first:
                turn = replace(requests[index], client=opening.client, priority=opening.priority)
                next_turn[requests[index - 1].request_id] = Turn(turn, thinks[index])
    waiting: list[Arrival] = []
    if settings.arrivals.is_closed:
        starts, waiting = starts[: settings.arrivals.concurrency], starts[settings.arrivals.concurrency :]
    follow_ups = None
    if next_turn or waiting:
        follow_ups = FollowUps(next_turn, tuple(waiting), settings.arrivals.think_time or 0.0)
    statistics = {
        "num_requests": count,
        "prompt_tokens": sum(total - output for total, output in zip(totals, outputs, strict=True)),
        "output_tokens": sum(outputs),
        "longest_prompt": max(total - output for total, output in zip(totals, outputs, strict=True)),
        "longest_total": max(totals),
        "last_arrival": starts[-1].time,
        "predictor": settings.predictor.kind,
        "predictor_kendall_tau": predictions.kendall_tau,
        "loop": _loop(settings),
        "digest": _digest(requests, starts, next_turn),
    }
    warnings = (*lengths.warnings, *predictions.warnings)
    return Workload(starts, _origin(settings, lengths.origin), warnings, statistics, follow_ups, lengths.notice)


def _requests(
    settings: WorkloadSettings, seed: int, samples: Sequence[Sample], predicted: Sequence[int | None], vocab_size: int
) -> list[Arrival]:
    """The requests one by one, without their times."""
    count, tokens, classes = len(samples), stream(seed, "tokens"), sorted(settings.priorities)
    shares = [settings.priorities[value] for value in classes]
    priorities = stream(seed, "priorities").choice(len(classes), size=count, p=shares).tolist()
    names = list(settings.clients or {"": 1.0})
    parts = list((settings.clients or {"": 1.0}).values())
    clients = stream(seed, "clients").choice(len(names), size=count, p=parts).tolist()
    seeds = stream(seed, "sampling").integers(0, 2**31, count).tolist()
    known: dict[Segment, list[int]] = {}
    requests = []
    for index, sample in enumerate(samples):
        prompt = sample.prompt_token_ids
        if prompt is None or sample.segments is not None:
            prompt = _prompt(sample, seed, tokens, vocab_size, known)
        sampling = SamplingParams(
            temperature=settings.temperature,
            seed=seeds[index],
            max_tokens=sample.output_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        own = sample.client if settings.clients is None else None
        requests.append(
            Arrival(
                0.0,
                f"request-{index:04d}",
                prompt,
                sampling,
                priority=classes[priorities[index]],
                client=names[clients[index]] if own is None else own,
                predicted_tokens=predicted[index],
            )
        )
    return requests


def _prompt(
    sample: Sample, seed: int, tokens: np.random.Generator, vocab_size: int, known: dict[Segment, list[int]]
) -> list[int]:
    """Segments by their keys, then the sample's own tokens; `known` keeps segments that were made before."""
    prompt: list[int] = []
    for segment in sample.segments or ():
        if segment not in known:
            rng = stream(seed, f"segment {segment.key}")
            known[segment] = rng.integers(0, vocab_size, segment.tokens).tolist()
        prompt += known[segment]
    if sample.prompt_token_ids is not None:
        return prompt + list(sample.prompt_token_ids)
    own: list[int] = tokens.integers(0, vocab_size, sample.prompt_tokens - len(prompt)).tolist()
    return prompt + own


def _with_prefixes(settings: PrefixSettings | None, samples: list[Sample], rng: np.random.Generator) -> list[Sample]:
    if settings is None:
        return samples
    shares = np.arange(1, settings.count + 1) ** -settings.exponent
    picked = rng.choice(settings.count, size=len(samples), p=shares / shares.sum()).tolist()
    out = []
    for sample, index in zip(samples, picked, strict=True):
        prefix = Segment(f"prefix {index}", settings.tokens)
        segments = (prefix, *(sample.segments or ()))
        out.append(replace(sample, prompt_tokens=sample.prompt_tokens + settings.tokens, segments=segments))
    return out


def _conversations(
    settings: ConversationSettings | None, count: int, rng: np.random.Generator
) -> tuple[list[int], list[float]]:
    """Turns of each conversation, `count` in all, and the pause before each turn."""
    if settings is None:
        return [1] * count, [0.0] * count
    drawn = rng.integers(*settings.turns, count, endpoint=True).tolist()
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(min(drawn[len(sizes)], count - sum(sizes)))
    pauses: list[float] = (settings.think_time * rng.standard_exponential(count)).tolist()
    return sizes, pauses


def _loop(settings: WorkloadSettings) -> str:
    if settings.arrivals.is_closed:
        return f"closed loop, {settings.arrivals.concurrency} at once"
    return "open loop" if settings.conversations is None else "open loop, later turns after the answer"


def _origin(settings: WorkloadSettings, lengths: str) -> str:
    parts = [lengths]
    if settings.shared_prefixes is not None:
        parts.append(f"{settings.shared_prefixes.count} shared prefixes of {settings.shared_prefixes.tokens} tokens")
    if settings.conversations is not None:
        least, most = settings.conversations.turns
        parts.append(f"conversations of {least} to {most} turns")
    return ", ".join(parts)


def _digest(requests: Sequence[Arrival], starts: Sequence[Arrival], next_turn: Mapping[str, Turn]) -> str:
    """Tells whether two trials served the same requests."""
    digest = hashlib.sha256()
    for arrival in requests:
        digest.update(np.asarray(arrival.prompt_token_ids, dtype=np.int64).tobytes())
        digest.update(repr((arrival.sampling.max_tokens, arrival.priority, arrival.client)).encode())
    digest.update(repr([(a.request_id, a.time) for a in starts]).encode())
    digest.update(repr([(key, turn.think) for key, turn in next_turn.items()]).encode())
    return digest.hexdigest()[:16]
