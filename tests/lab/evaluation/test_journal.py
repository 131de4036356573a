"""The journal: what was answered stays answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendrag.errors import InvalidInputError
from blendrag.lab.evaluation.journal import Journal, Outcome


def outcome(case: str, way: str, accuracy: float = 1.0) -> Outcome:
    return Outcome(case, way, "Pórto\n", accuracy, 1.0, None, 0.25, 0.5, 0.1, 0.2, 3.5)


def test_outcomes_come_back_as_they_were_put(tmp_path: Path) -> None:
    path = tmp_path / "new" / "journal.jsonl"
    Journal(path).add([outcome("a", "full"), outcome("a", "reuse", 0.0)])
    Journal(path).add([outcome("b", "full")])
    journal = Journal(path)
    assert journal.get("a", "reuse") == outcome("a", "reuse", 0.0)
    assert journal.get("b", "full") == outcome("b", "full")
    assert journal.get("b", "reuse") is None


def test_a_line_cut_short_is_dropped_and_the_next_begins_afresh(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).add([outcome("a", "full"), outcome("b", "full")])
    path.write_text(path.read_text()[:-20])
    journal = Journal(path)
    assert journal.get("b", "full") is None
    journal.add([outcome("c", "full")])
    assert len(path.read_text().splitlines()) == 2
    again = Journal(path)
    assert again.get("a", "full") is not None
    assert again.get("c", "full") is not None


def test_whole_lines_stay_as_they_are_where_the_last_one_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).add([outcome("a", "full"), outcome("b", "full")])
    whole, content = path.stat().st_ino, path.read_bytes()
    first = content.index(b"\n") + 1
    path.write_bytes(content[:-20])
    Journal(path)
    assert (path.stat().st_ino, path.read_bytes()) == (whole, content[:first])


@pytest.mark.parametrize("text", ["hello\n", "hello", '{"a": 1}\n', "[]\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match="expected the lines of an earlier evaluation"):
        Journal(path)
    assert path.read_text() == text


def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="give --out another file"):
        Journal(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="give --out another file"):
        Journal(tmp_path / "file" / "x.jsonl").add([outcome("a", "full")])


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    journal = Journal()
    journal.add([outcome("a", "full")])
    assert journal.get("a", "full") is not None
