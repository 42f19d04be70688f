"""Reads GGUF files (llama.cpp's container): metadata and tensors, bounds checked, under Hugging Face's tensor names.

Layout, little endian: magic, version, tensor count, key count; the keys with typed values; the tensor table (name,
dimensions with the fastest first, type, offset); padding to the alignment; the data.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from research_engine.layers.quantized import QuantizedTensor
from research_engine.loading.dequantize import GGML_TYPES, GgmlType, dequantize
from research_engine.loading.errors import LoadError, damaged
from research_engine.loading.gguf_packed import PACKABLE, quantized_blocks
from research_engine.models.config import ModelConfig
from research_engine.models.families import names_of
from research_engine.models.gguf_config import config_from_gguf

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_PARTS = {  # llama.cpp's names of a layer's modules -> those of the shared definition
    "attn_norm": "attention_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_qkv": "qkv",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_output": "output",
    "post_attention_norm": "attention_out_norm",
    "ffn_norm": "mlp_norm",
    "post_ffw_norm": "mlp_out_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "ffn_gate_inp": "router",
}
_EXPERT_STACKS = {"ffn_gate_exps": "expert_gate", "ffn_up_exps": "expert_up", "ffn_down_exps": "expert_down"}
_ROPE_FACTORS = {
    "rope_freqs.weight": "freqs",
    "rope_factors_short.weight": "short",
    "rope_factors_long.weight": "long",
}


class TensorEntry(NamedTuple):
    """One row of the tensor table; ``start`` counts from the beginning of the file."""

    name: str
    shape: tuple[int, ...]  # torch's order, slowest dimension first
    kind: GgmlType
    start: int
    num_bytes: int


class GgufFile:
    """A parsed and checked GGUF file, its data memory-mapped.

    Attributes:
        metadata: every key's value; arrays as lists.
        tensors: by the file's own names.

    Raises:
        LoadError: not a GGUF file, truncated, corrupt, or a tensor's type is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise LoadError(f"{path}: cannot be read as a GGUF file: {error}") from error
        self._bytes = self._data.data
        self._pos = 0
        if len(self._bytes) < 4 or bytes(self._bytes[:4]) != b"GGUF":
            raise damaged(path, "not a GGUF file, it does not begin with the letters GGUF")
        self._pos = 4
        version = self._scalar("I", "the version")
        if version not in (2, 3):
            raise LoadError(f"{path}: GGUF version {version} is not supported; supported: 2, 3")
        num_tensors, num_keys = self._scalar("Q", "the tensor count"), self._scalar("Q", "the key count")
        self.metadata: dict[str, Any] = {}
        for i in range(num_keys):
            key = self._string(f"the name of metadata key {i}")
            if key in self.metadata:
                raise LoadError(f"{path}: corrupt, metadata key {key!r} appears twice")
            self.metadata[key] = self._value(self._scalar("I", f"the type of {key}"), f"the value of {key}")
        rows = [self._table_row(i) for i in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise LoadError(f"{path}: general.alignment must be a positive integer, got {alignment!r}")
        data_start = -(-self._pos // alignment) * alignment
        self.tensors: dict[str, TensorEntry] = {}
        for row in rows:
            if row.name in self.tensors:
                raise LoadError(f"{path}: corrupt, tensor {row.name!r} appears twice")
            if row.start % alignment:
                raise LoadError(f"{path}: corrupt, tensor {row.name!r} lies at {row.start}, no multiple of {alignment}")
            self.tensors[row.name] = row._replace(start=data_start + row.start)
        self._check_extents()

    def raw(self, entry: TensorEntry) -> np.ndarray:
        """The stored bytes of one tensor: uint8, a view of the file."""
        return self._data[entry.start : entry.start + entry.num_bytes]

    def _check_extents(self) -> None:
        end_before, before = 0, ""
        for entry in sorted(self.tensors.values(), key=lambda entry: entry.start):
            if entry.start + entry.num_bytes > len(self._bytes):
                raise LoadError(
                    f"{self.path}: truncated, tensor {entry.name!r} ends at byte {entry.start + entry.num_bytes} "
                    f"and the file at {len(self._bytes)}"
                )
            if entry.start < end_before:
                raise LoadError(f"{self.path}: corrupt, tensors {before!r} and {entry.name!r} overlap")
            end_before, before = entry.start + entry.num_bytes, entry.name

    def _take(self, size: int, what: str) -> memoryview:
        """The next ``size`` bytes; moves on."""
        if size > len(self._bytes) - self._pos:
            raise LoadError(
                f"{self.path}: truncated or corrupt, {what} needs {size} bytes at {self._pos} and the file "
                f"ends at {len(self._bytes)}"
            )
        taken = self._bytes[self._pos : self._pos + size]
        self._pos += size
        return taken

    def _scalar(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code), what))[0]

    def _string(self, what: str) -> str:
        raw = bytes(self._take(self._scalar("Q", what), what))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise LoadError(f"{self.path}: corrupt, {what} is not UTF-8") from error

    def _value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            kind, count = self._scalar("I", what), self._scalar("Q", what)
            if kind in _SCALARS:
                size = struct.calcsize("<" + _SCALARS[kind])
                return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * size, what)))
            if kind == _STRING:
                return [self._string(what) for _ in range(count)]
            raise LoadError(f"{self.path}: corrupt, {what} is an array of the unknown type {kind}")
        raise LoadError(f"{self.path}: corrupt, {what} has the unknown type {kind}")

    def _table_row(self, index: int) -> TensorEntry:
        """One row, ``start`` still relative to the data."""
        name = self._string(f"the name of tensor {index}")
        what = f"the table row of tensor {name!r}"
        num_dims = self._scalar("I", what)
        if not 1 <= num_dims <= 4:
            raise LoadError(f"{self.path}: corrupt, tensor {name!r} has {num_dims} dimensions")
        shape = tuple(self._scalar("Q", what) for _ in range(num_dims))[::-1]
        number, start = self._scalar("I", what), self._scalar("Q", what)
        kind = GGML_TYPES.get(number)
        if kind is None:
            raise LoadError(
                f"{self.path}: tensor {name!r} has the unsupported type {_type_name(number)}; supported: "
                + ", ".join(sorted(kind.name for kind in GGML_TYPES.values()))
            )
        if 0 in shape or shape[-1] % kind.block_weights:
            raise LoadError(
                f"{self.path}: corrupt, tensor {name!r} of type {kind.name} has the shape {list(shape)}; rows must "
                f"be multiples of {kind.block_weights}"
            )
        return TensorEntry(name, shape, kind, start, prod(shape) // kind.block_weights * kind.block_bytes)


class _Place(NamedTuple):
    """Where a tensor of the model lies in the file, and how it differs from what the model wants."""

    entry: TensorEntry
    expert: int | None  # which matrix of a stack, None for all of the tensor
    heads: int | None  # whose rows llama.cpp permuted
    offset: float  # what llama.cpp added to every element


class GgufCheckpoint:
    """Weights of a GGUF file as the Hugging Face checkpoint had them: row permutation of Q and K undone (``llama``
    alone), stacks of experts taken apart, the 1 that is added to Gemma's norms taken off."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        config = config_of(file)
        self._names, self._kind = names_of(config.architecture), file.metadata["general.architecture"]
        self._norm_offset = config.norm_offset
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if self._kind == "llama" else {}
        self._places: dict[str, _Place] = {}
        for name, entry in file.tensors.items():
            if name not in _ROPE_FACTORS:
                self._places |= self._places_of(name, entry)

    @property
    def location(self) -> str:
        """The file."""
        return str(self._file.path)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor but the rotary factors, which are configuration."""
        return {
            name: place.entry.shape if place.expert is None else place.entry.shape[1:]
            for name, place in self._places.items()
        }

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """One tensor, dequantised to float32."""
        entry, expert, heads, offset = self._places[name]
        raw, shape = self._file.raw(entry), entry.shape
        if expert is not None:
            raw, shape = raw.reshape(shape[0], -1)[expert], shape[1:]
        with np.errstate(
            invalid="ignore", over="ignore"
        ):  # corrupt scales: found by the loader, which names the tensor
            weight = dequantize(raw, entry.kind).reshape(shape)
        if offset:
            weight -= offset
        return (weight if heads is None else _unpermute(weight, heads)).to(device)

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor is a matrix in one of the formats that the kernels take as they are."""
        place = self._places.get(name)
        if place is None or place.entry.kind.name not in PACKABLE:
            return False
        return len(self.shapes()[name]) == 2

    def quantized(self, name: str, device: torch.device) -> QuantizedTensor | None:
        """A matrix as it is stored, None if it is in another format.

        Raises:
            LoadError: its scales are not finite.
        """
        if not self.is_quantized(name):
            return None
        entry, expert, heads, _ = self._places[name]
        raw = self._file.raw(entry)
        if expert is not None:
            raw = raw.reshape(entry.shape[0], -1)[expert]
        matrix = quantized_blocks(raw, entry.kind.name, self.shapes()[name][0])
        if not all(bool(x.isfinite().all()) for x in (matrix.scales, matrix.offsets) if x is not None):
            raise LoadError(f"{self.location}: tensor {name!r} has scales that are not finite: corrupt")
        if heads is not None:
            matrix = matrix.with_rows(_unpermute(torch.arange(matrix.values.shape[0]), heads))
        return matrix.to(device)

    def _places_of(self, name: str, entry: TensorEntry) -> dict[str, _Place]:
        """By the names that the model knows; unknown ones stay as they are, for the loader to refuse."""
        names, whole = self._names, _Place(entry, None, None, 0.0)
        top = {
            "token_embd.weight": f"{names.prefix}{names.embedding}.weight",
            "output_norm.weight": f"{names.prefix}{names.final_norm}.weight",
            "output.weight": f"{names.head}.weight",
        }
        if name in top:
            return {top[name]: whole._replace(offset=self._norm_offset if name == "output_norm.weight" else 0.0)}
        match = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", name)
        if match is None:
            return {name: whole}
        layer, module, kind = int(match[1]), match[2], match[3]
        if module in _EXPERT_STACKS and _EXPERT_STACKS[module] in names.parts and len(entry.shape) == 3:
            return {
                f"{names.part(layer, _EXPERT_STACKS[module], n)}.{kind}": whole._replace(expert=n)
                for n in range(entry.shape[0])
            }
        part = _PARTS.get(module, "")
        if part == "up" and "gate_up" in names.parts:  # Phi-3's holds the gate, too
            part = "gate_up"
        if part not in names.parts:
            return {name: whole}
        offset = self._norm_offset if part.endswith("norm") else 0.0
        place = whole._replace(heads=self._heads.get(module), offset=offset)
        return {f"{names.part(layer, part)}.{kind}": place}


def config_of(file: GgufFile) -> ModelConfig:
    """The configuration that the file's metadata describes.

    Raises:
        ConfigError: a key is missing, or its value is one this project does not implement.
    """
    return config_from_gguf(file.metadata, tied="output.weight" not in file.tensors, rope_factors=_rope_factors(file))


def _rope_factors(file: GgufFile) -> dict[str, tuple[float, ...]]:
    """Divisors of the rotary frequencies that a file of a long-context model carries."""
    return {
        kind: tuple(dequantize(file.raw(entry), entry.kind).tolist())
        for name, kind in _ROPE_FACTORS.items()
        if (entry := file.tensors.get(name)) is not None
    }


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours, so its files hold rows i and i + D/2 of each head side by side: put them back."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType  # for the error message alone

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"number {number}"
