"""The journal keeps what was answered; notes and tables of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blendrag.errors import InvalidInputError
from blendrag_lab.evaluation.datasets import Dataset
from blendrag_lab.evaluation.report import reuse_note, tables
from blendrag_lab.evaluation.rows import ArenaRow, Journal, Outcome, kept_by, make_rows
from blendrag_lab.evaluation.scoring import Kept
from blendrag_lab.evaluation.ways import Way
from lab.tests.evaluation import invented, lab


def outcome(case: str, way: str, accuracy: float = 1.0) -> Outcome:
    return Outcome(case, way, "Pórto\n", accuracy, 1.0, None, 0.25, 0.5, 0.1, 0.2, 3.5)


def test_outcomes_come_back_as_they_were_added(tmp_path):
    path = tmp_path / "new" / "journal.jsonl"
    Journal(path).add([outcome("a", "full"), outcome("a", "reuse", 0.0)])
    Journal(path).add([outcome("b", "full")])
    journal = Journal(path)
    assert journal.get(("a", "reuse")) == outcome("a", "reuse", 0.0)
    assert journal.get(("b", "full")) == outcome("b", "full")
    assert journal.get(("b", "reuse")) is None


def test_an_incomplete_line_is_dropped_and_complete_lines_are_not_rewritten(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path).add([outcome("a", "full"), outcome("b", "full")])
    file, content = path.stat().st_ino, path.read_bytes()
    path.write_bytes(content[:-20])
    journal = Journal(path)
    assert (path.stat().st_ino, path.read_bytes()) == (file, content[: content.index(b"\n") + 1])
    assert journal.get(("b", "full")) is None
    journal.add([outcome("c", "full")])
    again = Journal(path)
    assert again.get(("a", "full")) is not None
    assert again.get(("c", "full")) is not None


@pytest.mark.parametrize("text", ["hello\n", "hello", '{"a": 1}\n', "[]\n"])
def test_another_file_is_refused_and_not_changed(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match="expected the lines of an earlier evaluation"):
        Journal(path)
    assert path.read_text() == text


def test_a_path_that_cannot_be_used_is_one_sentence(tmp_path):
    with pytest.raises(InvalidInputError, match="give --out another file"):
        Journal(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="give --out another file"):
        Journal(tmp_path / "file" / "x.jsonl").add([outcome("a", "full")])


def test_rows_tell_what_is_kept_of_the_answers_that_full_prefill_gives_right():
    asked = Dataset("tiny", "accuracy", lab.cases(1, 4), 3, 64)
    full = [outcome("c", "full", right) for right in (1.0, 0.0, 1.0, 1.0)]
    near = [replace(outcome("c", "reuse", 1.0), agreement=share) for share in (1.0, 0.5, 0.7, 0.7)]
    fidelity = [replace(each, accuracy=None) for each in near]
    others = {Way("reuse"): near, Way("query"): fidelity}
    rows = make_rows(asked, {Way("none"): full, Way("full"): full, **others}, seed=1)
    reuse, query = (
        next(row for row in rows if (row.policy, row.kind) == (policy, "all"))
        for policy in ("reuse", "query")
    )
    assert (reuse.right, reuse.kept, reuse.gained) == (3, 1.0, 1.0)
    assert reuse.right_agreement == pytest.approx(0.8)
    assert (query.right, query.kept, query.gained) == (3, None, None)
    assert query.right_agreement == pytest.approx(0.8)
    assert kept_by(reuse, rows) == Kept(3, 1.0, 1.0)
    older = [replace(row, right=None) for row in rows]  # sums by kind
    assert kept_by(replace(reuse, right=None), older) == Kept(2, 1.0, None)
    first, *_ = tables(rows)
    assert first.title.endswith("; full prefill answers 3 right")
    named = [name for table in tables(rows) for name in table.head]
    assert {"kept", "gained", "agrees, right"} <= set(named)
    summaries = make_rows(replace(asked, metric="rouge_l"), {Way("full"): full}, seed=1)
    assert {(row.right, row.kept) for row in summaries} == {(None, None)}


def answered(policy: str, *scores: float, recovered: float = 0.0) -> ArenaRow:
    """``scores`` of one question in each context."""
    return invented.row(
        policy, score=sum(scores) / len(scores), n=len(scores), recovered=recovered,
        recovered_low=recovered - 0.1, by_context=tuple((1, score) for score in scores),
    )  # fmt: skip


def test_there_is_a_note_unless_a_policy_beats_reuse_by_more_than_the_interval():
    reuse = answered("reuse", 0.0, 1.0, 0.0, 1.0)
    note = reuse_note([reuse, answered("query", 0.0, 1.0, 1.0, 1.0, recovered=0.3)])
    assert note.startswith(
        "recomputing nothing scored as well: reuse 0.500, the best policy (query) 0.750"
    )
    assert note.endswith("by KL per token query is closer to full prefill (0.30 recovered)")
    worse = answered("hkvd", 0.0, 0.0, 1.0, 1.0)
    assert reuse_note([reuse, worse]).endswith(
        "nor is any policy closer to full prefill by KL per token"
    )
    close = answered("reuse", 0.0, 0.1, 0.0, 0.2)
    assert reuse_note([close, answered("query", 1.0, 1.0, 1.0, 1.0)]) == ""
    assert reuse_note([close, answered("full", 0.0, 0.0, 0.0, 0.0)]) == ""
    assert reuse_note([answered("query", 0.0, 0.0)]) == ""


@pytest.mark.parametrize("width", [80, 200])
def test_tables_fit_the_terminal_and_cut_nothing_off(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows = []
    for kind in ("all", "direct", "coreference", "unanswerable"):
        rows += [invented.baseline("full", kind), invented.baseline("boundary(4)", kind)]
        for policy, ratio, pgr in (
            ("query", 0.02, 0.93),
            ("query", 0.15, 0.98),
            ("hkvd", 0.1, None),
        ):
            rows.append(invented.row(policy, kind, pgr, ratio=ratio))
    for table in tables(rows):
        table.print()
    shown = capsys.readouterr().out
    assert "…" not in shown
    for row in rows:
        assert row.policy in shown
        assert f"{row.score:.3f}" in shown
        if row.pgr is not None and row.kind == "all":
            assert f"{row.pgr:.2f} [{row.pgr_low:.2f}, {row.pgr_high:.2f}]" in shown
