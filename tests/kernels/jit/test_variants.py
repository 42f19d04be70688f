"""Variants of the attention kernels: how they are written, what is refused, that they compile and are right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from research_engine import kernels
from research_engine.kernels import jit
from research_engine.kernels.jit import compilation, nvrtc, variants
from research_engine.kernels.jit.__main__ import main


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        nvrtc.load()
    except ImportError as error:
        pytest.skip(str(error))
    if nvrtc.cuda_include() is None:
        pytest.skip("CUDA's headers are not on this machine")
    monkeypatch.setenv("RESEARCH_ENGINE_CACHE", str(tmp_path / "cache"))


def test_a_path_and_its_settings_say_the_same() -> None:
    variant = jit.parse_path("decode[warps=8,stages=3]")
    assert variant == jit.variant_of("decode", {"stages": 3, "warps": "8"})
    assert variant.path == "decode[stages=3,warps=8]" and jit.parse_path(variant.path) == variant
    assert variant.defines == {"RESEARCH_ENGINE_DECODE_STAGES": 3, "RESEARCH_ENGINE_DECODE_WARPS": 8}
    assert jit.parse_path("prefill[]").defines == {}


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("decode[stage=3]", "variant of decode: no parameter 'stage'; valid ones, nearest first: stages"),
        ("decode[stages=9]", "variant of decode: stages = '9'; one of 8, 7, 6"),
        ("decode[stages=two]", "variant of decode: stages = 'two'; one of 2, 3"),
        ("decod[stages=3]", "path 'decod' has no variants; valid ones, nearest first: decode, prefill"),
        ("simple[stages=3]", "path 'simple' has no variants"),
        ("decode[stages]", "'stages' has to be NAME=VALUE"),
        ("decode[stages=2,stages=3]", "stages is given twice"),
        ("decode[source=nowhere.cuh]", "source = 'nowhere.cuh': there is no such file"),
        ("decode[[stages=3]]", "a variant is written like decode[stages=3,warps=8]"),
    ],
)
def test_a_mistake_in_a_path_names_it_and_the_valid_ones(path: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        jit.parse_path(path)
    assert told in str(caught.value)


@pytest.mark.usefixtures("compiler")
def test_the_kernels_own_source_compiles_with_other_numbers() -> None:
    def compiled(path: str, **problem: object) -> jit.CompiledKernel:
        usual = {"cache_dtype": torch.bfloat16, "head_size": 64, "group_size": 4, "arch": "sm_90a"}
        return jit.compile_variant(jit.parse_path(path), **{**usual, **problem})  # type: ignore[arg-type]

    usual, changed = compiled("decode[]"), compiled("decode[warps=2,stages=3,blocks_per_sm=3]")
    assert (usual.constants["threads"], usual.constants["keys"], usual.constants["stages"]) == (128, 64, 4)
    facts = changed.constants
    assert (facts["threads"], facts["keys"], facts["stages"], facts["blocks_per_sm"]) == (64, 32, 3, 3)
    assert usual.spilled == 0 and facts["parameter_bytes"] == usual.constants["parameter_bytes"]
    assert usual.log == changed.log == ""
    prefill = compiled("prefill[keys=64,slots=4]")
    assert (prefill.constants["keys"], prefill.constants["slots"], prefill.constants["threads"]) == (64, 4, 384)


@pytest.mark.usefixtures("compiler")
def test_a_changed_copy_of_the_file_takes_the_kernels_place(tmp_path: Path) -> None:
    original = compilation.CSRC / "cuda" / variants.FAMILIES["decode"].source
    copy = tmp_path / "my_decode.cuh"
    copy.write_text(f"#define RESEARCH_ENGINE_DECODE_STAGES 3\n{original.read_text()}")
    made = jit.compile_variant(
        jit.parse_path(f"decode[source={copy}]"),
        cache_dtype=torch.float16,
        head_size=64,
        group_size=16,
        arch="sm_90a",
    )
    assert made.constants["stages"] == 3


def test_an_edit_of_the_copy_is_another_version(tmp_path: Path) -> None:
    copy = tmp_path / "my.cuh"
    copy.write_text("")
    variant = jit.parse_path(f"decode[source={copy}]")
    before = variant.version
    os.utime(copy, ns=(before, before + 1))
    assert variant.version == before + 1 and jit.parse_path("decode[]").version == 0


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("path", "problem", "told"),
    [
        ("decode[stages=8]", {"head_size": 128}, "stages = 8, and shared memory holds 3 at head size 128"),
        (
            "decode[]",
            {"cache_dtype": torch.float32},
            "caches of float32; it takes bfloat16, float16, float8_e4m3fn, int8",
        ),
        ("decode[]", {"head_size": 40}, "head size 40; at most 256, for decode a multiple of 16"),
        ("prefill[]", {"arch": "sm_80"}, "the prefill kernel's instructions are those of sm_90a"),
        ("prefill[]", {"cache_dtype": torch.int8}, "caches of int8; it takes bfloat16, float16"),
        ("decode[warps=8,stages=2]", {"head_size": 256}, "a stage is loaded while another is used"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(path: str, problem: dict[str, object], told: str) -> None:
    usual = {"cache_dtype": torch.bfloat16, "head_size": 64, "group_size": 4, "arch": "sm_90a"}
    with pytest.raises(ValueError) as caught:
        jit.compile_variant(jit.parse_path(path), **{**usual, **problem})  # type: ignore[arg-type]
    assert told in str(caught.value)


def test_the_cpu_has_no_variants() -> None:
    pytest.importorskip("research_engine._C")
    cache = torch.zeros(1, 1, 16, 32)
    with pytest.raises(ValueError, match="variants are compiled for CUDA devices, and query is on cpu"):
        kernels.paged_attention(
            torch.zeros(1, 1, 32), cache, cache, torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32), scale=1.0,
            path="decode[stages=3]",
        )  # fmt: skip


@pytest.mark.usefixtures("compiler")
def test_the_command_tells_registers_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("decode[warps=2]", arch="sm_80", head_size=64) == 0
    told = capsys.readouterr().out
    assert "for sm_80\n" in told and " registers, 0 bytes spilled" in told and "  threads = 64\n" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"what": "decode[warps=3]"}, "warps = '3'; one of 2, 4, 1, 8"),
        ({"what": "decode[]", "dtype": "float9"}, "dtype = 'float9'"),
        ({"what": "kernel.cu"}, "kernel: a file needs the name of its kernel"),
        ({"what": "kernel.cu", "kernel": "run"}, "kernel.cu"),
    ],
)
def test_the_command_answers_a_mistake(
    arguments: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arch="sm_90a", **arguments) == 2
    assert told in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize(("path", "queries"), [("decode", 1), ("prefill", 40)], ids=["decode", "prefill"])
def test_the_kernel_compiled_at_run_time_is_the_built_one_bit_for_bit(path: str, queries: int, device: str) -> None:
    from research_engine.bench.kernel_problems import Setting, make_attention

    sizes = {"B": 7, "q": queries, "L": 1333, "Hq": 32, "Hkv": 8, "D": 128, "block": 16}
    results = []
    for wanted in (path, f"{path}[]"):
        problem = make_attention(sizes, Setting(torch.device(device), torch.bfloat16, wanted, 0))
        problem.reset()
        results.append(problem.run()[0].clone())
        assert problem.error((results[-1],)) <= problem.tolerance
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    "path",
    [
        "decode[warps=2,stages=3]",
        "decode[warps=8,blocks_per_sm=1]",
        "prefill[keys=64]",
        "prefill[slots=4,copiers=1]",
    ],
)
def test_other_tiles_agree_with_the_oracle(path: str, device: str) -> None:
    from research_engine.bench.kernel_problems import Setting, make_attention

    sizes = {"B": 5, "q": 1 if path.startswith("decode") else 33, "L": 777, "Hq": 8, "Hkv": 2, "D": 128, "block": 16}
    problem = make_attention(sizes, Setting(torch.device(device), torch.float16, path, 0))
    problem.reset()
    assert problem.error(problem.run()) <= problem.tolerance
