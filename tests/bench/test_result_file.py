"""A result's place is tried before the run, and a result that finds no place is kept elsewhere."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from research_engine.bench import result_file
from research_engine.bench.result_file import check_place, save


def full(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_place_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    check_place(tmp_path / "new" / "r.json", "save")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("name", [".", "file/r.json"])
def test_a_place_that_takes_no_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"save = '.*': (is a directory|cannot be written)"):
        check_place(tmp_path / name, "save")


def test_a_result_goes_to_the_temporary_files_when_its_place_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(result_file, "write_text", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert not save(Path("r.json"), "{}\n")
    told = capsys.readouterr().err
    assert "the result is not saved in r.json" in told and "No space left" in told
    assert Path(told.rpartition("it is in ")[2].strip()).read_text() == "{}\n"


def test_a_result_is_printed_when_there_is_no_place_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(result_file, "write_text", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert not save(Path("r.json"), "{}\n")
    printed = capsys.readouterr()
    assert printed.out == "{}\n" and "it is printed above" in printed.err
