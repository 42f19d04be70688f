"""The ops that `research-engine bench kernels` times: how shapes are written, which are timed, the work they imply.

An op is an entry of `OPS`; to add one, write its form (the names of a shape's numbers, as in the shapes themselves), a
function that counts its work, and one that makes a problem of it (`kernel_problems.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from research_engine.bench import kernel_problems as problems
from research_engine.bench.kernel_problems import Problem, Setting, Sizes
from research_engine.bench.quantized_problems import make_quantized_matmul
from research_engine.kernels.attention import CPU_PATHS, PATHS

DEFAULT_SIZES = {"Hq": 32, "Hkv": 8, "D": 128, "block": 16, "group": 128}


@dataclass(frozen=True)
class Work:
    """What a problem needs at least: bytes to or from memory, arithmetic operations, and the roof that limits bytes.

    Attributes:
        bytes: each input that is needed read once, each output written once.
        operations: multiplications and additions, counted apart; 0 for a copy.
        bandwidth: name of the ceiling: "read", "copy", "to host" or "to device".
    """

    bytes: int
    operations: int
    bandwidth: str


@dataclass(frozen=True)
class Op:
    """An entry of `OPS`.

    Attributes:
        form: names of a shape's numbers: `:` between groups, of which later ones may be left out (`DEFAULT_SIZES`).
        cuda_shapes: timed by default on a GPU.
        cpu_shapes: timed by default on a CPU.
        work: counts a case's work: sizes, bytes an element, path.
        build: makes a case.
        cuda_paths: that can be forced on a GPU.
        cpu_paths: that can be forced on a CPU.
        all_paths: whether all paths are timed by default on a GPU; else the first.
        has_product: whether a matrix product's rate limits it, too.
        variant_path: the path whose kernel has variants that are compiled at run time, if there is one.
    """

    form: str
    cuda_shapes: tuple[str, ...]
    cpu_shapes: tuple[str, ...]
    work: Callable[[Sizes, int, str], Work]
    build: Callable[[Sizes, Setting], Problem]
    cuda_paths: tuple[str, ...] = ("auto",)
    cpu_paths: tuple[str, ...] = ("auto",)
    all_paths: bool = False
    has_product: bool = False
    variant_path: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of a shape's numbers, in their order."""
        return tuple(re.split("[x/:]", self.form))

    def parse(self, text: str) -> dict[str, int]:
        """The sizes of a shape, `128x4096:32/8/128:16` for the form `BxL:Hq/Hkv/D:block`.

        Raises:
            ValueError: the shape does not fit the form, or its numbers do not fit each other.
        """
        example = f"has to be {self.form}, like {self.cuda_shapes[0]}"
        form_groups, groups = self.form.split(":"), text.split(":")
        if len(groups) > len(form_groups):
            raise ValueError(f"shape {text!r}: {example}")
        sizes = {}
        for position, form_group in enumerate(form_groups):
            names = re.split("[x/]", form_group)
            if position >= len(groups):
                sizes.update({name: DEFAULT_SIZES[name] for name in names})
                continue
            pattern = re.sub("[^x/]+", "([0-9]+)", form_group)
            match = re.fullmatch(pattern, groups[position])
            if match is None:
                raise ValueError(f"shape {text!r}: {example}")
            sizes.update(zip(names, map(int, match.groups()), strict=True))
        if wrong := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"shape {text!r}: {wrong[0]} has to be >= 1 ({example})")
        if "Hq" in sizes and sizes["Hq"] % sizes["Hkv"]:
            raise ValueError(f"shape {text!r}: Hq = {sizes['Hq']} has to be a multiple of Hkv = {sizes['Hkv']}")
        if sizes.get("q", 1) > sizes.get("L", 1):
            raise ValueError(f"shape {text!r}: q = {sizes['q']} has to be at most L = {sizes['L']}, which includes q")
        return sizes

    def shape(self, sizes: Sizes) -> str:
        """The whole text of a shape."""
        return "".join(str(sizes.get(part, part)) for part in re.split("([x/:])", self.form))


def attention_work(sizes: Sizes, element_size: int, path: str) -> Work:
    """K, V, queries and outputs once; 4 D operations per (query, head, visible key)."""
    batch, queries, keys = sizes["B"], sizes.get("q", 1), sizes["L"]
    visible = queries * (keys - queries) + queries * (queries + 1) // 2
    elements = 2 * batch * keys * sizes["Hkv"] * sizes["D"] + 2 * batch * queries * sizes["Hq"] * sizes["D"]
    return Work(elements * element_size, 4 * batch * sizes["Hq"] * sizes["D"] * visible, "read")


def float8_attention_work(sizes: Sizes, element_size: int, path: str) -> Work:
    """The same with K and V of one byte an element."""
    whole = attention_work(sizes, element_size, path)
    spared = 2 * sizes["B"] * sizes["L"] * sizes["Hkv"] * sizes["D"] * (element_size - 1)
    return Work(whole.bytes - spared, whole.operations, whole.bandwidth)


def _blocks_bytes(sizes: Sizes, element_size: int) -> int:
    return 2 * sizes["P"] * sizes["layers"] * sizes["Hkv"] * sizes["block"] * sizes["D"] * element_size


SAMPLING_PATHS = ("greedy", "plain", "top_k", "top_p", "top_k_top_p", "min_p", "all")


def swap_work(sizes: Sizes, element_size: int, path: str) -> Work:
    """Over the link between GPU and host a byte counts once, in memory alone twice."""
    moved = _blocks_bytes(sizes, element_size)
    return Work(2 * moved, 0, "copy") if path == "auto" else Work(moved, 0, "to host" if path == "out" else "to device")


def _quantized_op(kind: str, bits: int) -> Op:
    """Products with weights of a kind; the bytes of scales and zeros are those of two bytes and one a group."""

    def work(sizes: Sizes, element_size: int, path: str) -> Work:
        n, k, rows = sizes["N"], sizes["K"], sizes["T"]
        weight = n * k * bits // 8 + n * -(-k // sizes["group"]) * 3
        return Work(weight + rows * (n + k) * element_size, 2 * rows * n * k, "read")

    cuda = tuple(f"{t}x{shape}:128" for shape in ("4096x14336", "28672x4096") for t in (1, 4, 8, 16, 64))
    cpu = ("1x1024x2048:128", "8x1024x2048:128")
    return Op("TxNxK:group", cuda, cpu, work, make_quantized_matmul(kind), has_product=True)


def skinny_gemm_work(sizes: Sizes, element_size: int, path: str) -> Work:
    """The weight, x and the result once."""
    n, k, rows = sizes["N"], sizes["K"], sizes["T"]
    results = rows * (n // 2 if path == "gated" else n)
    return Work((n * k + rows * k + results) * element_size, 2 * rows * n * k, "read")


_LINEAR_SHAPES = ("6144x4096", "4096x4096", "28672x4096", "4096x14336", "128256x4096", "3072x576", "49152x576")
_DECODE_SHAPES = (
    "1x1024:32/8/128:16", "1x8192:32/8/128:16", "1x65536:32/8/128:16", "8x2048:32/8/128:16", "32x1024:32/8/128:16",
    "32x8192:32/8/128:16", "128x1024:32/8/128:16", "128x4096:32/8/128:16", "256x512:32/8/128:16",
    "256x2048:32/8/128:16", "64x4096:28/4/128:16", "64x4096:64/8/128:16", "64x4096:9/3/64:16", "64x4096:32/32/128:16",
    "64x4096:32/8/128:64", "64x4096:32/8/128:256",
)  # fmt: skip
_PREFILL_SHAPES = (
    "1x2048x2048:32/8/128:16", "1x8192x8192:32/8/128:16", "1x32768x32768:32/8/128:16", "8x2048x2048:32/8/128:16",
    "1x512x8192:32/8/128:16", "1x2048x32768:32/8/128:16", "8x512x8192:32/8/128:16", "4x4096x4096:28/4/128:16",
    "4x4096x4096:32/8/128:64",
)  # fmt: skip


def scaled(shapes: tuple[str, ...], divisors: tuple[int, ...], least: tuple[int, ...]) -> tuple[str, ...]:
    """The same shapes with the first group's numbers divided, for a machine that is slower."""
    result = []
    for shape in shapes:
        first, _, rest = shape.partition(":")
        numbers = zip(map(int, first.split("x")), divisors, least, strict=True)
        result.append("x".join(str(max(n // divisor, low)) for n, divisor, low in numbers) + ":" + rest)
    return tuple(result)


OPS: dict[str, Op] = {
    "decode": Op(
        "BxL:Hq/Hkv/D:block",
        _DECODE_SHAPES,
        scaled(_DECODE_SHAPES, (16, 16), (1, 64)),
        attention_work,
        problems.make_attention,
        tuple(PATHS),
        CPU_PATHS,
        has_product=True,
        variant_path="decode",
    ),
    "decode_float8": Op(
        "BxL:Hq/Hkv/D:block",
        ("1x32768:32/8/128:16", "8x32768:32/8/128:16", "32x8192:32/8/128:16", "64x32768:32/8/128:16"),
        ("1x512:32/8/128:16",),
        float8_attention_work,
        problems.make_float8_attention,
        tuple(PATHS),
        CPU_PATHS,
        variant_path="decode",
    ),
    "prefill": Op(
        "BxqxL:Hq/Hkv/D:block",
        _PREFILL_SHAPES,
        scaled(_PREFILL_SHAPES, (1, 64, 64), (1, 16, 16)),
        attention_work,
        problems.make_attention,
        tuple(PATHS),
        CPU_PATHS,
        has_product=True,
        variant_path="prefill",
    ),
    "prefill_float8": Op(
        "BxqxL:Hq/Hkv/D:block",
        _PREFILL_SHAPES,
        ("1x32x128:32/8/128:16",),
        float8_attention_work,
        problems.make_float8_attention,
        tuple(PATHS),
        CPU_PATHS,
        has_product=True,
    ),
    "rms_norm": Op(
        "TxH",
        ("256x4096", "8192x4096"),
        ("512x2048",),
        lambda s, e, path: Work(2 * s["T"] * s["H"] * e, 4 * s["T"] * s["H"], "copy"),
        problems.make_rms_norm,
    ),
    "fused_add_rms_norm": Op(
        "TxH",
        ("256x4096", "8192x4096"),
        ("512x2048",),
        lambda s, e, path: Work(4 * s["T"] * s["H"] * e, 5 * s["T"] * s["H"], "copy"),
        problems.make_fused_add_rms_norm,
    ),
    "silu_and_mul": Op(
        "TxI",
        ("256x14336", "8192x14336"),
        ("256x4096",),
        lambda s, e, path: Work(3 * s["T"] * s["I"] * e, 5 * s["T"] * s["I"], "copy"),
        problems.make_silu_and_mul,
    ),
    "rotary_embedding": Op(
        "T:Hq/Hkv/D",
        ("256:32/8/128", "8192:32/8/128"),
        ("256:32/8/128",),
        lambda s, e, path: Work(
            2 * s["T"] * (s["Hq"] + s["Hkv"]) * s["D"] * e, 3 * s["T"] * (s["Hq"] + s["Hkv"]) * s["D"], "copy"
        ),
        problems.make_rotary_embedding,
    ),
    "skinny_gemm": Op(
        "TxNxK",
        tuple(f"{rows}x{shape}" for shape in _LINEAR_SHAPES for rows in (1, 4, 8, 16, 32)),
        ("1x1024x2048", "8x1024x2048"),
        skinny_gemm_work,
        problems.make_skinny_gemm,
        cuda_paths=("plain", "gated"),
        cpu_paths=("plain", "gated"),
        has_product=True,
    ),
    "w4a16": _quantized_op("int4", 4),
    "w8a16": _quantized_op("int8", 8),
    "w8a16_float8": _quantized_op("float8", 8),
    "reshape_and_cache": Op(
        "T:Hkv/D:block",
        ("256:8/128:16", "8192:8/128:16"),
        ("512:8/128:16",),
        lambda s, e, path: Work(4 * s["T"] * s["Hkv"] * s["D"] * e, 0, "copy"),
        problems.make_reshape_and_cache,
    ),
    "gather_cache": Op(
        "BxL:Hkv/D:block",
        ("8x8192:8/128:16", "64x4096:8/128:16"),
        ("4x512:8/128:16",),
        lambda s, e, path: Work(4 * s["B"] * s["L"] * s["Hkv"] * s["D"] * e, 0, "copy"),
        problems.make_gather_cache,
    ),
    "copy_blocks": Op(
        "Pxlayers:Hkv/D:block",
        ("32x32:8/128:16", "512x32:8/128:16"),
        ("32x4:8/128:16",),
        lambda s, e, path: Work(2 * _blocks_bytes(s, e), 0, "copy"),
        problems.make_copy_blocks,
    ),
    "swap_blocks": Op(
        "Pxlayers:Hkv/D:block",
        ("32x32:8/128:16", "512x32:8/128:16"),
        ("32x4:8/128:16",),
        swap_work,
        problems.make_swap_blocks,
        cuda_paths=("out", "in"),
        all_paths=True,
    ),
    "sample": Op(
        "SxV",
        ("1x131072", "64x131072", "256x49152", "256x131072"),
        ("16x49152",),
        lambda s, e, path: Work(s["S"] * s["V"] * e, 10 * s["S"] * s["V"], "read"),
        problems.make_sample,
        cuda_paths=SAMPLING_PATHS,
        cpu_paths=SAMPLING_PATHS,
        all_paths=True,
    ),
}
