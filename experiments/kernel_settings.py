"""What decides a trial of a kernel: the op, its shape, the path or a variant, where the work is split, the dtype."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from experiments.settings import Settings, nearest_first

FOLDER = Path(__file__).resolve().parent


class KernelSettings(Settings):
    """One kernel on one shape, timed as `research-engine bench kernels` does.

    Args:
        op: out of the ops that `bench kernels` knows: decode, prefill, rms_norm, ...
        sizes: of the shape, by the names of the op's form, such as B, L, Hq, Hkv, D and block of `decode`. Head counts
            and block size have defaults.
        path: a kernel of an op that has several.
        variant: of the attention kernel on tensor cores, numbers by name (`stages`, `warps`, ...) and perhaps
            `source`, a changed copy of its file (of a relative name also in this folder): compiled at first use, GPU
            alone. Empty: the built kernel.
        split_size: keys that one work item of attention takes; None lets the kernel choose.
        dtype: of all tensors, the KV cache among them.
        device: auto takes CUDA where there is a GPU and the kernels were built for it.
        repeats: timed runs of a trial, each with caches that hold none of its data.
    """

    op: str
    sizes: Mapping[str, int]
    path: str = "auto"
    variant: Mapping[str, int | str] = Field(default_factory=dict)
    split_size: int | None = Field(default=None, ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    repeats: int = Field(default=20, ge=1)

    @field_validator("op")
    @classmethod
    def _known_op(cls, op: str) -> str:
        from research_engine.bench.kernel_ops import OPS

        if op not in OPS:
            raise ValueError(f"no op {op!r}; {nearest_first(op, OPS)}")
        return op

    @model_validator(mode="after")
    def _possible(self) -> KernelSettings:
        from research_engine.bench.kernel_ops import DEFAULT_SIZES, OPS

        op = OPS[self.op]
        names = op.names
        for name in self.sizes:
            if name not in names:
                raise ValueError(f"sizes: {self.op} has no size {name!r}; {nearest_first(name, names)}")
        if missing := [name for name in names if name not in self.sizes and name not in DEFAULT_SIZES]:
            raise ValueError(f"sizes: {self.op} needs {', '.join(missing)} (its form is {op.form})")
        op.parse(self.shape)
        paths = {*op.cpu_paths, *op.cuda_paths}
        if self.path not in paths:
            raise ValueError(f"path {self.path!r}; {nearest_first(self.path, paths)}")
        if self.variant:
            if op.variant_path is None:
                having = ", ".join(name for name, other in OPS.items() if other.variant_path)
                raise ValueError(f"variant: {self.op} has none; {having} have")
            if self.path not in ("auto", op.variant_path):
                raise ValueError(f"variant: path {self.path!r} has none; leave path out, or {op.variant_path!r}")
            _ = self.kernel_path
        if self.split_size is not None and self.op not in ("decode", "prefill"):
            raise ValueError(f"split_size: {self.op} has nothing to split; it is for decode and prefill")
        return self

    @property
    def kernel_path(self) -> str:
        """As `bench kernels --path` takes it, variant included."""
        if not self.variant:
            return self.path
        from research_engine.bench.kernel_ops import OPS
        from research_engine.kernels.jit.variants import variant_of

        source = {} if self.source is None else {"source": str(self.source)}
        return variant_of(OPS[self.op].variant_path or "", {**self.variant, **source}).path

    @property
    def source(self) -> Path | None:
        """The variant's own file: where its name leads from the working directory, or else one of this folder."""
        given = self.variant.get("source")
        if given is None or Path(str(given)).is_file() or not (FOLDER / str(given)).is_file():
            return None if given is None else Path(str(given))
        return FOLDER / str(given)

    @property
    def shape(self) -> str:
        """As `bench kernels --shape` takes it."""
        from research_engine.bench.kernel_ops import DEFAULT_SIZES, OPS

        return OPS[self.op].shape({**DEFAULT_SIZES, **self.sizes})

    def describe(self) -> dict[str, Any]:
        """For the summary."""
        return {
            "op": self.op,
            "shape": self.shape,
            "path": self.kernel_path,
            "dtype": self.dtype,
            "split_size": self.split_size,
        }


def source_digest(file: Path) -> str:
    """SHA-256 of a kernel's source and all that it includes of its folder and of the project."""
    from research_engine.kernels.jit.compilation import CSRC, included_files

    text = file.read_text(encoding="utf-8")
    included = included_files(text, file, [CSRC, CSRC / "cuda"])
    return hashlib.sha256("\0".join([text, *sorted(included.values())]).encode()).hexdigest()
