"""Both forms of question files, how they are recognised, and what is wrong with bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.errors import InvalidInputError
from blendrag.lab.evaluation.cases import Dataset, by_context
from blendrag.lab.evaluation.datasets import read_dataset
from blendrag.lab.evaluation.synthetic import synthetic_dataset
from blendrag.lab.evaluation.wording import SUMMARY
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import Chunker

PASSAGES = [{"title": "", "text": tiny.sentence(i)} for i in range(9)]
ASKED = {"question": "Who built ships near Place49?", "answers": ["the company"], "ctxs": PASSAGES}
BODY = "Zagreb is its capital, and it is by far the largest of its cities."
LONG = {
    "input": "Who built ships near Place49?",
    "context": "\n\n".join(tiny.sentence(i) for i in range(20)),
    "answers": ["the company", "it"],
    "dataset": "qasper",
}


def tokens() -> Tokens:
    return Tokens(tiny.tokenizer())


def read(path: Path, records: Any, lines: bool = False, **more: Any) -> Dataset:
    text = "\n".join(map(json.dumps, records)) if lines else json.dumps(records)
    path.write_text(text, encoding="utf-8")
    return read_dataset(path, Chunker(tokens().text, 64), tiny.WordEmbedder(), **more)  # type: ignore[arg-type]


# -- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [False, True])
def test_passages_become_the_nearest_chunks_nearest_first(tmp_path: Path, lines: bool) -> None:
    dataset = read(tmp_path / "musique.json", [ASKED], lines)
    (case,) = dataset.cases
    assert (dataset.name, dataset.metric) == ("musique", "f1")
    assert case.answers == ("the company",)
    assert len(case.chunks) == 6
    assert case.chunks[0] == tiny.sentence(7)  # the passage of Place49


def test_nested_answers_are_flattened_and_titles_stand_above_their_text(tmp_path: Path) -> None:
    record = {**ASKED, "answers": [["Croatia"], ["HR"]], "ctxs": [{"title": "T", "text": BODY}]}
    (case,) = read(tmp_path / "wiki.json", [record]).cases
    assert case.answers == ("Croatia", "HR")
    assert case.chunks == (f"T\n{BODY}",)


def test_what_is_too_short_to_be_recognised_is_no_chunk(tmp_path: Path) -> None:
    record = {**ASKED, "ctxs": [{"text": "Yes."}, {"text": BODY}, {"text": " "}]}
    (case,) = read(tmp_path / "short.json", [record]).cases
    assert case.chunks == (BODY,)


def test_a_long_context_is_cut_into_chunks_of_the_models_tokens(tmp_path: Path) -> None:
    dataset = read(tmp_path / "lb.jsonl", [LONG], lines=True, n_chunks=3)
    (case,) = dataset.cases
    assert dataset.metric == "f1"
    assert len(case.chunks) == 3
    assert all(len(tokens().encode_text(chunk)) <= 64 for chunk in case.chunks)
    assert any("Place49" in chunk for chunk in case.chunks)


@pytest.mark.parametrize(
    "change", [{"input": ""}, {"dataset": "samsum"}, {"dataset": "multi_news", "input": ""}]
)
def test_summaries_are_scored_by_rouge_l(tmp_path: Path, change: dict[str, str]) -> None:
    dataset = read(tmp_path / "s.json", [{**LONG, **change}])
    assert dataset.metric == "rouge_l"
    assert dataset.kinds == ("summary",)


def test_the_word_that_ends_a_dialogue_is_left_to_the_prompt(tmp_path: Path) -> None:
    record = {**LONG, "dataset": "samsum", "input": "Dialogue: A: Hi.\nSummary: "}
    (case,) = read(tmp_path / "s.json", [record]).cases
    assert case.question == "Dialogue: A: Hi."
    assert SUMMARY.prompt(case.chunks, case.question).count("Summary:") == 1


def test_the_type_of_a_question_is_its_kind(tmp_path: Path) -> None:
    records = [{**ASKED, "type": kind} for kind in ("bridge", "comparison", "bridge")]
    assert read(tmp_path / "hotpot.json", records).kinds == ("bridge", "comparison")


def test_line_separators_and_a_byte_order_mark_are_no_ends_of_records(tmp_path: Path) -> None:
    text = f"{BODY}\u2028Two.\u0085Three.\x0cFour."
    lines = [json.dumps({**LONG, "context": text}, ensure_ascii=False)] * 2
    path = tmp_path / "lb.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    dataset = read_dataset(path, Chunker(tokens().text, 64), tiny.WordEmbedder())  # type: ignore[arg-type]
    assert len(dataset.cases) == 2
    assert "Four." in dataset.cases[1].chunks[0]


def test_an_answer_may_be_a_number(tmp_path: Path) -> None:
    (case,) = read(tmp_path / "x.json", [{**ASKED, "answers": [1969, "in 1969"]}]).cases
    assert case.answers == ("1969", "in 1969")


def test_only_as_many_records_are_read_as_asked_for(tmp_path: Path) -> None:
    assert len(read(tmp_path / "x.json", [ASKED] * 5, n_cases=2).cases) == 2


def test_a_record_without_texts_is_asked_over_what_is_retrieved_for_it(tmp_path: Path) -> None:
    records = [{"question": "Who sailed?", "answers": ["she"]}, ASKED]
    sought: list[str] = []

    def retrieve(question: str) -> list[str]:
        sought.append(question)
        return [tiny.sentence(3), "Yes.", tiny.sentence(1)]

    bare, whole = read(tmp_path / "own.json", records, retrieve=retrieve).cases
    assert bare.chunks == (tiny.sentence(3), tiny.sentence(1))  # in the order retrieved
    assert sought == ["Who sailed?"]
    assert len(whole.chunks) == 6  # its own passages


# -- bad files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "sentence"),
    [([], "holds no records"),
     ([{"prompt": "x"}], "record 1 of .* has the fields prompt; expected {question, answers, ctxs}"),
     (["text"], "record 1 of .* is a str,"),
     ([ASKED, 7], "record 2 of .* is an int,"),
     ([ASKED, {"question": "Why?", "answers": ["x"]}], "record 2 of .* has the fields question, answers;"),
     ([{**ASKED, "answers": []}], "record 1 of .* has no answers"),
     ([ASKED, {**ASKED, "answers": [[]]}], "record 2 of .* has no answers"),
     ([{k: v for k, v in ASKED.items() if k != "answers"}], "has no answers"),
     ([{**ASKED, "ctxs": []}], "empty chunk list"),
     ([{**ASKED, "ctxs": [{"text": "  "}]}], "empty chunk list"),
     ([{**ASKED, "ctxs": [{"title": "x"}]}], "passage without text"),
     ([{**ASKED, "question": " "}], "empty question"),
     ([{**ASKED, "question": None}], "no text question"),
     ([{**LONG, "context": ["a"]}], "no text context"),
     ([LONG, {**LONG, "dataset": "samsum"}], "record 2 of .* is scored by rouge_l, .* by f1"),
     ([{**LONG, "input": ""}, LONG],
      "record 2 of .* by f1, as it asks a question, record 1 by rouge_l, as it asks nothing"),
     ([ASKED, ASKED, {**LONG, "input": ""}],
      "record 3 of .* by rouge_l, as it asks nothing, record 1 by f1"),
     ([{**ASKED, "question": ""}, ASKED], "record 1 by rouge_l, as it asks nothing")],
)  # fmt: skip
def test_a_bad_record_is_named_in_one_sentence(
    tmp_path: Path, records: list[Any], sentence: str
) -> None:
    with pytest.raises(InvalidInputError, match=sentence) as caught:
        read(tmp_path / "bad.json", records)
    assert "\n" not in str(caught.value)


def test_a_file_may_hold_records_of_both_forms(tmp_path: Path) -> None:
    one, other = read(tmp_path / "both.json", [ASKED, LONG], n_chunks=2).cases
    assert (one.question, other.question) == (ASKED["question"], LONG["input"])
    assert one.chunks[0] == tiny.sentence(7)
    assert "Place49" in " ".join(other.chunks)


@pytest.mark.parametrize(
    ("text", "line"),
    [('{"question": ', 1),
     (json.dumps(ASKED) + "\n\n" + json.dumps(ASKED)[:-9] + "\n", 3),
     (json.dumps(ASKED) + "\n" + json.dumps([ASKED]) + ",\n", 2),
     (json.dumps([ASKED, ASKED], indent=1)[:-1], len(json.dumps([ASKED, ASKED], indent=1).split("\n"))),
     (json.dumps(ASKED, indent=1), 1)],
)  # fmt: skip
def test_what_is_no_json_is_named_by_file_and_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError) as caught:
        read_dataset(path, None, None)  # type: ignore[arg-type]
    assert f"line {line} of dataset {path} is no JSON (" in str(caught.value)
    assert tiny.one_sentence(str(caught.value))


def test_questions_alone_are_told_what_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("Who built ships?\nWhere?\n", encoding="utf-8")
    with pytest.raises(
        InvalidInputError, match=r"is plain text, expected .* calibrate --questions"
    ):
        read_dataset(path, None, None)  # type: ignore[arg-type]


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_dataset(tmp_path / "absent.json", None, None)  # type: ignore[arg-type]


# -- generated ------------------------------------------------------------------------------------


def test_generated_cases_are_grouped_by_context_and_equal_for_equal_seeds() -> None:
    dataset = synthetic_dataset(tokens(), seed=3, n_contexts=3, n_chunks=4)
    groups = list(by_context(dataset.cases))
    assert len(groups) == 3
    for cases in groups:
        assert {case.chunks for case in cases} == {cases[0].chunks}
        assert len(cases[0].chunks) == 4
    assert dataset == synthetic_dataset(tokens(), seed=3, n_contexts=3, n_chunks=4)
    assert (
        dataset.cases[0] != synthetic_dataset(tokens(), seed=4, n_contexts=1, n_chunks=4).cases[0]
    )


def test_kinds_take_turns_where_questions_are_limited() -> None:
    dataset = synthetic_dataset(tokens(), n_contexts=2, n_questions=4)
    for cases in by_context(dataset.cases):
        kinds = [case.kind for case in cases]
        assert len(kinds) == 4
        assert max(map(kinds.count, kinds)) - min(map(kinds.count, kinds)) <= 1


def test_a_split_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="split 'exam' is not one of"):
        synthetic_dataset(tokens(), split="exam")
