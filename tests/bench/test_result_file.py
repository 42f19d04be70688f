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


def test_what_lies_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    real, link = tmp_path / "store" / "real.json", tmp_path / "link.json"
    real.parent.mkdir()
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    assert save(link, "new")
    assert link.is_symlink() and real.read_text() == "new" and real.stat().st_mode & 0o777 == 0o600


def test_a_device_is_written_into_and_stays_one() -> None:
    check_place(Path("/dev/null"), "save")
    assert save(Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()


def test_a_place_that_takes_a_name_and_no_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(ValueError, match="cannot be written: .*No space left"):
        check_place(tmp_path / "r.json", "save")
