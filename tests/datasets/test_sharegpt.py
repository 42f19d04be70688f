"""ShareGPT's file is read as a stream, and one that is cut off gives every whole record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research_engine.datasets.sharegpt import ConversationFile


def conversations(count: int, words: int = 8) -> str:
    records = [
        {"id": str(i), "conversations": [
            {"from": "human", "value": f"é{i} " + "word " * (words - 1)}, {"from": "gpt", "value": "answer " * words},
            {"from": "human", "value": "more"}]} for i in range(count)
    ]  # fmt: skip
    return json.dumps(records, ensure_ascii=False, indent=1)


def test_a_whole_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "whole.json"
    path.write_text(conversations(500), encoding="utf-8")
    file = ConversationFile(path)
    turns = list(file)
    assert (len(turns), file.records, file.fault) == (500, 500, None)
    assert turns[3].prompt.startswith("é3 word")


@pytest.mark.parametrize("cut", [1, 2, 3, 40, 200])
def test_a_file_cut_off_anywhere_gives_every_whole_record(tmp_path: Path, cut: int) -> None:
    data = conversations(50).encode()
    path = tmp_path / "cut.json"
    path.write_bytes(data[:-cut])
    file = ConversationFile(path)
    turns = list(file)
    assert file.warning is not None
    assert f"{len(turns)} records were read" in file.warning
    whole = data[:-cut].count(b'"more"\n   }\n  ]\n }')
    assert len(turns) == whole


def test_a_file_cut_in_the_middle_of_a_character_is_read(tmp_path: Path) -> None:
    data = conversations(3).encode()
    at = data.rindex("é".encode()) + 1
    path = tmp_path / "cut.json"
    path.write_bytes(data[:at])
    assert len(list(ConversationFile(path))) == 2


def test_records_larger_than_what_is_read_at_once_are_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_text(conversations(3, words=300_000), encoding="utf-8")
    assert [len(turn.answer) for turn in ConversationFile(path)] == [7 * 300_000] * 3


def test_what_is_no_array_is_told(tmp_path: Path) -> None:
    path = tmp_path / "object.json"
    path.write_text('{"conversations": []}')
    file = ConversationFile(path)
    assert list(file) == []
    assert file.warning is not None
    assert "is not a JSON array" in file.warning


def test_records_of_another_shape_or_of_one_turn_are_passed_over(tmp_path: Path) -> None:
    odd = [
        1,
        None,
        {"conversations": None},
        {"conversations": [{"from": "human", "value": "hello"}]},
        {"conversations": [3]},
    ]
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(odd)[:-1] + "," + conversations(1)[1:], encoding="utf-8")
    file = ConversationFile(path)
    assert len(list(file)) == 1
    assert file.records == 6
