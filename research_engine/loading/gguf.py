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

from research_engine.loading.dequantize import GGML_TYPES, GgmlType, dequantize
from research_engine.loading.errors import LoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"


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
            raise LoadError(f"{path}: not a GGUF file, it does not begin with the letters GGUF")
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


class GgufCheckpoint:
    """Weights of a ``llama`` GGUF file as the Hugging Face checkpoint had them, row permutation of Q and K undone."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        metadata = file.metadata
        self._heads = {"attn_q": metadata.get("llama.attention.head_count")}
        self._heads["attn_k"] = metadata.get("llama.attention.head_count_kv", self._heads["attn_q"])
        self._entries = {_hugging_face_name(name): e for name, e in file.tensors.items() if name != ROPE_FACTORS}

    @property
    def location(self) -> str:
        """The file."""
        return str(self._file.path)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor but the rotary factors, which are configuration."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """One tensor, dequantised to float32."""
        entry = self._entries[name]
        with np.errstate(
            invalid="ignore", over="ignore"
        ):  # corrupt scales: found by the loader, which names the tensor
            weight = dequantize(self._file.raw(entry), entry.kind).reshape(entry.shape)
        heads = self._heads.get(entry.name.split(".")[2] if entry.name.startswith("blk.") else "")
        return (weight if heads is None else _unpermute(weight, heads)).to(device)


def rope_factors(file: GgufFile) -> tuple[float, ...]:
    """Divisors of the rotary frequencies that a file of a long-context model carries; empty without."""
    entry = file.tensors.get(ROPE_FACTORS)
    return () if entry is None else tuple(dequantize(file.raw(entry), entry.kind).tolist())


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours, so its files hold rows i and i + D/2 of each head side by side: put them back."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _hugging_face_name(name: str) -> str:
    """The name under which the model knows a tensor; unknown ones stay as they are, for the loader to refuse."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _MODULES:
        return f"model.layers.{match[1]}.{_MODULES[match[2]]}.{match[3]}"
    return name


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType  # for the error message alone

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"number {number}"
