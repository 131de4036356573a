"""Lists of what was found show the part of each passage that the question is about."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from blendrag.text.excerpts import excerpts


class Passage(NamedTuple):
    text: str
    source: str


TABLE = """sku,name,price,place,comment
A-17,claw hammer,14.90,Bremen,fibreglass handle
A-18,cordless drill,89.00,Bremen,two batteries and a charger in the case
A-19,paint,32.00,Kiel,for walls"""
PROSE = (
    "Guide > Lighthouses\n\nThe tower is 34 metres high. In the storm of 1953 the keeper, whose name was "
    "Olaf Brandt, kept its lamp burning by hand. In the same year he left the island."
)


@pytest.mark.parametrize(
    ("text", "question", "shown"),
    [
        (TABLE, "the price of A-19", "A-19,paint,32.00,Kiel,for walls"),
        (TABLE, "Claw hammers of steel: a hammer", "A-17,claw hammer,14.90,Bremen,fibreglass …"),
        (TABLE, "with a charger", "… and a charger in the case …"),
        (TABLE, "screws", "sku,name,price,place,comment A-17,claw …"),
        (PROSE, "How high is the tower?", "The tower is 34 metres high. In the storm …"),
        (PROSE, "Who kept the lamp burning?", "… Brandt, kept its lamp burning by hand. …"),
        (PROSE, "a boat", "Guide > Lighthouses The tower is 34 …"),
        ("北京的冬天很冷。广州没有冬天。上海很潮湿。", "广州有冬天吗", "广州没有冬天。上海很潮湿。"),
        ("中" * 60, "国", "中" * 42 + " …"),
        ("", "anything", ""),
    ],
)  # fmt: skip
def test_an_excerpt_begins_where_the_question_is_met(text: str, question: str, shown: str) -> None:
    assert excerpts([Passage(text, "a.txt")], question, 44) == [shown]


MARKDOWN = (
    "Tools > Prices\n\n| article | price |\n| --- | --- |\n| A-17 | 14.90 |\n| A-18 | 89.00 |"
)


@pytest.mark.parametrize(
    ("text", "source", "question", "shown"),
    [
        ("place,guests\nKiel,9\nBremen,12", "a.csv", "guests in Kiel", "Kiel,9 Bremen,12"),
        ("place,guests\nKiel,9\nBremen,12", "a.csv", "place and guests of Bremen", "Bremen,12"),
        ("place,guests\nKiel,9\nBremen,12", "a.csv", "guests", "place,guests Kiel,9 Bremen,12"),
        (MARKDOWN, "a.md", "What price has A-18?", "| A-18 | 89.00 |"),
        (MARKDOWN, "a.md", "What is the price?", "| article | price | | --- | --- | | A-17 …"),
    ],
)
def test_a_row_of_a_table_comes_before_the_header(
    text: str, source: str, question: str, shown: str
) -> None:
    assert excerpts([Passage(text, source)], question, 44) == [shown]


def test_a_word_of_one_passage_weighs_more_than_words_of_all() -> None:
    texts = ["It is in the box. The key is here."] + ["It is in the box of it."] * 3
    passages = [Passage(text, "a.txt") for text in texts]
    assert excerpts(passages, "Is it in the key?", 30)[0] == "The key is here."
