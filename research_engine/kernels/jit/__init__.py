"""Kernels compiled at run time: your own from a string or a file, or a variant of the project's with other tiles.

NVRTC compiles (no GPU needed), for the very architecture (`sm_90a`), and the code is kept on disk. CuPy loads your
own; a launch takes torch's tensors and stream.
"""

from __future__ import annotations

from research_engine.kernels.jit.compilation import CompiledKernel, compile
from research_engine.kernels.jit.launching import LoadedKernel, load, native_arch
from research_engine.kernels.jit.nvrtc import CompilationError
from research_engine.kernels.jit.variants import FAMILIES, Variant, compile_variant, parse_path, variant_of

__all__ = [
    "compile",
    "CompiledKernel",
    "CompilationError",
    "load",
    "LoadedKernel",
    "native_arch",
    "FAMILIES",
    "Variant",
    "variant_of",
    "parse_path",
    "compile_variant",
]
