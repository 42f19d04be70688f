"""From a resolved source to a configuration, a tokenizer and a model with every weight accounted for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from research_engine.loading.dummy import DUMMY_MODELS
from research_engine.loading.errors import LoadError
from research_engine.loading.source import ModelSource
from research_engine.models.config import ConfigError, ModelConfig
from research_engine.models.families import FAMILIES, names_of, nearest_families
from research_engine.models.hf_config import architecture_of

if TYPE_CHECKING:
    import torch

    from research_engine.loading.checkpoint import Checkpoint
    from research_engine.loading.matching import Match
    from research_engine.loading.tokenizer import Tokenizer
    from research_engine.models.decoder import Decoder
    from research_engine.models.fallback import TransformersDecoder


def load_config(source: ModelSource, *, trust_remote_code: bool = False) -> ModelConfig:
    """The configuration alone; reads no weights, and imports torch only for a model that transformers has to run.

    Args:
        trust_remote_code: run the code a repository brings for its configuration, if there is some.

    Raises:
        LoadError: the file is missing, not readable, or describes a model that is not supported.
    """
    if source.format == "dummy":
        return DUMMY_MODELS[source.name].config
    try:
        if source.format == "gguf":
            from research_engine.loading.gguf import GgufFile, config_of

            return config_of(GgufFile(source.location))
        path = source.file("generation_config.json")
        config, generation = _hf_config(source, trust_remote_code), read_json(path) if path.exists() else None
        if architecture_of(config) in FAMILIES:
            return ModelConfig.from_hf(config, generation)
        return _config_of_another(source, config, generation, trust_remote_code)
    except ConfigError as error:
        raise LoadError(f"{source.location}: {error}") from error


def _hf_config(source: ModelSource, trust_remote_code: bool) -> dict[str, Any]:
    """config.json as a dictionary, or what the repository's own code makes of it."""
    config = read_json(source.file("config.json"))
    if trust_remote_code and "AutoConfig" in (config.get("auto_map") or {}):
        made: dict[str, Any] = _auto_config(source, True).to_dict()
        return {**config, **made}
    return config


def _auto_config(source: ModelSource, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            str(source.directory), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # a repository's code, or transformers' checks, may raise anything
        raise LoadError(f"{source.file('config.json')}: transformers cannot read it: {error}") from error


def _config_of_another(
    source: ModelSource, config: dict[str, Any], generation: dict[str, Any] | None, trust_remote_code: bool
) -> ModelConfig:
    """Of a decoder that transformers knows and this project does not."""
    from research_engine.models.fallback import config_from_transformers, is_known_to_transformers

    architecture = architecture_of(config)
    if not is_known_to_transformers(architecture):
        own_code = " (the code that the repository brings for it is never run)" if config.get("auto_map") else ""
        raise LoadError(
            f"{source.location}: architecture {architecture!r} is not supported{own_code}; supported, nearest first: "
            f"{', '.join(nearest_families(architecture))}; and, through transformers' modules, every decoder that the "
            "installed transformers has as a causal language model"
        )
    if config.get("quantization_config"):
        raise LoadError(f"{source.location}: {architecture} with quantized weights is not supported; use float weights")
    return config_from_transformers(_auto_config(source, trust_remote_code), architecture, generation)


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> Tokenizer:
    """The model's tokenizer with its chat template and end tokens.

    Args:
        trust_remote_code: run the code a repository brings for its tokenizer, if there is some.

    Raises:
        LoadError: the source carries none, or one of a kind that is not supported, or its vocabulary is larger than the
            model's.
    """
    from research_engine.loading import tokenizer

    if source.format == "dummy":
        if not DUMMY_MODELS[source.name].has_tokenizer:
            raise LoadError(
                f"{source.name} has no tokenizer: pass token ids and skip_tokenizer_init=True, or use dummy:tiny"
            )
        return tokenizer.byte_tokenizer()
    config = load_config(source, trust_remote_code=trust_remote_code)
    if source.format == "gguf":
        from research_engine.loading.gguf import GgufFile

        made = tokenizer.tokenizer_from_gguf(GgufFile(source.location))
    else:
        made = tokenizer.tokenizer_from_directory(
            source.location, config.eos_token_ids, trust_remote_code=trust_remote_code, streams=config.causal
        )
    if made.base_vocab_size > config.vocab_size:
        raise LoadError(
            f"{source.location}: the tokenizer has {made.base_vocab_size} tokens and the model embeddings for "
            f"{config.vocab_size}: they do not belong together"
        )
    return made


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    dummy_weights: bool = False,
    seed: int = 0,
    progress: bool = True,
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    weight_packing: str = "auto",
) -> Decoder | TransformersDecoder:
    """Build the model and fill it. ``seed`` is for dummy weights.

    Beside the weights it holds one file of the checkpoint at most, and that only mapped; no weight is held twice.

    Args:
        dtype: float32, bfloat16, or on a GPU float16; weights are converted to it.
        device: where the model lives.
        dummy_weights: fill it with pseudo-random weights whatever the source holds.
        progress: show a bar on standard error.
        max_model_len: the longest sequence to be served, None for all that the model reaches; rotary scalings that
            depend on the longest sequence take it from here.
        trust_remote_code: as in `load_config`; code for a model is never run.
        weight_packing: of quantised matrices: "packed" keeps them so, "dequantized" makes them floats; "auto" keeps
            those of safetensors and makes GGUF's floats.

    Raises:
        LoadError: names the tensor that is missing, unexpected, of the wrong shape, unreadable or not finite; or
            weights are to be packed that cannot be.
    """
    import torch

    from research_engine.loading.matching import match_tensors
    from research_engine.models.decoder import Decoder

    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise LoadError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    device = torch.device(device)
    if dtype == torch.float16 and device.type == "cpu":
        raise LoadError("dtype float16 has no CPU kernels; use float32 or bfloat16")
    config = load_config(source, trust_remote_code=trust_remote_code)
    if config.architecture not in FAMILIES:
        from research_engine.loading.transformers_module import load_module

        return load_module(source, config, dtype=dtype, device=device, seed=seed if dummy_weights else None)
    checkpoint = open_checkpoint(source, config, seed=seed, dummy_weights=dummy_weights)
    if config.num_layers > len(checkpoint.shapes()):  # a corrupt count must not become a million layers
        raise LoadError(
            f"{checkpoint.location}: {len(checkpoint.shapes())} tensors are too few for {config.num_layers} layers"
        )
    match = match_tensors(checkpoint, Decoder(config, dtype=dtype, device="meta"))
    packed = _keeps_packed(checkpoint, dtype, device, weight_packing)
    with torch.inference_mode():
        with _naming_short_memory(checkpoint.location, config, dtype, device):
            model = Decoder(config, dtype=dtype, device=device, max_model_len=max_model_len, defer_matrices=packed)
        _fill(model, checkpoint, match, source.name if progress else None)
        model.kv_scales = _kv_scales(checkpoint, config)
        del checkpoint, match  # and the last file with them, before matrices are laid out anew
        model.prepare()
    return model


@contextmanager
def _naming_short_memory(
    location: str, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what torch raises when memory is short, on a CPU and on a GPU
        size = config.num_parameters * dtype.itemsize / 2**30
        raise LoadError(f"{location}: no memory for {size:.1f} GiB of weights on {device}: {error}") from error


def open_checkpoint(
    source: ModelSource, config: ModelConfig, *, seed: int = 0, dummy_weights: bool = False
) -> Checkpoint:
    """The source's weights, or pseudo-random ones, to be read tensor by tensor under Hugging Face's names."""
    if dummy_weights or source.format == "dummy":
        if config.quantization is not None:
            from research_engine.loading.dummy_quantized import DummyQuantizedCheckpoint

            return DummyQuantizedCheckpoint(source.name, config, seed)
        from research_engine.loading.dummy import DummyCheckpoint

        return DummyCheckpoint(source.name, config, seed)
    if source.format == "gguf":
        from research_engine.loading.gguf import GgufCheckpoint, GgufFile

        return GgufCheckpoint(GgufFile(source.location))
    if source.format == "bin":
        from research_engine.loading.torch_bin import TorchBinCheckpoint

        return TorchBinCheckpoint(source.location)
    from research_engine.loading.safetensors import SafetensorsCheckpoint

    checkpoint = SafetensorsCheckpoint(source.location)
    if config.quantization is None:
        return checkpoint
    from research_engine.loading.quantized import QuantizedCheckpoint

    if names_of(config.architecture).transposed:
        raise LoadError(f"{source.location}: {config.architecture} with quantized weights is not supported")
    return QuantizedCheckpoint(checkpoint, config.quantization)


def _kv_scales(checkpoint: Checkpoint, config: ModelConfig) -> torch.Tensor | None:
    """Scales of a quantised KV cache, float32 ``[L, 2]``, if the checkpoint brings them for every layer."""
    import torch

    from research_engine.loading.quantized import QuantizedCheckpoint

    if not isinstance(checkpoint, QuantizedCheckpoint) or not checkpoint.kv_scales:
        return None
    scales = [[checkpoint.kv_scale(layer, which) for which in "kv"] for layer in range(config.num_layers)]
    missing = [layer for layer, pair in enumerate(scales) if None in pair]
    if missing:
        raise LoadError(f"{checkpoint.location}: scales of the KV cache for some layers, none for layer {missing[0]}")
    return torch.tensor(scales)


def _keeps_packed(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, weight_packing: str) -> bool:
    """Whether quantised matrices stay so."""
    import torch

    from research_engine.loading.gguf import GgufCheckpoint
    from research_engine.loading.packed import QuantizedSource

    quantized = isinstance(checkpoint, QuantizedSource) and any(map(checkpoint.is_quantized, checkpoint.shapes()))
    has_kernel = device.type == "cpu" or dtype != torch.float32
    if weight_packing == "packed":
        if not quantized:
            raise LoadError(
                f"{checkpoint.location}: weight_packing = 'packed', but it holds no matrix that can stay so"
            )
        if not has_kernel:
            raise LoadError("weight_packing = 'packed' needs dtype bfloat16 or float16 on a GPU, got float32")
        return True
    return weight_packing == "auto" and quantized and has_kernel and not isinstance(checkpoint, GgufCheckpoint)


def _fill(model: Decoder, checkpoint: Checkpoint, match: Match, title: str | None) -> None:
    """Mutates the model: every weight copied, converted and laid out at once, straight into its place."""
    import torch

    from research_engine.loading.packed import QuantizedSource, defer_matrices

    pending = {}
    if model.defers_matrices and isinstance(checkpoint, QuantizedSource):
        pending = defer_matrices(model, checkpoint, match.wanted)
    views, total = model.parameters(), 0
    sizes = {name: view.numel() * view.element_size() for name, view in views.items()}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    sums: list[torch.Tensor] = []
    filled: list[str] = []
    console = Console(stderr=True)
    hidden = title is None or not console.is_terminal  # where it would leave nothing but an empty line
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task(f"loading {title}", total=sum(sizes.values()))
        for stored, name in match.wanted.items():
            total += sizes[name]
            bar.update(task, completed=total)
            if stored in pending:
                pending[stored].read(stored)
                continue
            views[name].copy_(checkpoint.read(stored, model.device))
            filled.append(stored)
            sums.append(views[name].sum().float())  # a NaN or an infinity anywhere makes it no number
    suspects = (~torch.stack(sums).isfinite()).nonzero().flatten().tolist()  # one wait for a GPU
    for index in suspects:  # or the finite values of one are so large that their sum is not
        stored, name = filled[index], match.wanted[filled[index]]
        if not bool(views[name].isfinite().all()):
            raise LoadError(
                f"{checkpoint.location}: tensor {stored!r} holds values that are not finite in {model.dtype}: corrupt, "
                "or too large for this dtype"
            )
    values = model.derived()
    for stored, name in match.derived.items():
        read = checkpoint.read(stored, model.device).float()
        if not torch.allclose(read, values[name].to(model.device).float(), rtol=1e-2, atol=1e-6):
            raise LoadError(
                f"{checkpoint.location}: tensor {stored!r} contradicts the value that follows from the configuration"
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a LoadError that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path}: must hold a JSON object")
    return value
