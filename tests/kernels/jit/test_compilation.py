"""Kernels compiled at run time without a GPU: what comes out, what is kept, and what a mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from research_engine.kernels import jit
from research_engine.kernels.jit import compilation, nvrtc

ADD_SCALED = """\
#include <cstdint>

template <typename T, int kThreads> struct Shape {
  static constexpr int kTile = kThreads * RATIO;
};

template <typename T> __global__ void add_scaled(const T* x, T* y, float factor, int64_t count) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) y[i] += factor * x[i];
}
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        nvrtc.load()
    except ImportError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("RESEARCH_ENGINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that the compiler was run on."""
    files: list[str] = []
    real = nvrtc.Nvrtc.compile

    def counted(self: nvrtc.Nvrtc, source: str, file: str, *rest: object) -> nvrtc.Compiled:
        files.append(file)
        return real(self, source, file, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(nvrtc.Nvrtc, "compile", counted)
    return files


def compile_add(**changes: object) -> jit.CompiledKernel:
    options: dict[str, object] = {"arch": "sm_90a", "defines": {"RATIO": 4}}
    return jit.compile(ADD_SCALED, "add_scaled<float>", **{**options, **changes})  # type: ignore[arg-type]


def test_a_template_is_compiled_to_code_of_the_very_architecture() -> None:
    made = compile_add()
    assert made.cubin[:4] == b"\x7fELF" and made.symbol.encode() in made.cubin
    assert (made.arch, made.spilled, made.log) == ("sm_90a", 0, "") and 0 < made.registers <= 255
    assert compile_add(arch="sm_80").cubin != made.cubin


def test_constants_of_the_source_are_read_without_a_gpu() -> None:
    wanted = {"tile": "Shape<float, 128>::kTile", "negative": "-3", "size": "sizeof(Shape<float, 1>*)", "zero": "0"}
    assert compile_add(constants=wanted).constants == {"tile": 512, "negative": -3, "size": 8, "zero": 0}


def test_the_second_time_nothing_is_compiled(compilations: list[str]) -> None:
    first, second = compile_add(constants={"a": "1"}), compile_add(constants={"a": "1"})
    assert len(compilations) == 1
    assert vars(first) == vars(second)


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "sm_80"},
        {"defines": {"RATIO": 8}},
        {"constants": {"tile": "Shape<float, 2>::kTile"}},
        {"options": ("--use_fast_math",)},
    ],
)
def test_whatever_changes_the_code_is_compiled_anew(change: dict[str, object], compilations: list[str]) -> None:
    compile_add()
    compile_add(**change)
    assert len(compilations) == 2


def test_an_edit_of_a_header_that_a_header_includes_is_seen(tmp_path: Path, compilations: list[str]) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text('#include "outer.h"\n__global__ void fill(int* x) { *x = kValue; }\n')
    (tmp_path / "outer.h").write_text('#pragma once\n#include "inner.h"\n')
    (tmp_path / "inner.h").write_text('#pragma once\n#include "outer.h"\nconstexpr int kValue = 1;\n')
    value = {"value": "kValue"}
    assert jit.compile(source, "fill", arch="sm_90a", constants=value).constants == {"value": 1}
    (tmp_path / "inner.h").write_text("#pragma once\nconstexpr int kValue = 2;\n")
    assert jit.compile(source, "fill", arch="sm_90a", constants=value).constants == {"value": 2}
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("kernel.cu", "outer.h", "inner.h"):
        (tmp_path / name).rename(moved / name)
    assert jit.compile(moved / "kernel.cu", "fill", arch="sm_90a", constants=value).constants == {"value": 2}
    assert len(compilations) == 2  # by content: a move changes nothing


@pytest.mark.parametrize("damage", [lambda whole: whole[:-1], lambda whole: b"", lambda whole: b"{}\n" + whole])
def test_a_damaged_file_in_the_cache_is_made_again(damage, compilations: list[str]) -> None:
    made = compile_add()
    (kept,) = compilation.cache_folder().iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    assert compile_add().cubin == made.cubin
    assert len(compilations) == 2
    compile_add()
    assert len(compilations) == 2 and len(list(compilation.cache_folder().iterdir())) == 1


def test_a_cache_that_cannot_be_written_costs_only_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RESEARCH_ENGINE_CACHE", str(tmp_path / "file"))
    assert compile_add().registers > 0


def test_an_error_names_the_line_and_shows_it() -> None:
    source = ADD_SCALED.replace("factor * x[i]", "factr * x[i]")
    with pytest.raises(jit.CompilationError) as caught:
        jit.compile(source, "add_scaled<float>", arch="sm_90a", defines={"RATIO": 4})
    first, shown, *log = str(caught.value).splitlines()
    assert first.startswith('kernel.cu(9): error: identifier "factr" is undefined')
    assert shown == "    9 | if (i < count) y[i] += factr * x[i];"
    assert any("1 error detected" in line for line in log)


def test_an_error_in_a_header_shows_the_headers_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.h").write_text("// a comment\nint f() { return nothing; }\n")
    (tmp_path / "kernel.cu").write_text('#include "wrong.h"\n__global__ void run() {}\n')
    with pytest.raises(jit.CompilationError, match=r"wrong\.h\(2\): error.*\n    2 \| int f\(\) \{ return nothing; \}"):
        jit.compile(tmp_path / "kernel.cu", "run", arch="sm_90a")


def test_a_kernel_that_the_source_lacks_is_an_error() -> None:
    with pytest.raises(jit.CompilationError, match="add_scale"):
        jit.compile(ADD_SCALED, "add_scale<float>", arch="sm_90a", defines={"RATIO": 4})


@pytest.mark.parametrize("arch", ["sm_91", "90a", "compute_90", "sm_90x"])
def test_an_unknown_architecture_is_refused_with_the_nearest_ones(arch: str) -> None:
    with pytest.raises(ValueError, match=rf"arch = '{arch}': this compiler knows sm_90, "):
        compile_add(arch=arch)


def test_the_project_headers_can_be_included() -> None:
    source = """
#include "cuda/mma.cuh"
__global__ void run(float* x) { *x = research_engine::cuda::exp2_fast(*x); }
"""
    assert jit.compile(source, "run", arch="sm_80").registers > 0


def test_without_a_compiler_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_libraries", lambda: iter(["/nowhere/libnvrtc.so.13"]))
    with pytest.raises(ImportError, match=r"research_engine\[cuda13\]"):
        nvrtc.load.__wrapped__()
