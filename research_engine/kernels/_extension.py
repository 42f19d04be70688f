"""The compiled extension, or a stand-in that says how to build it, and what every op needs to call it."""

from __future__ import annotations

import importlib
from typing import Any

import torch  # before the extension: both then share the OpenMP runtime that torch brings

HOW_TO_BUILD = (
    "run `pip install -e .` in the repository (needs a C++17 compiler; with nvcc on PATH the CUDA ops are built too)"
)


class _Missing:
    """Stands in for the extension, so that the oracle and `research-engine doctor` work without it."""

    built_with_cuda = False

    def __init__(self, reason: ImportError) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise ImportError(
            f"research_engine._C, the compiled kernels, cannot be imported ({self._reason}): {HOW_TO_BUILD}"
        )


_C: Any
try:
    _C = importlib.import_module("research_engine._C")
except ImportError as error:
    _C = _Missing(error)

_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling


def traced(tensor: torch.Tensor) -> bool:
    """Whether a call has to go through torch's dispatcher: torch.compile, fake or meta tensors, subclasses, modes.

    An ordinary call skips it, which saves some 10 us.
    """
    return _is_compiling() or type(tensor) not in _PLAIN_TYPES or _num_dispatch_modes() > 0 or tensor.is_meta


def stream_of(tensor: torch.Tensor) -> int:
    """The cudaStream_t that torch currently uses on the tensor's device, as an address; 0 for a CPU tensor."""
    if tensor.is_cpu:
        return 0
    if not _C.built_with_cuda:
        raise RuntimeError(
            f"a tensor is on {tensor.device}, but this build has no CUDA ops, since nvcc was not found when it was "
            "built: put nvcc on PATH or set CUDA_HOME, then run `pip install -e .` again; `research-engine doctor` "
            "shows what was built"
        )
    return torch._C._cuda_getCurrentRawStream(tensor.get_device())


def check_scale_values(key_scale: torch.Tensor | None, value_scale: torch.Tensor | None) -> None:
    """Scales of a quantised cache are positive and finite; waits for the device. Raises ValueError."""
    for name, scales in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scales is not None:
            _C.check_scales(name, host(scales))


def host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, for checks of its values; waits for the device."""
    return tensor if tensor.is_cpu else tensor.cpu()
