"""Loads a model that only transformers can run, through transformers, and holds its weights to the same rules."""

from __future__ import annotations

import warnings

import torch

from research_engine.loading.errors import LoadError
from research_engine.loading.matching import listing
from research_engine.loading.source import ModelSource
from research_engine.models.config import ModelConfig
from research_engine.models.errors import ConfigError
from research_engine.models.fallback import ATTENTION, FallbackWarning, TransformersDecoder, register


def load_module(
    source: ModelSource, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int | None
) -> TransformersDecoder:
    """transformers' own class for the architecture, its attention paged; warns that it is not this project's.

    Args:
        seed: of random weights instead of the source's; None for the source's.

    Raises:
        LoadError: a tensor is missing, unexpected or of the wrong shape, or the model's attention cannot be paged.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    warnings.warn(
        f"{config.architecture} has no definition of its own here: transformers' modules run it, with paged attention "
        "in place of theirs; right, but slower than the families that have one",
        FallbackWarning,
        stacklevel=3,
    )
    directory, options = str(source.directory), {"local_files_only": True, "trust_remote_code": False}
    try:
        if seed is None:
            module, report = AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True, **options
            )
        else:
            report = {}
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                hf_config = AutoConfig.from_pretrained(directory, **options)
                module = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation=ATTENTION)
    except Exception as error:  # transformers raises many kinds for files that it cannot read
        raise LoadError(f"{source.location}: transformers cannot load it: {type(error).__name__}: {error}") from error
    for key, what in (
        ("missing_keys", "missing"), ("unexpected_keys", "unexpected"), ("mismatched_keys", "wrong shape in")
    ):  # fmt: skip
        if names := sorted(str(name) for name in report.get(key, ())):
            raise LoadError(f"{source.location}: {what} {listing(names)}")
    for name, weight in module.named_parameters():
        if not bool(weight.isfinite().all()):
            raise LoadError(f"{source.location}: tensor {name!r} holds values that are not finite in {dtype}")
    try:
        return TransformersDecoder(module.to(device), config, dtype=dtype, device=device)
    except ConfigError as error:
        raise LoadError(f"{source.location}: {error}") from error
