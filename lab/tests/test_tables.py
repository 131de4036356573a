"""Result tables on a terminal and on a page."""

from __future__ import annotations

from blendrag_lab.tables import ResultTable, figure, interval, number, spread, table


def test_a_table_is_printed_as_markdown_and_on_a_terminal(capsys):
    made = table(
        [("way", lambda row: row[0]), ("ms", lambda row: figure(row[1]))],
        [("a|b", 1.0), ("[c]", 2345.6)],
        "3 rounds",
        ["A note."],
    )
    assert made.markdown() == (
        "3 rounds\n\n| way | ms |\n| --- | --- |\n| a\\|b | 1.00 |\n| [c] | 2,346 |\n\nA note."
    )
    made.print()
    printed = capsys.readouterr().out
    for text in ("3 rounds", "a|b", "[c]", " 1.00 ", "A note."):
        assert text in printed


def test_a_table_without_title_is_its_grid():
    assert ResultTable(("a",), [("1",)]).markdown() == "| a |\n| --- |\n| 1 |"


def test_numbers_have_three_digits_or_all_before_the_point():
    assert [figure(x) for x in (0.012345, 12.34, 99.96, 12345.6)] == [
        "0.0123",
        "12.3",
        "100",
        "12,346",
    ]
    assert spread(2.0, (1.0, 300.0)) == "2.00 (1.00 to 300)"
    assert (number(None, ".2f"), number(0.5, ".2f")) == ("–", "0.50")
    assert interval(0.9, 0.8, 0.95) == "0.90 [0.80, 0.95]"
    assert (interval(0.9, None, None), interval(None, None, None)) == ("0.90", "–")
