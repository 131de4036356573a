"""Cases made without files: known answers, chunks of the asked size, the same for the same seed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

import tiny
from blendrag.demo import handbook_path
from blendrag.errors import InvalidInputError
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import Chunk, Chunker
from blendrag_lab.evaluation.arena import Arena
from blendrag_lab.evaluation.datasets import Dataset, spread
from blendrag_lab.evaluation.tasks import MEASURED, TASKS, _asked_of, make_task
from blendrag_lab.evaluation.ways import make_ways
from lab.tests.evaluation import lab

TOKENS = Tokens(tiny.tokenizer())


@pytest.fixture(autouse=True, scope="module")
def few_cuts() -> Iterator[None]:
    """Small modules only, and each text is cut once."""
    split = cache(lambda text, size: Chunker(TOKENS.text, size).split(text))

    class OnceCut(Chunker):
        def split(self, text: str) -> list[Chunk]:  # type: ignore[override]
            return split(text, self.chunk_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blendrag_lab.evaluation.tasks.LARGEST_MODULE", 5_000)
        patch.setattr("blendrag_lab.evaluation.tasks.Chunker", OnceCut)
        yield


@cache
def made(name: str, n_cases: int = 4, n_chunks: int = 4, seed: int = 1) -> Dataset:
    return make_task(name, TOKENS, seed, n_cases, n_chunks, 256)


@pytest.mark.parametrize("name", TASKS)
def test_cases_depend_on_the_seed_and_have_chunks_of_the_asked_size(name):
    found = made(name)
    assert (found.name, found.n_chunks, found.chunk_tokens, len(found.cases)) == (name, 4, 256, 4)
    assert make_task(name, TOKENS, 1, 2, 4, 256).cases == found.cases[:2]
    assert made(name, n_cases=1, seed=2).cases[0].chunks != found.cases[0].chunks
    for case in found.cases:
        assert len(set(case.chunks)) == 4
        sizes = [len(TOKENS.encode_text(chunk)) for chunk in case.chunks]
        assert max(sizes) <= 256
        assert sum(sizes) > 0.6 * 4 * 256
    assert len({case.digest for case in found.cases}) == 4


def test_answers_about_code_are_in_the_chunk_of_the_function():
    for case in made("code").cases:
        (answer,), (name,) = case.answers, re.findall(r"function (\w+)", case.question)
        (chunk, *_) = (text for text in case.chunks if f"def {name}(" in text)
        assert case.kind != "module" or chunk.startswith(f"# {answer}.py\n")


def test_a_function_is_asked_for_its_module_defaults_and_what_it_returns():
    code = "def f(a, b=None, c='x y', d=30, e='--'):\n    return a.b"
    (function,) = ast.parse(code).body
    assert isinstance(function, ast.FunctionDef)
    assert list(_asked_of(function, "mod")) == [
        ("module", "Which module defines the function f?", "mod"),
        ("default", "What is the default of d in the function f?", "30"),
        ("default", "What is the default of c in the function f?", "x y"),
        ("returns", "Which expression does the function f return?", "a.b"),
    ]


def test_answers_about_tables_are_their_numbers():
    cases = made("tables").cases
    assert {case.kind for case in cases} == {"look-up", "comparison"}
    for case in cases:
        (column,) = (i for i, name in enumerate(MEASURED, 1) if name in case.question)
        (station,) = re.findall(r"station (\d+)", case.question)
        by_year = {}
        for year in re.findall(r"\b\d{4}\b", case.question):
            (table,) = (text for text in case.chunks if text.startswith(f"## Weather in {year}\n"))
            (row,) = (
                line.split(" | ") for line in table.split("\n") if line.startswith(f"| {station} ")
            )
            by_year[year] = int(row[column].strip(" |"))
        values = list(by_year.values())
        expected = max(by_year, key=by_year.__getitem__) if len(values) == 2 else str(values[0])
        assert case.answers == (expected,)


def _without_header(chunk: str, text: str) -> str:
    """Without the repeated header of a table that began in another chunk."""
    lines = chunk.split("\n")
    tails = ("\n".join(lines[i:]) for i in range(len(lines)))
    return next(tail for tail in tails if tail in text)


def test_a_long_document_is_cut_in_order():
    pages = [page.read_text("utf-8").strip() for page in sorted(handbook_path().glob("*.md"))]
    text = "\n\n".join(pages)
    for case in made("long").cases:
        own = [_without_header(chunk, text) for chunk in case.chunks]
        starts = [text.index(chunk) for chunk in own]
        assert starts == sorted(starts)
        between = text[starts[0] : starts[-1]]
        assert " ".join(own[:-1]).split() == between.split()  # nothing is left out
        assert case.answers[0].startswith(case.chunks[0].split(". ")[0])
    assert made("long").metric == "rouge_l"


def test_every_turn_of_a_chat_has_the_document_that_answers_it():
    cases = made("chat", n_cases=6, n_chunks=6).cases
    assert {case.kind for case in cases} == {"latest", "earlier"}
    for case in cases:
        turns = ["\n".join(part) for part in spread(case.chunks, 3)]
        assert all(answer in text for (_, answer), text in zip(case.history, turns, strict=False))
        assert case.answers[0] in turns[0 if case.kind == "earlier" else 2]
        assert len({case.question, *(question for question, _ in case.history)}) == 3


@pytest.mark.parametrize("name", TASKS)
def test_every_chunk_of_a_task_is_loaded(name):
    ways = make_ways(["reuse"], [], [], [True])
    data = make_task(name, TOKENS, 1, 1, 3, 256)
    *_, reuse = Arena(lab.adapter(), data, ways, max_new_tokens=2).run()
    assert (reuse.policy, reuse.charged_ratio, reuse.n_chunks) == ("reuse", 0.0, 3)
    assert reuse.token_kl > 0.0  # type: ignore[operator]


def test_more_cases_than_the_texts_give_are_one_sentence():
    with pytest.raises(InvalidInputError, match=r"1 cases of 400 chunks .* take fewer --contexts"):
        made("chat", 1, 400)
    with pytest.raises(InvalidInputError, match=r"are more than the \d+ that the texts of long"):
        made("long", 500)
