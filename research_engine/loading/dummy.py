"""Models that need no file: known shapes with pseudo-random weights, for tests, speed measurements and offline runs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from research_engine.loading.dummy_shapes import DUMMY_SHAPES
from research_engine.models.config import ModelConfig
from research_engine.models.quantization import Quantization

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DummyModel:
    """A shape by name, and whether it comes with the byte tokenizer."""

    config: ModelConfig
    has_tokenizer: bool = False


DUMMY_MODELS = {
    name: DummyModel(ModelConfig.from_hf(shape), has_tokenizer=name == "dummy:tiny")
    for name, shape in DUMMY_SHAPES.items()
}
DUMMY_MODELS["dummy:tiny-awq"] = DummyModel(
    replace(DUMMY_MODELS["dummy:tiny"].config, quantization=Quantization("awq", 4, 32)), has_tokenizer=True
)


_MODEL_TYPES = {
    "BertModel": "bert",
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "XLMRobertaModel": "xlm-roberta",
}  # transformers' names, by which it and other engines find a model's code


def hf_config(name: str) -> dict[str, Any]:
    """The config.json of a known shape, for other engines."""
    shape = DUMMY_SHAPES[name]
    return {"model_type": _MODEL_TYPES[shape["architectures"][0]], **shape}


BYTE_TOKENIZER_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258

_CHUNK = 1 << 22


class DummyCheckpoint:
    """Uniform weights of variance 1 / fan-in (norms: ones in effect, biases: zeros): activations keep their size.

    A weight depends on the seed, its tensor's name and its index alone: the same on every device and in every dtype.
    """

    def __init__(self, name: str, config: ModelConfig, seed: int) -> None:
        import torch

        from research_engine.models.decoder import Decoder

        self.location = name
        self._seed = seed
        self._norm = 1.0 - config.norm_offset
        blank = Decoder(config, dtype=torch.float32, device="meta")
        names = blank.names
        self._lookups = [f"{names.prefix}{module}.weight" for module in (names.embedding, names.positions) if module]
        self._transposed = names.transposed
        self._shapes = {name: tuple(view.shape) for name, view in blank.parameters().items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Exactly what the model asks for."""
        return self._shapes

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """One tensor, float32, made on ``device``."""
        import torch

        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else self._norm, device=device)
        width = (3.0 if name in self._lookups else 3.0 / shape[0 if self._transposed else -1]) ** 0.5
        out = torch.empty(shape, device=device)
        flat = out.view(-1)
        for start, uniform in hashed_uniform(flat.numel(), f"{self._seed}:{name}", device):
            flat[start : start + len(uniform)] = uniform * (2 * width) - width
        return out


def hashed_uniform(count: int, name: str, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces of ``count`` numbers in [0, 1), each with its beginning: float32, made of name and index alone."""
    import torch

    key = zlib.crc32(name.encode())
    for start in range(0, count, _CHUNK):
        yield start, _uniform(torch.arange(start, min(start + _CHUNK, count), device=device), key)


def _uniform(index: torch.Tensor, key: int) -> torch.Tensor:
    """Hash int64 indices to float32 in [0, 1): two rounds of a 31-bit multiply and xor-shift, exact on every device."""
    import torch

    mask = (1 << 31) - 1
    x = (index ^ key) & mask
    for multiplier in (0x45D9F3B, 0x2C1B3C6D):
        x = ((x ^ (x >> 16)) * multiplier) & mask
    x = x ^ (x >> 15)
    return (x >> 7).to(torch.float32) * 2.0**-24
