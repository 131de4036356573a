"""The bench of search: what is a right chunk, and rows of what was found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from blendrag.errors import InvalidInputError
from blendrag.text.readers import Document
from blendrag_lab.bench import search_quality
from blendrag_lab.evaluation.search_sets import SearchQuestion, SearchSet, file_set
from lab.tests.bench.small import measured


def test_a_file_of_passages_is_a_set_without_questions_of_yes_or_no(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(
        '{"question": "Who?", "answers": [["Ann"]], "ctxs": [{"text": "Bo."}, {"text": "Ann."}]}\n'
        '{"question": "Is it?", "answers": ["yes"], "ctxs": [{"text": "Yes."}]}\n'
    )
    made = file_set(path)
    assert [question.text for question in made.questions] == ["Who?"]
    (question,) = made.questions
    assert [question.is_answered_by(d.source, d.text) for d in made.documents] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"answers": ["Ann"], "ctxs": [{"text": "Ann."}]}', "record 1 of .* has no text question"),
        ('{"question": "Who?", "answers": ["Ann"]}', "record 1 of .* has an empty chunk list"),
        (
            '{"question": "Who?", "answers": ["Ann"], "ctxs": [{"title": "A"}]}',
            "passage without text",
        ),
        (
            '{"question": "Who?", "answers": ["Ann"], "ctxs": ["Bo."]}',
            "has no question with an answer",
        ),
    ],
)
def test_files_without_questions_and_passages_are_refused(
    tmp_path: Path, record: str, message: str
) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(record)
    with pytest.raises(InvalidInputError, match=message):
        file_set(path)


class Backwards:
    """A reranker that likes the right chunk least."""

    def __init__(self, name: str) -> None:
        assert name == "backwards"

    def scores(self, question: str, texts: Sequence[str], check: object) -> np.ndarray:
        return np.array([-float(f"{question}:" in text) for text in texts])


def test_rows_say_what_each_way_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = tuple(
        Document(f"{n}.md", f"ERR_4-{n}: the pump is hot.", "Manual") for n in range(12)
    )
    questions = tuple(SearchQuestion(f"ERR_4-{n}", "", (f"ERR_4-{n}:",)) for n in range(3))
    sets = [SearchSet("errors", documents, questions), SearchSet("others", (), ())]
    monkeypatch.setattr(search_quality, "own_sets", lambda directory: sets)
    monkeypatch.setattr(search_quality, "Reranker", Backwards)
    monkeypatch.setattr(search_quality, "VOCABULARY", 1000)
    monkeypatch.setattr(search_quality, "LENGTHS", (10, 30))
    given = (
        "--embedder",
        "minilm-offline",
        "--reranker",
        "backwards",
        "--sets",
        "errors",
        "--chunks",
        "20",
    )
    result = measured("search", *given)
    (row,) = result["rows"]
    assert (row["chunks"], row["questions"]) == (12, 1), "the other half"
    assert {*row["found"]} == {"hybrid", "dense", "lexical", "reranked"}
    assert row["found"]["reranked"]["recall"] == 0
    assert row["found"]["lexical"] == {"recall": 1.0, "mrr": 1.0}
    assert [time["words"] for time in result["times"]] == [10, 30]
    assert all(time["embedding"] > 0 for time in result["times"])
