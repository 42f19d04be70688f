"""Reads BGE-M3's heads, sparse_linear.pt and colbert_linear.pt, where a model brings them."""

from __future__ import annotations

import torch

from research_engine.layers.token_heads import TokenHeads
from research_engine.loading.errors import LoadError
from research_engine.loading.source import ModelSource
from research_engine.loading.torch_bin import open_pickle

FILES = ("sparse_linear.pt", "colbert_linear.pt")


def load_token_heads(
    source: ModelSource, hidden_size: int, *, dtype: torch.dtype, device: torch.device
) -> TokenHeads | None:
    """Both heads, or None of a model without.

    Raises:
        LoadError: one of the two is missing, cannot be read, or has another shape than the model asks for.
    """
    if source.directory is None or not any(source.file(name).exists() for name in FILES):
        return None
    parts = []
    for name in FILES:
        path = source.file(name)
        if not path.exists():
            raise LoadError(f"{path}: missing, although {' or '.join(FILES)} is there; fetch the model again")
        state = open_pickle(path)
        if set(state) != {"weight", "bias"}:
            raise LoadError(f"{path}: holds the tensors {sorted(state)}; it must hold weight and bias")
        shapes = tuple(state["weight"].shape), tuple(state["bias"].shape)
        rows = 1 if name == FILES[0] else max(1, state["bias"].numel())
        if shapes != ((rows, hidden_size), (rows,)):
            raise LoadError(
                f"{path}: weight and bias have the shapes {list(shapes[0])} and {list(shapes[1])}; they must be "
                f"[{rows}, {hidden_size}] and [{rows}]"
            )
        for kind, tensor in state.items():
            if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                raise LoadError(f"{path}: {kind} holds values that are no finite numbers")
        parts += [state[kind].to(device, dtype, copy=True) for kind in ("weight", "bias")]
    return TokenHeads(*parts)
