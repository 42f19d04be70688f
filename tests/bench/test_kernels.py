"""The kernels' benchmark times only what is right, counts work as by hand, and leaves whole files."""

from __future__ import annotations

import csv
import dataclasses
import sys

import pytest
import torch

from research_engine import kernels
from research_engine.bench import kernel_problems, kernel_report
from research_engine.bench import kernels as bench
from research_engine.bench.kernel_ops import OPS, Work
from research_engine.bench.kernel_problems import Setting
from research_engine.bench.kernel_report import COLUMNS, OURS, Case, KernelBenchResult, Measurement
from research_engine.bench.kernel_timing import CpuTimer, CudaTimer, measure_ceilings
from research_engine.cli import main

SMALL = {
    "decode": "3x37:4/2/16:8",
    "decode_float8": "3x37:4/2/16:8",
    "prefill": "2x5x21:4/2/16:8",
    "prefill_float8": "2x5x21:4/2/16:8",
    "rms_norm": "70x32",
    "fused_add_rms_norm": "70x32",
    "silu_and_mul": "70x24",
    "rotary_embedding": "70:4/2/16",
    "skinny_gemm": "5x70x96",
    "w4a16": "5x70x96:32",
    "w8a16": "3x70x96:96",
    "w8a16_float8": "9x70x96:96",
    "reshape_and_cache": "70:2/16:8",
    "gather_cache": "3x37:2/16:8",
    "copy_blocks": "70x2:2/16:8",
    "swap_blocks": "70x2:2/16:8",
    "sample": "5x300",
}
CEILINGS = {"read": 4e9, "copy": 3e9, "to host": 1e9, "to device": 1e9, "product": 1e12, "launch": 5e-6}


@pytest.fixture(autouse=True)
def no_cold_caches(monkeypatch):
    """Times do not matter here."""
    monkeypatch.setattr("research_engine.bench.kernel_timing.CPU_FLUSH_BYTES", 1)


@pytest.fixture
def known_ceilings(monkeypatch):
    monkeypatch.setattr(bench, "measure_ceilings", lambda *args: CEILINGS)


def measure(op, *, device="cpu", dtype="bfloat16", timer=None, **options):
    on = torch.device(device)
    path = (OPS[op].cuda_paths if device == "cuda" else OPS[op].cpu_paths)[0]
    case = Case(op, OPS[op].parse(SMALL[op]), path)
    timer = timer or (CudaTimer() if device == "cuda" else CpuTimer())
    return bench.measure_case(
        case, Setting(on, getattr(torch, dtype), path), bench.KernelBenchOptions(repeats=2, **options), timer
    )


def test_the_small_shapes_cover_every_op():
    assert SMALL.keys() == OPS.keys()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_ours_and_torch_are_right_and_timed(op, dtype, device):
    if (device, dtype) == ("cuda", "float32") and ("a16" in op or op == "skinny_gemm"):
        pytest.skip("the products for few rows take 16-bit floats alone there")
    ours, *peers = measure(op, device=device, dtype=dtype)
    for measurement in (ours, *peers):
        assert (measurement.status, measurement.note) == ("ok", "")
        assert len(measurement.seconds) == 2 and min(measurement.seconds) > 0
    names = [] if op in ("decode_float8", "prefill_float8") else ["torch"]  # torch's attention takes no float8
    assert [ours.implementation, *(peer.implementation for peer in peers)] == [OURS, *names]


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_that_does_nothing_is_not_timed(op, monkeypatch):
    attention = op.startswith(("decode", "prefill"))
    name = "quantized_matmul" if "a16" in op else "paged_attention" if attention else op
    monkeypatch.setattr(kernels, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(CpuTimer, "measure", lambda *args: pytest.fail("a wrong kernel was timed"))
    (measurement,) = measure(op)
    assert measurement.status == "wrong" and "not timed" in measurement.note
    assert measurement.seconds == ()


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_attention_that_misses_one_key_of_one_request_is_wrong(op, monkeypatch):
    right = kernels.paged_attention

    def wrong(query, key_cache, value_cache, tables, starts, seq_lens, **kwargs):
        shorter = seq_lens.clone()
        shorter[-1] -= 1
        return right(query, key_cache, value_cache, tables, starts, shorter, **kwargs)

    monkeypatch.setattr(kernels, "paged_attention", wrong)
    assert [m.status for m in measure(op)] == ["wrong"]


def test_what_is_checked_is_what_is_timed():
    class WrongReplay(CpuTimer):
        def prepare(self, run, capturable):
            return lambda: tuple(result + 1 for result in run())

    assert [m.status for m in measure("rms_norm", timer=WrongReplay())] == ["wrong"]


def test_calls_in_a_row_have_inputs_of_their_own_and_each_is_checked(monkeypatch):
    seen = []
    right = kernels.rms_norm

    def wrong_at_the_third(x, *args, **kwargs):
        seen.append(x)
        out = right(x, *args, **kwargs)
        return out.zero_() if len(seen) == 3 else out

    monkeypatch.setattr(kernels, "rms_norm", wrong_at_the_third)
    assert [m.status for m in measure("rms_norm", in_a_row=3)] == ["wrong"]
    assert not torch.equal(seen[0], seen[1])
    seen[:] = seen[:3]
    assert [m.status for m in measure("rms_norm", in_a_row=2)] == ["ok", "ok"]


def test_the_time_of_calls_in_a_row_is_a_calls(known_ceilings):
    class Ticks(CpuTimer):
        def measure(self, run, repeats):
            return [6.0] * repeats

    assert measure("rms_norm", timer=Ticks(), in_a_row=3)[0].seconds == (2.0, 2.0)


def test_a_peer_that_is_wrong_is_not_timed_and_ours_is(monkeypatch):
    monkeypatch.setattr("torch.nn.functional.rms_norm", lambda x, *args: torch.zeros_like(x))
    assert [m.status for m in measure("rms_norm")] == ["ok", "wrong"]


def test_compare_names_the_libraries_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    found = {m.implementation: m for m in measure("decode", compare=True)}
    assert list(found) == [OURS, "torch", "FlashInfer", "FlashAttention-3"]
    assert found["FlashInfer"].status == "refused" and "flashinfer" in found["FlashInfer"].note
    assert found["FlashAttention-3"].status == "refused" and "vllm" in found["FlashAttention-3"].note


def test_a_fault_of_a_kernel_is_written_down_and_the_run_goes_on(monkeypatch, known_ceilings):
    def fault(*args, **kwargs):
        raise RuntimeError("an illegal access\nand more")

    monkeypatch.setattr(kernels, "rms_norm", fault)
    result = bench.run(bench.KernelBenchOptions(op=("rms_norm", "copy_blocks"), device="cpu", repeats=1))
    assert [(m.case.op, m.status) for m in result.measurements if m.implementation == OURS] == [
        ("rms_norm", "failed"),
        ("copy_blocks", "ok"),
    ]
    assert result.measurements[0].note == "RuntimeError: an illegal access"
    assert result.exit_code == 1


def test_a_device_that_a_fault_made_unusable_ends_the_run_with_what_was_measured(monkeypatch, known_ceilings):
    monkeypatch.setattr(CpuTimer, "clear", lambda timer: False)
    result = bench.run(bench.KernelBenchOptions(op=("rms_norm", "copy_blocks"), device="cpu", repeats=1))
    assert {m.case.op for m in result.measurements} == {"rms_norm"}
    assert (result.not_run, result.exit_code) == (1, 1)


@pytest.mark.parametrize(
    ("op", "text", "whole"),
    [
        ("decode", "128x4096", "128x4096:32/8/128:16"),
        ("decode", "64x4096:9/3/64", "64x4096:9/3/64:16"),
        ("prefill", "1x512x8192:28/4/128:64", "1x512x8192:28/4/128:64"),
        ("rms_norm", "8192x4096", "8192x4096"),
        ("rotary_embedding", "12", "12:32/8/128"),
        ("copy_blocks", "3x2", "3x2:8/128:16"),
    ],
)
def test_groups_of_a_shape_that_are_left_out_have_defaults(op, text, whole):
    assert OPS[op].shape(OPS[op].parse(text)) == whole


@pytest.mark.parametrize("op", OPS)
def test_default_shapes_are_whole_and_differ(op):
    for shapes in (OPS[op].cuda_shapes, OPS[op].cpu_shapes):
        assert [OPS[op].shape(OPS[op].parse(shape)) for shape in shapes] == list(shapes)
        assert len(set(shapes)) == len(shapes) > 0


def test_as_many_configurations_as_the_documented_tables_have():
    assert (len(OPS["decode"].cuda_shapes), len(OPS["prefill"].cuda_shapes)) == (16, 9)


@pytest.mark.parametrize(
    ("op", "text", "rule"),
    [
        ("decode", "128", "BxL:Hq/Hkv/D:block"),
        ("decode", "1x2x3", "BxL:Hq/Hkv/D:block"),
        ("decode", "1x2:8/2", "BxL:Hq/Hkv/D:block"),
        ("decode", "1x2:8/2/64:16:1", "BxL:Hq/Hkv/D:block"),
        ("decode", "1x-2", "BxL:Hq/Hkv/D:block"),
        ("decode", "1x2:8/3/64", "multiple of Hkv = 3"),
        ("decode", "0x2", "B has to be >= 1"),
        ("prefill", "1x9x8", "at most L = 8"),
        ("rms_norm", "", "TxH"),
    ],
)
def test_a_shape_that_does_not_fit_names_the_form_or_the_rule(op, text, rule):
    with pytest.raises(ValueError, match=rule) as caught:
        OPS[op].parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("op", "shape", "path", "expected"),
    [
        # keys and values 2 x (2 x 3 x 2 x 8), queries and outputs 2 x (2 x 4 x 8) elements; 2 x 3 visible keys
        ("decode", "2x3:4/2/8:16", "auto", Work(2 * (192 + 128), 4 * 4 * 8 * 6, "read")),
        # rows see 4 and 5 keys; keys and values 2 x (5 x 1 x 8), queries and outputs 2 x (2 x 2 x 8)
        ("prefill", "1x2x5:2/1/8:16", "auto", Work(2 * (80 + 64), 4 * 2 * 8 * 9, "read")),
        ("rms_norm", "3x5", "auto", Work(2 * 2 * 15, 4 * 15, "copy")),
        ("fused_add_rms_norm", "3x5", "auto", Work(2 * 4 * 15, 5 * 15, "copy")),
        ("silu_and_mul", "3x5", "auto", Work(2 * 3 * 15, 5 * 15, "copy")),
        ("rotary_embedding", "3:2/1/4", "auto", Work(2 * 2 * 36, 3 * 36, "copy")),
        ("reshape_and_cache", "3:2/4:16", "auto", Work(2 * 4 * 24, 0, "copy")),
        ("copy_blocks", "3x2:2/4:16", "auto", Work(2 * 4 * 768, 0, "copy")),
        ("swap_blocks", "3x2:2/4:16", "auto", Work(2 * 4 * 768, 0, "copy")),
        ("swap_blocks", "3x2:2/4:16", "out", Work(2 * 2 * 768, 0, "to host")),
        ("swap_blocks", "3x2:2/4:16", "in", Work(2 * 2 * 768, 0, "to device")),
    ],
)
def test_work_is_counted_as_by_hand(op, shape, path, expected):
    assert OPS[op].work(OPS[op].parse(shape), 2, path) == expected


def test_the_roofline_is_the_slower_of_memory_and_arithmetic():
    result = KernelBenchResult(CEILINGS, "a device", "bfloat16", 2, [])
    assert result.roofline_seconds(Work(8_000, 1_000, "read")) == pytest.approx(2e-6)
    assert result.roofline_seconds(Work(8_000, 4_000_000, "read")) == pytest.approx(4e-6)
    assert result.roofline_seconds(Work(9_000, 0, "copy")) == pytest.approx(3e-6)


def test_a_sample_holds_the_first_and_the_last_and_nothing_twice():
    setting = Setting(torch.device("cpu"), torch.float32, "auto")
    rows = kernel_problems.sample(1000, 7, setting).tolist()
    assert rows == sorted(set(rows)) and len(rows) == 7
    assert (rows[0], rows[-1]) == (0, 999)
    assert kernel_problems.sample(5, 7, setting).tolist() == [0, 1, 2, 3, 4]


def test_the_relative_error_is_that_of_the_worst_row():
    expected = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert kernel_problems.relative_error(torch.tensor([[3.0, 4.0], [0.0, 1.5]]), expected) == pytest.approx(0.5)
    assert not kernel_problems.relative_error(expected * torch.nan, expected) <= 1


def test_ceilings_are_those_asked_for(monkeypatch):
    ceilings = measure_ceilings({"read", "product", "launch"}, CpuTimer(), torch.device("cpu"), torch.float32, 1)
    assert {"read", "product", "launch"} <= ceilings.keys() and min(ceilings.values()) > 0
    assert ceilings["read"] >= ceilings["copy"]


def test_the_csv_has_a_line_for_every_implementation_and_no_cell_is_left_empty(tmp_path, known_ceilings):
    options = bench.KernelBenchOptions(op=("decode",), shape=("1x9:4/2/16", "2x9:4/2/16"), device="cpu", repeats=3)
    result = bench.run(options)
    path = kernel_report.write_csv(result, tmp_path / "kernels.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["shape"], row["implementation"]) for row in rows] == [
        (shape, name) for shape in ("1x9:4/2/16:16", "2x9:4/2/16:16") for name in (OURS, "torch")
    ]
    assert list(rows[0]) == list(COLUMNS)
    for row in rows:
        empty = {name for name, value in row.items() if value == ""}
        assert empty == ({"note"} if row["implementation"] == OURS else {"note", "path"})
    (first, *_), row = result.measurements, rows[0]
    assert float(row["median_us"]) == pytest.approx(sorted(first.seconds)[1] * 1e6)
    assert float(row["bytes_per_second"]) == pytest.approx(first.work.bytes / sorted(first.seconds)[1])
    assert float(row["roofline_percent"]) == pytest.approx(100 * float(row["roofline_us"]) / float(row["median_us"]))


def measured(op, seconds, status="ok"):
    case = Case(op, OPS[op].parse(SMALL[op]), "auto")
    return Measurement(case, OURS, OPS[op].work(case.sizes, 2, "auto"), status, "", 0.0, seconds)


def test_files_appear_whole_or_not_at_all(tmp_path, monkeypatch):
    result = KernelBenchResult(CEILINGS, "a device", "bfloat16", 2, [measured("decode", (1e-5, 2e-5))])
    path = kernel_report.write_plot(result, tmp_path / "roofline.png")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
    kernel_report.write_csv(result, tmp_path / "kernels.csv")
    before = (tmp_path / "kernels.csv").read_text()

    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(kernel_report, "csv_row", fail)
    with pytest.raises(OSError, match="no space left"):
        kernel_report.write_csv(result, tmp_path / "kernels.csv")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kernels.csv", "roofline.png"]
    assert (tmp_path / "kernels.csv").read_text() == before


def test_there_is_no_plot_of_copies_alone(tmp_path):
    result = KernelBenchResult(CEILINGS, "a device", "bfloat16", 2, [measured("copy_blocks", (1e-5, 2e-5))])
    assert kernel_report.write_plot(result, tmp_path / "roofline.png") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("states", "code"),
    [(["ok"], 0), (["ok", "wrong"], 1), (["refused", "failed"], 1), (["ok", "refused"], 2)],
)
def test_the_exit_code_is_that_of_the_worst_outcome(states, code):
    measurements = [measured("decode", (), status) for status in states]
    measurements.append(dataclasses.replace(measurements[0], implementation="torch", status="wrong"))
    assert KernelBenchResult(CEILINGS, "a device", "bfloat16", 2, measurements).exit_code == code


def command(*words):
    return main(["bench", "kernels", "--device", "cpu", "--repeats", "2", *words])


def test_the_command_prints_a_table_and_writes_both_files(tmp_path, capsys):
    assert command("--op", "decode", "--shape", SMALL["decode"], "--out", str(tmp_path / "deep" / "out")) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in (SMALL["decode"], "roof", "torch us", "ceilings: ", "product "))
    assert sorted(file.name for file in (tmp_path / "deep" / "out").iterdir()) == ["kernels.csv", "roofline.png"]


def test_paths_stand_side_by_side(known_ceilings, capsys):
    assert command("--op", "decode", "--shape", SMALL["decode"], "--path", "decode", "prefill") == 0
    assert capsys.readouterr().out.count(SMALL["decode"]) == 2


def test_a_wrong_kernel_is_told_and_ends_with_1(monkeypatch, known_ceilings, capsys):
    monkeypatch.setattr(kernels, "silu_and_mul", lambda x, out: out.copy_(x[:, : out.shape[1]]))
    assert command("--op", "silu_and_mul") == 1
    assert "WRONG: research_engine, silu_and_mul" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--op", "decod"], "op 'decod': one of decode"),
        (["--op", "decode", "--path", "prefil"], "'prefil': one of prefill"),
        (["--op", "rms_norm", "--path", "simple"], "'simple': one of auto"),
        (["--op", "decode", "--shape", "12"], "BxL:Hq/Hkv/D:block, like 1x1024:32/8/128:16"),
        (["--shape", "1x2"], "needs one op"),
        (["--dtype", "float16"], "one of bfloat16, float32"),
        (["--device", "cud"], "one of cuda"),
        (["--repeats", "0"], "repeats = 0"),
        (["--out", "/dev/null/x"], "out = /dev/null/x"),
    ],
)
def test_a_users_mistake_is_told_with_what_is_valid_and_ends_with_2(words, told, capsys):
    assert command(*words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_a_users_mistake(capsys):
    assert main(["bench", "kernels", "--device", "cuda"]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err


def test_variants_are_timed_beside_the_built_kernel():
    options = bench.KernelBenchOptions(op=("decode",), shape=("4x64",), variant=("stages=3,warps=2", "stages=2"))
    cases = bench.choose_cases(options, torch.device("cuda"))
    assert [case.path for case in cases] == ["decode", "decode[stages=3,warps=2]", "decode[stages=2]"]
    options = dataclasses.replace(options, path=("simple", "decode[warps=8]"), variant=("stages=2",))
    cases = bench.choose_cases(options, torch.device("cuda"))
    assert [case.path for case in cases] == ["simple", "decode[warps=8]", "decode[stages=2]"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--op", "decode", "--variant", "stage=3"], "no parameter 'stage'"),
        (["--op", "decode", "--variant", "stages=3"], "compiled for CUDA devices alone"),
        (["--op", "decode", "--path", "decode[stages=3]"], "compiled for CUDA devices alone"),
        (["--op", "decode", "--path", "decod[stages=3]"], "path 'decod' has no variants"),
        (["--op", "sample", "--variant", "stages=3"], "op sample has no variants; decode, decode_float8, prefill have"),
        (["--variant", "stages=3"], "needs an op to belong to, out of decode, decode_float8, prefill"),
    ],
)
def test_a_variant_that_is_not_there_is_a_mistake_of_the_users(arguments, told, capsys):
    assert main(["bench", "kernels", "--device", "cpu", *arguments]) == 2
    assert told in "".join(capsys.readouterr())
