"""How long prompts and outputs are: every source by its name, `lengths: {source: NAME, ...}`; a file each."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from experiments.workloads.azure import AzureLengths
from experiments.workloads.columns import FileLengths
from experiments.workloads.etalon import EtalonLengths
from experiments.workloads.mooncake import MooncakeLengths
from experiments.workloads.sharegpt_lengths import ShareGPTLengths
from experiments.workloads.synthetic import FittedLengths, FixedLengths, LogNormalLengths, UniformLengths, ZipfLengths
from experiments.workloads.vtc_arena import VTCLengths

LengthSettings = Annotated[
    ShareGPTLengths
    | LogNormalLengths
    | FixedLengths
    | UniformLengths
    | ZipfLengths
    | FittedLengths
    | FileLengths
    | AzureLengths
    | MooncakeLengths
    | EtalonLengths
    | VTCLengths,
    Field(discriminator="source"),
]
"""Each has `draw(count, rng, tokenizer)`, which gives `count` samples or raises WorkloadError: a file is missing or
lacks a column, or the bounds leave too few samples. `tokenizer` is the model's; texts need it."""
