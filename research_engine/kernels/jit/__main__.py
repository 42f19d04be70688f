"""`python -m research_engine.kernels.jit`: compiles a kernel of a file, or a variant, and prints what it takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import tyro

from research_engine.kernels.jit import compile, compile_variant, native_arch, parse_path
from research_engine.kernels.jit.variants import is_variant, parse_settings


def main(
    what: Annotated[str, tyro.conf.Positional],
    kernel: str | None = None,
    arch: str | None = None,
    define: tuple[str, ...] = (),
    dtype: str = "bfloat16",
    head_size: int = 128,
    group_size: int = 4,
) -> int:
    """Compile a kernel and print its registers, spills and size; no GPU is needed.

    Args:
        what: a CUDA C++ file, or a variant like decode[stages=3,warps=8].
        kernel: of the file, as its source would write it: scale_rows<float>.
        arch: to compile for; without, that of the GPU here.
        define: macros of the file, NAME=VALUE.
        dtype: of a variant's KV cache.
        head_size: a variant's.
        group_size: query heads of a KV head, a variant's.
    """
    try:
        arch = arch or native_arch()
        if is_variant(what):
            cache = getattr(torch, dtype, None)
            if not isinstance(cache, torch.dtype):
                raise ValueError(f"dtype = {dtype!r}: no dtype of torch")
            made = compile_variant(
                parse_path(what), cache_dtype=cache, head_size=head_size, group_size=group_size, arch=arch
            )
        elif kernel is None:
            raise ValueError("kernel: a file needs the name of its kernel, such as --kernel 'scale_rows<float>'")
        else:
            made = compile(Path(what), kernel, arch=arch, defines=parse_settings(",".join(define)))
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if made.log:
        print(made.log)
    print(f"{made.name} for {made.arch}")
    print(f"  {made.registers} registers, {made.spilled} bytes spilled, {len(made.cubin)} bytes of code")
    for name, value in made.constants.items():
        print(f"  {name} = {value}")
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="python -m research_engine.kernels.jit"))
