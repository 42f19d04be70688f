"""From a resolved source to a configuration, a tokenizer and a model with every weight accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from research_engine.loading.dummy import DUMMY_MODELS
from research_engine.loading.errors import LoadError
from research_engine.loading.source import ModelSource
from research_engine.models.config import ConfigError, ModelConfig

if TYPE_CHECKING:
    import torch

    from research_engine.loading.checkpoint import Checkpoint
    from research_engine.loading.tokenizer import Tokenizer
    from research_engine.models.llama import LlamaForCausalLM

_LISTED = 5  # names an error spells out before it counts the rest


def load_config(source: ModelSource) -> ModelConfig:
    """The configuration alone; reads no weights and does not import torch for a directory or a dummy.

    Raises:
        LoadError: the file is missing, not readable, or describes a model that is not supported.
    """
    if source.format == "dummy":
        return DUMMY_MODELS[source.name].config
    try:
        if source.format == "safetensors":
            generation = source.file("generation_config.json")
            config = ModelConfig.from_hf(
                read_json(source.file("config.json")), read_json(generation) if generation.exists() else None
            )
        else:
            from research_engine.loading.gguf import GgufFile, rope_factors

            file = GgufFile(source.location)
            tied = "output.weight" not in file.tensors
            config = ModelConfig.from_gguf(file.metadata, tied=tied, rope_factors=rope_factors(file))
    except ConfigError as error:
        raise LoadError(f"{source.location}: {error}") from error
    return config


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The model's tokenizer with its chat template and end tokens.

    Raises:
        LoadError: the source carries none, or one of a kind that is not supported.
    """
    from research_engine.loading import tokenizer

    if source.format == "dummy":
        if not DUMMY_MODELS[source.name].has_tokenizer:
            raise LoadError(
                f"{source.name} has no tokenizer: pass token ids and skip_tokenizer_init=True, or use dummy:tiny"
            )
        return tokenizer.byte_tokenizer()
    if source.format == "gguf":
        from research_engine.loading.gguf import GgufFile

        return tokenizer.tokenizer_from_gguf(GgufFile(source.location))
    return tokenizer.tokenizer_from_directory(source.location, load_config(source).eos_token_ids)


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    dummy_weights: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> LlamaForCausalLM:
    """Build the model and fill it. ``seed`` is for dummy weights.

    Args:
        dtype: float32, bfloat16, or on a GPU float16; weights are converted to it.
        device: where the model lives.
        dummy_weights: fill it with pseudo-random weights whatever the source holds.
        progress: show a bar on standard error.

    Raises:
        LoadError: names the tensor that is missing, unexpected, of the wrong shape, unreadable or not finite.
    """
    import torch

    from research_engine.models.registry import model_class

    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise LoadError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    device = torch.device(device)
    if dtype == torch.float16 and device.type == "cpu":
        raise LoadError("dtype float16 has no CPU kernels; use float32 or bfloat16")
    config = load_config(source)
    try:
        kind = model_class(config.architecture)
    except ConfigError as error:
        raise LoadError(f"{source.location}: {error}") from error
    checkpoint = open_checkpoint(source, config, seed=seed, dummy_weights=dummy_weights)
    check_tensors(checkpoint, config, kind, dtype)
    with torch.inference_mode():
        try:
            model = kind(config, dtype=dtype, device=device)
        except RuntimeError as error:  # what torch raises when memory is short, on a CPU and on a GPU
            size = config.num_parameters * dtype.itemsize / 2**30
            raise LoadError(
                f"{checkpoint.location}: no memory for {size:.1f} GiB of weights on {device}: {error}"
            ) from error
        views = model.parameters()
        with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
            for name in bar.track(views, description=f"loading {source.name}"):
                _fill(views[name], name, checkpoint, device)
        for name, value in model.derived().items():
            if name in checkpoint.shapes() and not torch.allclose(
                checkpoint.read(name, device).float(), value.to(device).float(), rtol=1e-2, atol=1e-6
            ):
                raise LoadError(
                    f"{checkpoint.location}: tensor {name!r} contradicts the value that follows from the configuration"
                )
        del views
        model.prepare()
    return model


def open_checkpoint(
    source: ModelSource, config: ModelConfig, *, seed: int = 0, dummy_weights: bool = False
) -> Checkpoint:
    """The source's weights, or pseudo-random ones, to be read tensor by tensor under Hugging Face's names."""
    if dummy_weights or source.format == "dummy":
        from research_engine.loading.dummy import DummyCheckpoint

        return DummyCheckpoint(source.name, config, seed)
    if source.format == "gguf":
        from research_engine.loading.gguf import GgufCheckpoint, GgufFile

        return GgufCheckpoint(GgufFile(source.location))
    from research_engine.loading.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.location)


def check_tensors(
    checkpoint: Checkpoint, config: ModelConfig, kind: type[LlamaForCausalLM], dtype: torch.dtype
) -> None:
    """Every tensor the model wants is there with its shape, and nothing else; before any memory is taken."""
    shapes = checkpoint.shapes()
    if config.num_layers > len(shapes):  # a corrupt count must not become a million layers
        raise LoadError(f"{checkpoint.location}: {len(shapes)} tensors are too few for {config.num_layers} layers")
    blank = kind(config, dtype=dtype, device="meta")
    wanted, derived = blank.parameters(), blank.derived()
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise LoadError(f"{checkpoint.location}: missing {_listing(missing)}")
    unexpected = [name for name in shapes if name not in wanted and name not in derived]
    if unexpected:
        raise LoadError(
            f"{checkpoint.location}: unexpected {_listing(unexpected)}; the model has no place for it, and leaving it "
            "out could change results"
        )
    for name, shape in shapes.items():
        asked = tuple((wanted[name] if name in wanted else derived[name]).shape)
        if shape != asked:
            raise LoadError(
                f"{checkpoint.location}: tensor {name!r} has the shape {list(shape)}, the configuration asks for "
                f"{list(asked)}"
            )


def _fill(view: torch.Tensor, name: str, checkpoint: Checkpoint, device: torch.device) -> None:
    view.copy_(checkpoint.read(name, device))
    if not bool(view.isfinite().all()):
        raise LoadError(
            f"{checkpoint.location}: tensor {name!r} holds values that are not finite in {view.dtype}: corrupt, or too "
            "large for this dtype"
        )


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:_LISTED])}{more}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a LoadError that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: must hold a JSON object")
    return value
