"""What decides a trial of a kernel: the op, its shape, the path, where the work is split, and the dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from experiments.settings import Settings, nearest_first


class KernelSettings(Settings):
    """One kernel on one shape, timed as `research-engine bench kernels` does.

    Args:
        op: out of the ops that `bench kernels` knows: decode, prefill, rms_norm, ...
        sizes: of the shape, by the names of the op's form, such as B, L, Hq, Hkv, D and block of `decode`. Head counts
            and block size have defaults.
        path: a kernel of an op that has several.
        split_size: keys that one work item of attention takes; None lets the kernel choose.
        dtype: of all tensors, the KV cache among them.
        device: auto takes CUDA where there is a GPU and the kernels were built for it.
        repeats: timed runs of a trial, each with caches that hold none of its data.
    """

    op: str
    sizes: Mapping[str, int]
    path: str = "auto"
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
        if self.split_size is not None and self.op not in ("decode", "prefill"):
            raise ValueError(f"split_size: {self.op} has nothing to split; it is for decode and prefill")
        return self

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
            "path": self.path,
            "dtype": self.dtype,
            "split_size": self.split_size,
        }
