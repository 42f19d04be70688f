"""What a load generator asks: prompts with output lengths, and arrivals where the data have them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from research_engine.bench.prompts import PromptMaker, TokenizerLike, stream
from research_engine.bench.serve_options import DatasetOptions
from research_engine.bench.traces import TraceRow, read_trace
from research_engine.datasets.sharegpt import ConversationFile, packaged_file

_SHARE_GPT_BOUNDS = {"min_tokens": 4, "max_prompt": 1024, "max_total": 2048}  # those of the usual benchmarks
_BLOCK = 512  # tokens of a Mooncake prefix block


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    Attributes:
        prompt: text, or token ids.
        prompt_tokens: its length as counted here; None where only the server can tell.
        output_tokens: to ask for at most.
        arrival: seconds after the first request, where the data say when it came.
    """

    prompt: str | list[int]
    prompt_tokens: int | None
    output_tokens: int
    arrival: float | None = None


Draw = Callable[[int, int], list[Sample]]


@dataclass(frozen=True)
class Dataset:
    """Requests to draw from.

    Attributes:
        draw: `draw(count, run)`. The runs of a sweep (0, 1, ...) and the warm-up (-1) get other prompts of the same
            kind, so that none finds its own in the server's prefix cache; the same run always gets the same ones.
        origin: in words.
        is_timed: samples have arrivals.
    """

    draw: Draw
    origin: str
    is_timed: bool = False


def build_dataset(options: DatasetOptions, seed: int, tokenizer: TokenizerLike | None, *, as_text: bool) -> Dataset:
    """The dataset that the options name.

    Args:
        tokenizer: counts tokens and makes random prompts; None where there is none.
        as_text: the endpoint takes no token ids as a prompt.

    Raises:
        ValueError: a file cannot be read or lacks something; or the dataset needs a tokenizer.
    """
    if options.dataset_name == "random":
        return _random(options, seed, PromptMaker(tokenizer, seed, as_text=as_text))
    if options.dataset_name == "prefix_repetition":
        return _prefix_repetition(options, seed, PromptMaker(tokenizer, seed, as_text=as_text))
    if options.dataset_name == "trace":
        return _trace(options, seed, PromptMaker(tokenizer, seed, as_text=as_text))
    if options.dataset_name == "custom":
        return _custom(options, seed, tokenizer)
    return _sharegpt(options, seed, tokenizer)


def _random(options: DatasetOptions, seed: int, maker: PromptMaker) -> Dataset:
    ratio = options.random_range_ratio

    def draw(count: int, run: int) -> list[Sample]:
        lengths = stream(seed, "lengths")  # the same in every run
        tokens = stream(seed, "tokens", run)
        prefix = maker.words(options.random_prefix_len, stream(seed, "prefix"))
        low, high = (
            math.floor(options.random_input_len * (1 - ratio)),
            math.ceil(options.random_input_len * (1 + ratio)),
        )
        inputs = lengths.integers(max(low, 0 if prefix else 1), high + 1, count).tolist()
        low, high = (
            math.floor(options.random_output_len * (1 - ratio)),
            math.ceil(options.random_output_len * (1 + ratio)),
        )
        outputs = lengths.integers(max(low, 1), high + 1, count).tolist()
        return [
            Sample(*maker.prompt([*prefix, *maker.words(length, tokens)]), output)
            for length, output in zip(inputs, outputs, strict=True)
        ]

    shape = f"{options.random_input_len} in, {options.random_output_len} out, range ratio {ratio:g}"
    prefix = f", shared prefix {options.random_prefix_len}" if options.random_prefix_len else ""
    return Dataset(draw, f"random, {shape}{prefix}")


def _around(middle: int, ratio: float, least: int, count: int, rng: np.random.Generator) -> list[int]:
    """Uniform between (1 - ratio) and (1 + ratio) times the middle, both rounded away from it."""
    low, high = math.floor(middle * (1 - ratio)), math.ceil(middle * (1 + ratio))
    lengths: list[int] = rng.integers(max(low, least), high + 1, count).tolist()
    return lengths


def _prefix_repetition(options: DatasetOptions, seed: int, maker: PromptMaker) -> Dataset:
    kinds = options.prefix_repetition_num_prefixes

    def draw(count: int, run: int) -> list[Sample]:
        tokens = stream(seed, "tokens", run)
        length, suffix = options.prefix_repetition_prefix_len, options.prefix_repetition_suffix_len
        prefixes = [maker.words(length, tokens) for _ in range(kinds)]
        order = stream(seed, "order").permutation(count) % kinds
        return [
            Sample(*maker.prompt([*prefixes[kind], *maker.words(suffix, tokens)]), options.prefix_repetition_output_len)
            for kind in order.tolist()
        ]

    return Dataset(draw, f"prefix_repetition, {kinds} prefixes of {options.prefix_repetition_prefix_len} tokens")


def _sharegpt(options: DatasetOptions, seed: int, tokenizer: TokenizerLike | None) -> Dataset:
    if tokenizer is None:
        raise ValueError("dataset-name sharegpt: needs a tokenizer, to know how long its answers are")
    path = packaged_file() if options.dataset_path is None else _existing(options.dataset_path)
    file = ConversationFile(path)
    turns = list(file)
    if file.fault is not None and not file.records:
        raise ValueError(f"{path}: {file.fault}")
    found: list[Sample] = []
    order = iter(stream(seed, "order").permutation(len(turns)).tolist())

    def more(wanted: int) -> None:
        """Encode conversations in the shuffled order until so many keep the bounds, or none is left."""
        bounds = _SHARE_GPT_BOUNDS
        while len(found) < wanted and (index := next(order, None)) is not None:
            prompt = len(tokenizer.encode(turns[index].prompt))
            fixed = options.sharegpt_output_len
            output = len(tokenizer.encode(turns[index].answer, add_special_tokens=False)) if fixed is None else fixed
            enough = prompt >= bounds["min_tokens"] and (fixed is not None or output >= bounds["min_tokens"])
            if enough and prompt <= bounds["max_prompt"] and prompt + output <= bounds["max_total"]:
                found.append(Sample(turns[index].prompt, prompt, output))

    return Dataset(_Listed(found, more, path.name).draw, f"ShareGPT, {len(turns):,} conversations of {path.name}")


def _custom(options: DatasetOptions, seed: int, tokenizer: TokenizerLike | None) -> Dataset:
    if options.dataset_path is None:
        raise ValueError('dataset-name custom: needs dataset-path, a .jsonl file of {"prompt": ...}')
    path = _existing(options.dataset_path)
    samples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise ValueError(f'{path.name}, line {number}: must be an object with a text "prompt"')
        output: Any = options.custom_output_len
        if output == -1:
            output = record.get("output_tokens")
            if not isinstance(output, int) or output < 1:
                raise ValueError(f'{path.name}, line {number}: custom-output-len -1 needs "output_tokens" >= 1')
        count = None if tokenizer is None else len(tokenizer.encode(record["prompt"]))
        samples.append(Sample(record["prompt"], count, output))
    if not options.disable_shuffle:
        samples = [samples[index] for index in stream(seed, "order").permutation(len(samples)).tolist()]
    return Dataset(_Listed(samples, lambda wanted: None, path.name).draw, f"custom, {path.name}")


class _Listed:
    """Prompts that there are only so many of: each run takes the next ones, and the first again when all are used.

    Args:
        found: filled in the order in which they are taken.
        more: adds to `found` until it holds so many, or none is left.
    """

    def __init__(self, found: list[Sample], more: Callable[[int], None], name: str) -> None:
        self._found, self._more, self._name = found, more, name
        self._begins: dict[int, int] = {}
        self._free = 0

    def draw(self, count: int, run: int) -> list[Sample]:
        if run not in self._begins:
            self._begins[run] = self._free
            self._free += count
        begin = self._begins[run]
        self._more(begin + count)
        if not self._found:
            raise ValueError(f"{self._name}: holds no prompt that could be used")
        return [self._found[(begin + index) % len(self._found)] for index in range(count)]


def _trace(options: DatasetOptions, seed: int, maker: PromptMaker) -> Dataset:
    if options.dataset_path is None:
        raise ValueError("dataset-name trace: needs dataset-path, a .csv or .jsonl file")
    path = _existing(options.dataset_path)
    rows = read_trace(path)
    timed = rows[0].arrival is not None and options.self_timed

    def draw(count: int, run: int) -> list[Sample]:
        if timed and count > len(rows):
            raise ValueError(f"num-prompts = {count}: {path.name} has {len(rows)} requests with times")
        tokens = stream(seed, "tokens", run)
        samples = []
        for index in range(count):
            row = rows[index % len(rows)]
            sample = Sample(*maker.prompt(_trace_words(row, run, seed, maker, tokens)), row.output_tokens)
            samples.append(replace(sample, arrival=row.arrival) if timed else sample)
        return samples

    return Dataset(draw, f"trace, {path.name}" + (", with its times" if timed else ""), is_timed=timed)


def _trace_words(row: TraceRow, run: int, seed: int, maker: PromptMaker, tokens: np.random.Generator) -> list[int]:
    """Random words; blocks of the same hash have the same ones, which is what prefix caches live on."""
    words: list[int] = []
    for block in row.blocks[: -(-row.prompt_tokens // _BLOCK)]:
        words += maker.words(_BLOCK, stream(seed, "block", run, block))
    rest = row.prompt_tokens - len(words)
    return words[: row.prompt_tokens] if rest <= 0 else words + maker.words(rest, tokens)


def _existing(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"dataset-path = {name!r}: no such file")
    return path
