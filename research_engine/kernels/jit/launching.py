"""Compiled kernels on a GPU: loaded by CuPy, launched on torch's current stream with torch's tensors."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from research_engine.kernels.jit.compilation import CompiledKernel

Argument = torch.Tensor | bool | int | float | np.generic


def native_arch(device: torch.device | int | None = None) -> str:
    """The architecture to compile for: a GPU's own, with all its instructions (sm_90a, not sm_90).

    Raises:
        ValueError: there is no GPU to ask.
    """
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU whose architecture could be taken: name one, such as sm_90a")
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class LoadedKernel:
    """A kernel on one GPU, to be launched. It may be captured in a CUDA graph.

    Attributes:
        compiled: what was loaded.
        device: that it was loaded on.
    """

    def __init__(self, compiled: CompiledKernel, device: torch.device | int | str | None = None) -> None:
        """Load it, which must not happen while a graph is captured.

        Raises:
            ImportError: CuPy is not installed.
            ValueError: the device is no GPU, or not of the architecture.
        """
        cupy = _cupy()
        self.device = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(f"device = {self.device}: a compiled kernel runs on CUDA devices alone")
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        native = native_arch(self.device)
        if not _runs_on(compiled.arch, native):
            raise ValueError(f"{compiled.name} was compiled for {compiled.arch}, and {self.device} is {native}")
        self.compiled = compiled
        self._driver = cupy.cuda.driver
        self._stream = cupy.cuda.ExternalStream
        with cupy.cuda.Device(self.device.index):
            module = cupy.cuda.function.Module()
            module.load(compiled.cubin)
            self._function = module.get_function(compiled.symbol)
        self._shared_bytes = 0

    @property
    def handle(self) -> int:
        """The driver's CUfunction, as an address."""
        return int(self._function.ptr)

    def allow_shared_bytes(self, size: int) -> None:
        """Let a launch ask for so much dynamic shared memory; more than 48 KiB have to be allowed.

        Raises:
            ValueError: a thread block of this GPU cannot have so much.
        """
        if size <= self._shared_bytes or size <= 48 * 1024:
            return
        properties: Any = torch.cuda.get_device_properties(self.device)
        most = properties.shared_memory_per_block_optin
        if size > most:
            raise ValueError(f"{self.compiled.name}: {size} bytes of shared memory; {self.device} has {most} a block")
        attribute = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._driver.funcSetAttribute(self.handle, attribute, size)
        self._shared_bytes = size

    def __call__(
        self,
        blocks: int | tuple[int, ...],
        threads: int | tuple[int, ...],
        *arguments: Argument,
        shared_bytes: int = 0,
    ) -> None:
        """Launch on torch's current stream of the device.

        Args:
            blocks: of the grid, in up to three dimensions.
            threads: of a block, likewise.
            arguments: of the kernel, in order: a tensor is its address, an int 32 or 64 bits, as the kernel declares it
                (on a little-endian machine they are the same), a float float32; numpy scalars are what they are.
            shared_bytes: of dynamic shared memory.

        Raises:
            ValueError: a tensor on another device.
            TypeError: an argument of another type.
        """
        self.allow_shared_bytes(shared_bytes)
        values = [pack(argument, self.device) for argument in arguments]
        stream = self._stream(torch.cuda.current_stream(self.device).cuda_stream, self.device.index)
        with torch.cuda.device(self.device):
            self._function(_dimensions(blocks), _dimensions(threads), values, shared_bytes, stream)


def load(compiled: CompiledKernel, device: torch.device | int | str | None = None) -> LoadedKernel:
    """`LoadedKernel(compiled, device)`; the current device when None."""
    return LoadedKernel(compiled, device)


def pack(argument: Argument, device: torch.device) -> np.generic:
    """An argument as a number of the size that the kernel reads. Raises as `LoadedKernel.__call__`."""
    if isinstance(argument, torch.Tensor):
        if argument.device != device:
            raise ValueError(f"a tensor on {argument.device} for a kernel on {device}")
        return np.uint64(argument.data_ptr())
    if isinstance(argument, np.generic):
        return argument
    if isinstance(argument, bool):
        return np.bool_(argument)
    if isinstance(argument, int):
        return np.int64(argument)
    if isinstance(argument, float):
        return np.float32(argument)
    raise TypeError(f"an argument of type {type(argument).__name__}; a kernel takes tensors, numbers and numpy scalars")


def _dimensions(given: int | tuple[int, ...]) -> tuple[int, ...]:
    return given if isinstance(given, tuple) else (given,)


def _runs_on(arch: str, native: str) -> bool:
    """Plain code of a lower minor version runs too; `a` and `f` code only where it was made for."""
    if arch == native:
        return True
    plain, own = arch.removeprefix("sm_"), native.removeprefix("sm_").rstrip("af")
    return plain.isdigit() and plain[:-1] == own[:-1] and int(plain) <= int(own)


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ImportError(
            f"CuPy, which loads kernels compiled at run time, cannot be imported ({error}): pip install "
            "'research_engine[cuda13]' (or [cuda12])"
        ) from error
