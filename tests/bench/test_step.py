"""bench step: phases of the loop and kinds of kernels, as a table and as a picture."""

from __future__ import annotations

import pytest

from research_engine.bench.step import PHASES, Span, StepOptions, draw, kind_of, main


def test_every_phase_of_a_decode_step_is_in_the_table_and_the_picture_is_written(tmp_path, capsys):
    out = tmp_path / "step.svg"
    assert main(StepOptions("dummy:tiny", batch=3, context=5, steps=4, out=out)) == 0
    printed = capsys.readouterr().out
    for phase in (*PHASES, "wait"):
        assert phase in printed
    assert out.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void research_engine::cuda::decode::decode_mma_kernel<__nv_bfloat16, 128, 8>(", "attention"),
        ("nvjet_sm90_tst_128x8_64x12_2x1_v_bz_splitK_TNT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "products"),
        ("void research_engine::cuda::(anonymous namespace)::rms_norm_kernel<__nv_bfloat16>", "norms"),
        ("void research_engine::cuda::(anonymous namespace)::rotary_kernel<__nv_bfloat16>", "rotary and cache"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::index_elementwise_kernel<128, 4>", "other"),
    ],
)
def test_a_kernel_is_known_by_its_name(name, kind):
    assert kind_of(name) == kind


def test_a_recording_shorter_than_the_picture_is_drawn_whole(tmp_path):
    draw(tmp_path / "one.png", "one step", [Span("view", 0.0, 2.0), Span("plan", 2.0, 5.0)], [Span("other", 1.0, 4.0)])
    assert (tmp_path / "one.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 0}, "batch = 0: must be an integer >= 1"),
        ({"steps": 2}, "steps = 2: must be an integer >= 3"),
        ({"out": "nowhere/step.png"}, "there is no directory nowhere"),
        ({"out": "step.txt"}, r"\.png, \.pdf or \.svg is drawn"),
    ],
)
def test_bad_options_are_named(options, words, tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    options = {name: Path(value) if name == "out" else value for name, value in options.items()}
    with pytest.raises(ValueError, match=words):
        StepOptions("dummy:tiny", **options)
