"""Quantised matrices of a Hugging Face checkpoint: which tensors make one, checked up front, and what they mean.

A module of AWQ has `qweight`, `qzeros` and `scales`, one of GPTQ `g_idx` besides, one of compressed-tensors
`weight_packed`, `weight_scale` and `weight_shape`, one of fp8 a `weight` of float8_e4m3fn and its scale. To the loader
each is one tensor, the module's `weight` of shape [N, K], as if it had been stored in floats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import torch

from research_engine.layers.quantized import QuantizedTensor
from research_engine.loading.errors import LoadError
from research_engine.loading.packing import unpack, unpack_awq
from research_engine.models.quantization import Quantization

_FP8_SCALES = ("weight_scale", "weight_scale_inv")  # DeepSeek's is called the inverse and is a factor, too
_IGNORED = ("input_scale", "activation_scale", "weight_shape")  # activations stay as they are
_TENSORS = {
    "awq": (("qweight", "qzeros", "scales"), ()),
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "pack-quantized": (("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx")),
}
_KV_SCALE = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?([kv])_scale")


class RawCheckpoint(Protocol):
    """A checkpoint whose tensors can be read in any dtype."""

    @property
    def location(self) -> str: ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, device: torch.device) -> torch.Tensor: ...

    def read_raw(self, name: str, device: torch.device) -> torch.Tensor: ...


class QuantizedCheckpoint:
    """A checkpoint with quantised matrices, each under the name `MODULE.weight`.

    Attributes:
        kv_scales: (layer, "k" or "v") -> name of the scale of its cache that the checkpoint brings.

    Raises:
        LoadError: tensors of a matrix are missing, or their shapes do not fit each other or the configuration.
    """

    def __init__(self, checkpoint: RawCheckpoint, quantization: Quantization) -> None:
        self._checkpoint, self._quantization = checkpoint, quantization
        shapes = dict(checkpoint.shapes())
        self.kv_scales = {
            (int(match[1]), match[2]): name for name in shapes if (match := _KV_SCALE.fullmatch(name)) is not None
        }
        marker = {"fp8": _FP8_SCALES, "pack-quantized": ("weight_packed",)}.get(quantization.method, ("qweight",))
        self._modules: dict[str, tuple[int, int]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        own: set[str] = set(self.kv_scales.values())
        for name in shapes:
            module, _, kind = name.rpartition(".")
            if kind in marker:
                self._modules[module] = self._check(module, shapes)
            if kind in _IGNORED:
                own.add(name)
        required, optional = _TENSORS.get(quantization.method, (("weight",), _FP8_SCALES))
        own |= {f"{module}.{kind}" for module in self._modules for kind in (*required, *optional)}
        for name, shape in shapes.items():
            module, _, kind = name.rpartition(".")
            if module in self._modules and f"{module}.weight" not in self._shapes:
                self._shapes[f"{module}.weight"] = self._modules[module]
            if name not in own:
                self._shapes[name] = shape

    @property
    def location(self) -> str:
        """Where the weights lie, for error messages."""
        return self._checkpoint.location

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor, a quantised matrix as one of ``[N, K]``."""
        return self._shapes

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """One tensor; a quantised matrix in float32."""
        matrix = self.quantized(name, device)
        return self._checkpoint.read(name, device) if matrix is None else matrix.dequantize()

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor is a quantised matrix."""
        return name.endswith(".weight") and name.removesuffix(".weight") in self._modules

    def quantized(self, name: str, device: torch.device) -> QuantizedTensor | None:
        """A quantised matrix as the checkpoint means it; None for a tensor of floats.

        Raises:
            LoadError: a dtype or a value that makes no sense; names the tensor.
        """
        if not self.is_quantized(name):
            return None
        module = name.removesuffix(".weight")
        read = {"awq": self._awq, "gptq": self._gptq, "fp8": self._fp8, "pack-quantized": self._pack_quantized}
        matrix = read[self._quantization.method](module, device)
        if not bool(matrix.scales.isfinite().all()):
            raise LoadError(f"{self.location}: the scales of {module!r} hold values that are not finite: corrupt")
        return matrix

    def kv_scale(self, layer: int, which: str) -> float | None:
        """The scale of a layer's key ("k") or value ("v") cache that the checkpoint brings, None without.

        Raises:
            LoadError: it is no positive number.
        """
        name = self.kv_scales.get((layer, which))
        if name is None:
            return None
        values = self._checkpoint.read_raw(name, torch.device("cpu")).float().flatten()
        if values.numel() != 1 or not 0 < float(values[0]) < float("inf"):
            raise LoadError(f"{self.location}: tensor {name!r} must be one positive number, got {values.tolist()[:4]}")
        return float(values[0])

    # -- shapes, before anything is read

    def _check(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """``(N, K)`` of a matrix."""
        method, bits = self._quantization.method, self._quantization.bits
        if method == "fp8":
            return self._check_fp8(module, shapes)
        required, _ = _TENSORS[method]
        for kind in required:
            if f"{module}.{kind}" not in shapes:
                raise LoadError(f"{self.location}: missing tensor {module}.{kind}, which {method} needs")
        per_word = 32 // bits
        first = required[0]
        words = self._two(f"{module}.{first}", shapes)
        if method == "awq":
            k, n = words[0], words[1] * per_word
        elif method == "gptq":
            k, n = words[0] * per_word, words[1]
        else:
            n, k = words[0], words[1] * per_word
        group_size = k if self._quantization.group_size == -1 else self._quantization.group_size
        if k % group_size:
            raise LoadError(
                f"{self.location}: tensor {module}.{first} has the shape {list(words)}, so K = {k}, which is no "
                f"multiple of group_size = {group_size}"
            )
        groups = k // group_size
        if method == "pack-quantized":
            self._expect(f"{module}.weight_scale", shapes, (n, groups))
            self._expect(f"{module}.weight_zero_point", shapes, (n // per_word, groups))
            self._expect(f"{module}.weight_g_idx", shapes, (k,))
        else:
            if n % per_word:
                raise LoadError(f"{self.location}: {module!r} has N = {n} columns, no multiple of {per_word}")
            self._expect(f"{module}.scales", shapes, (groups, n))
            self._expect(f"{module}.qzeros", shapes, (groups, n // per_word))
            self._expect(f"{module}.g_idx", shapes, (k,))
        return n, k

    def _check_fp8(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        if f"{module}.weight" not in shapes:
            raise LoadError(f"{self.location}: missing tensor {module}.weight, of which there is a scale")
        n, k = self._two(f"{module}.weight", shapes)
        name = next(f"{module}.{kind}" for kind in _FP8_SCALES if f"{module}.{kind}" in shapes)
        if shapes[name] not in ((), (1,), (1, 1), (n,), (n, 1)):
            self._block(name, n, k, shapes)
        return n, k

    def _block(self, name: str, n: int, k: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """Size of the blocks that share a scale, by the shape of the scales."""
        shape = shapes[name]
        if len(shape) == 2:
            for size in (128, 64, 256, 32):
                if shape == (-(-n // size), -(-k // size)) and k % size == 0:
                    return size, size
        raise LoadError(
            f"{self.location}: tensor {name!r} has the shape {list(shape)}; for a weight of [{n}, {k}] it has to be "
            f"[1] or [{n}, 1], or one scale for each block of 128 x 128"
        )

    def _two(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        shape = shapes[name]
        if len(shape) != 2 or 0 in shape:
            raise LoadError(f"{self.location}: tensor {name!r} has the shape {list(shape)}; a matrix is needed")
        return shape[0], shape[1]

    def _expect(self, name: str, shapes: Mapping[str, tuple[int, ...]], asked: tuple[int, ...]) -> None:
        """The shape of a tensor, where it is there."""
        if name in shapes and tuple(shapes[name]) != asked:
            raise LoadError(
                f"{self.location}: tensor {name!r} has the shape {list(shapes[name])}, the packed weight and "
                f"quantization_config ask for {list(asked)}"
            )

    # -- the formats

    def _tensor(self, module: str, kind: str, device: torch.device, *dtypes: torch.dtype) -> torch.Tensor:
        tensor = self._checkpoint.read_raw(f"{module}.{kind}", device)
        if tensor.dtype not in dtypes:
            raise LoadError(
                f"{self.location}: tensor '{module}.{kind}' has the dtype {tensor.dtype}; "
                f"{' or '.join(map(str, dtypes))} is needed"
            )
        return tensor

    def _floats(self, module: str, kind: str, device: torch.device) -> torch.Tensor:
        return self._tensor(module, kind, device, torch.float16, torch.bfloat16, torch.float32)

    def _awq(self, module: str, device: torch.device) -> QuantizedTensor:
        codes = unpack_awq(self._tensor(module, "qweight", device, torch.int32)).T.contiguous()
        zeros = unpack_awq(self._tensor(module, "qzeros", device, torch.int32))
        return QuantizedTensor("int4", codes, self._floats(module, "scales", device), _or_none(zeros, 8))

    def _gptq(self, module: str, device: torch.device) -> QuantizedTensor:
        bits, k = self._quantization.bits, self._modules[module][1]
        codes = unpack(self._tensor(module, "qweight", device, torch.int32), bits, 0).T.contiguous()
        stored = unpack(self._tensor(module, "qzeros", device, torch.int32), bits, 1)
        zeros = (stored + self._quantization.zero_offset) & ((1 << bits) - 1)  # 15 + 1 is 0 in 4 bits, as it was made
        scales = self._floats(module, "scales", device)
        order = None
        if f"{module}.g_idx" in self._checkpoint.shapes():
            order = self._order(f"{module}.g_idx", k, scales.shape[0], device)
        codes = codes if order is None else codes[:, order]
        return QuantizedTensor(f"int{bits}", codes, scales, _or_none(zeros, 1 << (bits - 1)), order=order)

    def _pack_quantized(self, module: str, device: torch.device) -> QuantizedTensor:
        bits, (n, k) = self._quantization.bits, self._modules[module]
        shape = self._checkpoint.read_raw(f"{module}.weight_shape", torch.device("cpu")).tolist()
        if shape != [n, k]:
            raise LoadError(f"{self.location}: tensor '{module}.weight_shape' says {shape}, the packed weight {[n, k]}")
        codes = unpack(self._tensor(module, "weight_packed", device, torch.int32), bits, 1)
        scales = self._floats(module, "weight_scale", device).T.contiguous()
        zeros = order = None
        if f"{module}.weight_zero_point" in self._checkpoint.shapes():
            words = self._tensor(module, "weight_zero_point", device, torch.int32)
            zeros = _or_none(unpack(words, bits, 0).T.contiguous(), 1 << (bits - 1))
        if f"{module}.weight_g_idx" in self._checkpoint.shapes():
            order = self._order(f"{module}.weight_g_idx", k, scales.shape[0], device)
        codes = codes if order is None else codes[:, order]
        return QuantizedTensor(f"int{bits}", codes, scales, zeros, order=order)

    def _order(self, name: str, k: int, groups: int, device: torch.device) -> torch.Tensor | None:
        """Inputs sorted by group, None where they already lie so."""
        g_idx = self._checkpoint.read_raw(name, device)
        if g_idx.is_floating_point():
            raise LoadError(f"{self.location}: tensor {name!r} has the dtype {g_idx.dtype}; integers are needed")
        g_idx = g_idx.long()
        wrong = ((g_idx < 0) | (g_idx >= groups)).nonzero().flatten()
        if wrong.numel():
            at = int(wrong[0])
            raise LoadError(
                f"{self.location}: {name}[{at}] is {int(g_idx[at])}, expected 0 to {groups - 1} (of {groups} groups)"
            )
        counts = torch.bincount(g_idx, minlength=groups)
        if bool((counts != k // groups).any()):
            at = int((counts != k // groups).nonzero()[0])
            raise LoadError(
                f"{self.location}: tensor {name!r} puts {int(counts[at])} inputs into group {at}; each has to have "
                f"{k // groups}"
            )
        order = torch.argsort(g_idx, stable=True)
        return None if bool((g_idx[1:] >= g_idx[:-1]).all()) else order

    def _fp8(self, module: str, device: torch.device) -> QuantizedTensor:
        n, k = self._modules[module]
        weight = self._tensor(module, "weight", device, torch.float8_e4m3fn)
        if bool((weight.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise LoadError(f"{self.location}: tensor '{module}.weight' holds NaN: corrupt")
        kind = next(kind for kind in _FP8_SCALES if f"{module}.{kind}" in self._checkpoint.shapes())
        scales = self._floats(module, kind, device).float()
        if scales.numel() == 1:
            return QuantizedTensor("float8", weight, scales.view(1, 1).expand(1, n).contiguous())
        if scales.numel() == n and scales.shape[0] == n:
            return QuantizedTensor("float8", weight, scales.view(1, n))
        rows, _ = self._block(f"{module}.{kind}", n, k, self._checkpoint.shapes())
        return QuantizedTensor("float8", weight, scales.T.repeat_interleave(rows, dim=1)[:, :n].contiguous())


def _or_none(zeros: torch.Tensor, default: int) -> torch.Tensor | None:
    """The zero points; None where all are the one that needs no memory."""
    return None if bool((zeros == default).all()) else zeros.contiguous()
