"""The command line: fast help, one exit code for each kind of outcome, and a doctor that says what to do."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from research_engine import cli, doctor
from research_engine.cli import COMMANDS, main


@pytest.fixture
def command(monkeypatch):
    """Registers a function as the command `probe`."""

    def register(function):
        monkeypatch.setitem(COMMANDS, "probe", cli.Command("unused:unused", "a probe"))
        monkeypatch.setattr(cli, "_import", lambda target: function)

    return register


def test_help_lists_every_command_and_imports_nothing_heavy():
    code = (
        "import sys; from research_engine.cli import main; code = main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'rich', 'tyro'} & set(sys.modules); assert not heavy, heavy\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_every_command_exists_and_explains_itself(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([*name.split(), "--help"])
        assert stop.value.code == 0
        assert f"research-engine {name}" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "first"), [(["docter"], "doctor"), (["bench", "cup"], "bench cpu")])
def test_an_unknown_command_is_a_users_mistake_with_the_nearest_first(words, first, capsys):
    assert main(words) == 2
    assert f"nearest first: {first}" in capsys.readouterr().err


def test_a_group_alone_lists_its_commands(capsys):
    assert main(["bench"]) == 2
    assert "bench cpu" in capsys.readouterr().out


def test_an_unknown_option_is_a_users_mistake(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "cpu", "--bacth", "4"])
    assert stop.value.code == 2
    assert "--batch" in capsys.readouterr().err


def test_a_value_out_of_range_is_a_users_mistake_told_without_a_traceback(capsys):
    assert main(["bench", "cpu", "--batch", "0"]) == 2
    assert capsys.readouterr().err == "research-engine bench cpu: batch = 0: must be >= 1\n"


def test_an_unknown_model_is_a_users_mistake(capsys):
    assert main(["bench", "cpu", "--model", "dummy:tinny"]) == 2
    assert "dummy:tiny" in capsys.readouterr().err


def test_a_commands_own_exit_code_is_passed_on(command):
    command(lambda: 1)
    assert main(["probe"]) == 1


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file", "there.json"),
        FileNotFoundError("there.parquet"),
        OSError(errno.ENOSPC, "No space left"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_without_a_traceback(command, error, capsys):
    def fail() -> int:
        raise error

    command(fail)
    assert main(["probe"]) == 2
    assert capsys.readouterr().err == f"research-engine probe: {error}\n"


def test_an_error_of_the_system_that_names_no_place_is_ours(command):
    def fail() -> int:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    command(fail)
    with pytest.raises(ConnectionResetError):
        main(["probe"])


def test_a_failure_of_ours_is_not_taken_for_a_users_mistake(command):
    def fail() -> int:
        raise RuntimeError("a fault")

    command(fail)
    with pytest.raises(RuntimeError, match="a fault"):  # the interpreter prints the traceback and exits with 1
        main(["probe"])


def test_ctrl_c_is_told_shortly(command, capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    command(interrupted)
    assert main(["probe"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def build(**facts):
    plain = dict.fromkeys(("nvcc_version", "cuda_flags"), "")
    lists = {"cuda_archs": [], "openmp_runtimes": ["libgomp.so"], "cuda_devices": [], "problems": ["put nvcc on PATH"]}
    built = {"built": True, "built_with_cuda": False, "file": "_C.so", "compiler": "g++", "cpu_flags": "-O3"}
    return {**plain, **lists, **built, "num_threads": 2, **facts}


def diagnosis(monkeypatch, capsys, *, nvcc=None, driver=None, **facts):
    monkeypatch.setattr("research_engine.kernels.build_info", lambda: build(**facts))
    monkeypatch.setattr(doctor, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(doctor, "driver_version", lambda: driver)
    code = main(["doctor"])
    return code, " ".join(capsys.readouterr().out.split())


def test_doctor_says_plainly_that_a_build_is_for_the_cpu_alone(monkeypatch, capsys):
    code, out = diagnosis(monkeypatch, capsys)
    assert code == 0
    assert "this is a CPU-only build" in out and "put nvcc on PATH" in out


def test_doctor_keeps_what_a_report_needs_on_one_line_where_there_is_no_terminal(monkeypatch, capsys):
    flags = " ".join(f"--flag-{number}" for number in range(30))
    path = "/".join(["", *["directory"] * 12, "_C.so"])
    monkeypatch.setattr("research_engine.kernels.build_info", lambda: build(cpu_flags=flags, file=path))
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert any(flags in line for line in lines) and any(path in line for line in lines)


def test_doctor_says_that_an_nvcc_found_since_can_be_used(monkeypatch, capsys):
    assert "nvcc is at /opt/nvcc now" in diagnosis(monkeypatch, capsys, nvcc="/opt/nvcc")[1]


def test_doctor_names_architectures_and_flags_of_a_cuda_build(monkeypatch, capsys):
    facts = {"built_with_cuda": True, "cuda_archs": ["80", "90a"], "nvcc_version": "13.0.88", "problems": []}
    code, out = diagnosis(monkeypatch, capsys, cuda_flags="-gencode x", **facts)
    assert code == 0
    assert "sm_80, sm_90a" in out and "13.0.88" in out and "-gencode x" in out


def test_doctor_fails_without_kernels(monkeypatch, capsys):
    code, out = diagnosis(monkeypatch, capsys, built=False, problems=["The kernels are not built: run pip"])
    assert code == 1
    assert "not built" in out


@pytest.mark.parametrize(
    ("capability", "archs", "fine"),
    [
        ((9, 0), ["80", "90a"], True),
        ((8, 9), ["80", "90a"], True),
        ((7, 5), ["80", "90a"], False),
        ((10, 0), ["90a"], False),
        ((12, 0), ["80"], True),
    ],
)
def test_doctor_knows_which_gpus_a_build_runs_on(capability, archs, fine):
    assert (doctor.arch_problem(capability, archs, "a GPU") is None) == fine
