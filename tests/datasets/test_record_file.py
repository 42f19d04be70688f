"""Records of .csv and .jsonl files, and what is said of files that hold none."""

from __future__ import annotations

from pathlib import Path

import pytest

from research_engine.datasets.record_file import read_records


@pytest.mark.parametrize(
    ("name", "text", "records"),
    [
        ("a.csv", "prompt,output\n3,4\n5,6\n", [{"prompt": "3", "output": "4"}, {"prompt": "5", "output": "6"}]),
        ("a.jsonl", '{"prompt": 3}\n\n{"prompt": 5}\n', [{"prompt": 3}, {"prompt": 5}]),
        ("empty.jsonl", "", []),
        ("of_a_spreadsheet.csv", "\ufeffprompt,output\r\n3,4\r\n", [{"prompt": "3", "output": "4"}]),
    ],
)
def test_records_come_by_the_names_of_their_columns(
    name: str, text: str, records: list[dict[str, object]], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert list(read_records(tmp_path / name)) == records


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", b"", "from .csv and .jsonl files"),
        ("a.jsonl", b"{}\n[1]\n", r"a.jsonl, line 2: '\[1\]\\n' is no JSON object"),
        ("a.jsonl", b"{\n", "a.jsonl, line 1: cannot be read as JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": ', "line 2, the file's last, perhaps cut short: cannot be read as JSON"),
        ("a.csv", b"a\n\xff\n", "cannot be read"),
    ],
)
def test_a_file_without_records_is_told(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=told):
        list(read_records(tmp_path / name))
    with pytest.raises(ValueError, match="cannot be read"):
        list(read_records(tmp_path / "missing.csv"))
