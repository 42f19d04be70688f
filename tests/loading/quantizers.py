"""Makes quantised checkpoints out of tiny models, in the form in which tools write them; and the dequantised models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 ``[R, C]`` -> int32 ``[R, C * bits / 32]``, elements of a row in order, the first in the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros(codes.shape[0], codes.shape[1] // per_word, dtype=torch.int64)
    for i in range(per_word):
        words |= codes[:, i::per_word] << (bits * i)
    return words.to(torch.uint32).view(torch.int32)


def _grid(weight: torch.Tensor, groups: int, bits: int, sym: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nearest codes int64 ``[N, K]``, float16 scales and int64 zeros ``[G, N]``; columns in group order."""
    n, k = weight.shape
    blocks = weight.view(n, groups, k // groups)
    top = (1 << bits) - 1
    if sym:
        scales = (blocks.abs().amax(-1) * 2 / top).clamp_min(1e-6).half()
        zeros = torch.full((n, groups), (top + 1) // 2)
    else:
        low, high = blocks.amin(-1).clamp_max(0), blocks.amax(-1).clamp_min(0)
        scales = ((high - low) / top).clamp_min(1e-6).half()
        zeros = (-low / scales.float()).round().long().clamp(0, top)
    codes = ((blocks / scales.float()[:, :, None]).round().long() + zeros[:, :, None]).clamp(0, top)
    return codes.view(n, k), scales.T.contiguous(), zeros.T.contiguous()


def _values(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The formula, in float64."""
    size = codes.shape[1] // scales.shape[0]
    return ((codes - zeros.T.repeat_interleave(size, 1)) * scales.double().T.repeat_interleave(size, 1)).float()


def quantize(
    method: str, weight: torch.Tensor, group_size: int, *, bits: int = 4, sym: bool = False, desc_act: bool = False,
    v2: bool = False, seed: int = 0,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:  # fmt: skip
    """Tensors of one module by the ends of their names, and the matrix that they stand for."""
    n, k = weight.shape
    if method.startswith("fp8"):
        return _fp8(method, weight)
    groups = 1 if group_size == -1 else k // group_size
    g_idx = torch.arange(k) // (k // groups)
    order = torch.arange(k)
    if desc_act:
        order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
        g_idx = g_idx[order.argsort()]
    codes, scales, zeros = _grid(weight[:, order], groups, bits, sym)
    values = torch.empty_like(weight)
    values[:, order] = _values(codes, scales, zeros)
    stored = torch.empty_like(codes)
    stored[:, order] = codes
    if method == "awq":
        shuffle = [8 * block + column for block in range(n // 8) for column in AWQ_COLUMNS]
        return {
            "qweight": _pack(stored.T[:, shuffle], 4),
            "qzeros": _pack(zeros[:, shuffle], 4),
            "scales": scales,
        }, values
    if method == "gptq":
        return {
            "qweight": _pack(stored, bits).T.contiguous(),
            "qzeros": _pack((zeros - (0 if v2 else 1)) % (1 << bits), bits),
            "scales": scales,
            "g_idx": g_idx.int(),
        }, values
    assert method == "pack-quantized"
    tensors = {"weight_packed": _pack(stored, bits), "weight_scale": scales.T, "weight_shape": torch.tensor([n, k])}
    if not sym:
        tensors["weight_zero_point"] = _pack(zeros, bits).T.contiguous()
    if desc_act:
        tensors["weight_g_idx"] = g_idx.int()
    return tensors, values


def _fp8(method: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    n, k = weight.shape
    if method == "fp8-block":
        scales = (
            torch.stack([torch.stack([t.abs().amax() for t in rows.split(32, 1)]) for rows in weight.split(32)]) / 448
        )
        whole = scales.repeat_interleave(32, 0)[:n].repeat_interleave(32, 1)[:, :k]
        stored = (weight / whole).to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale_inv": scales}, stored.float() * whole
    scales = weight.abs().amax(1, keepdim=True) / 448 if method == "fp8-channel" else weight.abs().amax().view(1) / 448
    stored = (weight / scales).to(torch.float8_e4m3fn)
    tensors = {"weight": stored, "weight_scale": scales, "input_scale": torch.tensor([0.5])}
    return tensors, stored.float() * scales


def _matrices(name: str, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Those of a parameter that are quantised, by their names in a checkpoint: views. None: it stays as it is.

    transformers stacks Mixtral's experts, ``[E, 2I, H]`` and ``[E, H, I]``; checkpoints have each matrix apart.
    """
    if ".experts." in name:
        module = name.partition(".mlp.")[0] + ".block_sparse_moe.experts"
        kinds = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
        return [
            (f"{module}.{number}.{kind}", matrix)
            for number, expert in enumerate(parameter.detach())
            for kind, matrix in zip(kinds, expert.chunk(len(kinds)), strict=True)
        ]
    if ".layers." not in name or parameter.dim() != 2 or name.endswith(".mlp.gate.weight"):
        return []
    return [(name.removesuffix(".weight"), parameter.detach())]


def quantize_model(
    model: Any, directory: Path, method: str, quantization_config: dict[str, Any], group_size: int = 32, **options: Any
) -> Any:
    """Writes the model's checkpoint, its layers' matrices quantised, to a directory. Mutates: the model gets the
    dequantised weights.

    Returns:
        The model.
    """
    tensors = {}
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            matrices = _matrices(name, parameter)
            for module, matrix in matrices:
                made, values = quantize(method, matrix, group_size, seed=number // 100, **options)
                tensors |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in made.items()}
                matrix.copy_(values)
            if not matrices:
                tensors[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = parameter.detach().clone()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {**json.loads(model.config.to_json_string(use_diff=False)), "quantization_config": quantization_config}
    config["architectures"] = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps(config))
    return model
