"""Question files in all forms, bad records by number, and the generated dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.errors import InvalidInputError
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import Chunker
from blendrag_lab.evaluation.datasets import Dataset, by_context, read_dataset, synthetic_dataset

PASSAGES = [{"title": "", "text": tiny.sentence(i)} for i in range(9)]
ASKED = {"question": "Who built ships near Place49?", "answers": ["the company"], "ctxs": PASSAGES}
BODY = "Zagreb is its capital, and it is by far the largest of its cities."
LONG = {
    "input": "Who built ships near Place49?",
    "context": "\n\n".join(tiny.sentence(i) for i in range(20)),
    "answers": ["the company", "it"],
    "dataset": "qasper",
}
TOKENS = Tokens(tiny.tokenizer())


def read_text(path: Path, text: str, **more: Any) -> Dataset:
    path.write_text(text, encoding="utf-8")
    return read_dataset(path, Chunker(TOKENS.text, 64), tiny.WordEmbedder(), **more)


def read(path: Path, *records: Any, **more: Any) -> Dataset:
    return read_text(path, json.dumps(records), **more)


@pytest.mark.parametrize("form", ["[{0},{0}]", "{0}\n{0}"])
def test_passages_become_the_nearest_chunks_nearest_first(tmp_path, form):
    text = form.format(json.dumps(ASKED))
    dataset = read_text(tmp_path / "musique.json", text, n_cases=1)
    (case,) = dataset.cases
    assert (dataset.name, dataset.metric) == ("musique", "f1")
    assert case.answers == ("the company",)
    assert len(case.chunks) == 6
    assert case.chunks[0] == tiny.sentence(7)  # the passage of Place49


def test_answers_are_flattened_and_titles_and_kinds_are_kept(tmp_path):
    ctxs = [{"title": "T", "text": BODY}, {"text": "Yes."}, {"text": " "}]
    record = {**ASKED, "answers": [["Croatia"], ["HR"], 1969], "ctxs": ctxs, "type": "bridge"}
    dataset = read(tmp_path / "wiki.json", record, {**ASKED, "type": "comparison"})
    assert dataset.cases[0].answers == ("Croatia", "HR", "1969")
    assert dataset.cases[0].chunks == (f"T\n{BODY}",)  # the others are too short to be recognised
    assert dataset.kinds == ("bridge", "comparison")


def test_a_long_context_is_cut_into_chunks_of_the_models_tokens(tmp_path):
    one, other = read(tmp_path / "both.json", LONG, ASKED, n_chunks=3).cases
    assert len(one.chunks) == 3
    assert all(len(TOKENS.encode_text(chunk)) <= 64 for chunk in one.chunks)
    assert any("Place49" in chunk for chunk in one.chunks)
    assert other.chunks[0] == tiny.sentence(7)  # a file may hold both forms


@pytest.mark.parametrize("change", [{"input": ""}, {"dataset": "samsum"}])
def test_summaries_are_scored_by_rouge_l(tmp_path, change):
    dataset = read(tmp_path / "s.json", {**LONG, "input": "Dialogue: A: Hi.\nSummary: ", **change})
    assert dataset.metric == "rouge_l"
    assert dataset.kinds == ("summary",)
    assert "Summary:" not in dataset.cases[0].question  # it is in the prompt


def test_line_separators_and_a_byte_order_mark_do_not_end_records(tmp_path):
    text = f"{BODY}\u2028Two.\u0085Three.\x0cFour."
    line = json.dumps({**LONG, "context": text}, ensure_ascii=False)
    dataset = read_text(tmp_path / "lb.jsonl", f"\ufeff{line}\n{line}\n")
    assert len(dataset.cases) == 2
    assert "Four." in dataset.cases[1].chunks[0]


def test_a_record_without_texts_is_asked_over_retrieved_chunks(tmp_path):
    sought: list[str] = []

    def retrieve(question: str) -> list[str]:
        sought.append(question)
        return [tiny.sentence(3), "Yes.", tiny.sentence(1)]

    records = ({"question": "Who sailed?", "answers": ["she"]}, ASKED)
    bare, whole = read(tmp_path / "own.json", *records, retrieve=retrieve).cases
    assert bare.chunks == (tiny.sentence(3), tiny.sentence(1))  # in the order retrieved
    assert sought == ["Who sailed?"]
    assert len(whole.chunks) == 6  # its own passages


@pytest.mark.parametrize(
    ("records", "sentence"),
    [([], "holds no records"),
     ([{"prompt": "x"}], "record 1 of .* has no text input, but the fields prompt; expected {question"),
     ([ASKED, 7], "record 2 of .* is of type int, expected"),
     ([ASKED, {"question": "Why?", "answers": ["x"]}], "record 2 of .* has no text context"),
     ([ASKED, {**ASKED, "answers": [[]]}], "record 2 of .* has no answers"),
     ([{k: v for k, v in ASKED.items() if k != "answers"}], "has no answers"),
     ([{**ASKED, "ctxs": []}], "empty chunk list"),
     ([{**ASKED, "ctxs": [{"text": "  "}]}], "empty chunk list"),
     ([{**ASKED, "ctxs": [{"title": "x"}]}], "passage without text"),
     ([{**ASKED, "question": " "}], "empty question"),
     ([{**ASKED, "question": None}], "no text question"),
     ([{**LONG, "context": ["a"]}], "no text context"),
     ([LONG, {**LONG, "dataset": "samsum"}], "record 2 of .* is scored by rouge_l"),
     ([ASKED, ASKED, {**LONG, "input": ""}],
      "record 3 of .* by rouge_l, record 1 by f1")],
)  # fmt: skip
def test_a_bad_record_is_named_in_one_sentence(tmp_path, records, sentence):
    with pytest.raises(InvalidInputError, match=sentence) as caught:
        read(tmp_path / "bad.json", *records)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [("Who built ships?\nWhere?\n", 1),
     (json.dumps(ASKED) + "\n\n" + json.dumps(ASKED)[:-9] + "\n", 3),
     (json.dumps([ASKED, ASKED], indent=1)[:-1], len(json.dumps([ASKED, ASKED], indent=1).split("\n"))),
     (json.dumps(ASKED, indent=1), 1)],
)  # fmt: skip
def test_invalid_json_is_named_by_file_and_line(tmp_path, text, line):
    path = tmp_path / "x.jsonl"
    with pytest.raises(InvalidInputError) as caught:
        read_text(path, text)
    assert f"line {line} of {path} is not JSON (" in str(caught.value)
    assert "questions alone are for blendrag calibrate --questions" in str(caught.value)
    assert tiny.one_sentence(str(caught.value))


def test_an_absent_file_is_one_sentence(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_dataset(tmp_path / "absent.json", None, None)  # type: ignore[arg-type]


def test_generated_cases_are_grouped_by_context_and_balanced_over_kinds():
    dataset = synthetic_dataset(TOKENS, n_contexts=2, n_questions=4)
    groups = list(by_context(dataset.cases))
    assert len(groups) == 2
    for cases in groups:
        assert {case.chunks for case in cases} == {cases[0].chunks}
        assert len(cases[0].chunks) == 6
        kinds = [case.kind for case in cases]
        assert len(kinds) == 4
        assert max(map(kinds.count, kinds)) - min(map(kinds.count, kinds)) <= 1
