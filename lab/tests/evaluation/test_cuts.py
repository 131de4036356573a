"""The counts of how documents are cut, on documents that are cut badly on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from blendrag.text import chunking
from blendrag.text.outline import Outline
from blendrag_lab.evaluation.cuts import measured, report


def test_headings_definitions_and_rows_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunker = chunking.Chunker(tiny.tokenizer().backend_tokenizer, 128)
    (tmp_path / "a.md").write_text("# Guide\n\n" + "The lamp is lit at dusk. " * 40)
    functions = (f"def f{n}():\n    a = {n}\n\n    b = a + 1\n\n    return b\n" for n in range(9))
    (tmp_path / "b.py").write_text("\n".join(functions))
    (tmp_path / "c.csv").write_text("id,name\n" + "".join(f"{n},lamp\n" for n in range(90)))
    (tmp_path / "d.bin").write_bytes(b"\0\0")
    good = measured(tmp_path, chunker)
    assert (good.documents, good.definitions, good.rows) == (3, 9, 90)
    assert good.under_headings > 2
    assert (good.headless, good.cut_definitions, good.cut_rows) == (0, 0, 0)
    monkeypatch.setattr(chunking, "outline_of", lambda text, source: Outline())
    bad = measured(tmp_path, chunker)
    assert bad.headless == bad.under_headings - 1
    assert bad.cut_definitions
    assert report([good, bad]).rows[1][0] == str(tmp_path)
