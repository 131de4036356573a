"""The table of ``blendrag eval``: nothing of a figure is cut off, however narrow the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from blendrag.lab.evaluation import report
from blendrag.lab.evaluation.rows import Row
from blendrag.lab.evaluation.ways import make_ways
from lab.evaluation import lab


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return lab.arena(make_ways(["reuse", "query"], ["first:2"], [0.15], [True])).run()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_names_ratios_and_intervals_are_whole(
    rows: list[Row], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system=None, width=width)
    monkeypatch.setattr(report, "Console", lambda: console)
    report.print_rows(rows)
    shown = written.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for row in rows:
        assert row.policy in shown
        assert f"{row.score:.3f}" in shown
    (query,) = {row.schedule for row in rows if row.policy == "query"}
    assert query in shown
