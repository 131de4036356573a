"""A filter is read from JSON or text, refuses what it cannot compare, and selects passages in SQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.documents import Entry, NewEntry, stored_chunks
from blendrag.corpus.filters import MAX_COMPARISONS, MAX_DEPTH, Filter, matches
from blendrag.errors import InvalidInputError, InvalidOptionError
from blendrag.text.readers import Document
from corpus.small_corpus import MANIFEST, chunk_of, vector_of

DOCUMENTS: dict[str, dict[str, Any]] = {
    "reports/2023/costs.pdf": {"year": 2023, "author": "Kim", "tags": ["money", "2023"]},
    "/data/reports/plan.md": {
        "year": 2024.5,
        "author": "Lee",
        "draft": True,
        "Größe": "groß",
        "_date": "2024-05-01",
    },
    "notes/Old plan [1].md": {"year": "2023", "draft": False, "gap": None},
    "people.jsonl#7": {"source": "crm", "year": 2025, 'a"b\\c': 1, "bad": float("nan")},
    "empty.txt": {"tags": [], "author": "", "_date": "2023-12-31"},
}
ENTRY = Entry("e1", "a text added by id", {"source": "https://x.org/a/page.html", "year": 1})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    with Corpus.open(tmp_path_factory.mktemp("corpus"), create=True) as corpus:
        corpus.begin(MANIFEST)
        for source, metadata in DOCUMENTS.items():
            add(corpus, source, metadata)
        entry = NewEntry(ENTRY, chunk_of(ENTRY.text), "digest", vector_of(ENTRY.text))
        corpus.entries.put([entry])
        yield corpus


def add(corpus: Corpus, source: str, metadata: dict[str, Any]) -> None:
    chunks = [chunk_of(f"text {n} of {source}", n) for n in range(2)]
    vectors = np.stack([vector_of(chunk.text) for chunk in chunks])
    corpus.put_document(Document(source, "", f"About {source}", metadata), "d", chunks, vectors)


def selected(corpus: Corpus, chosen: Filter) -> set[str]:
    """The first names of the sources whose passages are selected, each with all its passages."""
    ids = corpus.selections.passages(chosen).tolist()
    assert ids == sorted(ids)
    marks = ", ".join(map(str, ids))
    chunks = [*stored_chunks(corpus.file, f"WHERE passage.id IN ({marks})")]
    assert all(
        sum(c.source == each.source for c in chunks) == (1 if each.entry_id else 2)
        for each in chunks
    )
    return {each.source.rpartition("/")[2].partition(".")[0] for each in chunks}


@pytest.mark.parametrize(
    ("type", "key", "value", "found"),
    [
        ("eq", "year", 2023, "costs"),
        ("eq", "year", "2023", "Old plan [1]"),
        ("eq", "draft", True, "plan"),
        ("eq", "draft", False, "Old plan [1]"),
        ("eq", "tags", "money", "costs"),  # an element of a list
        ("eq", "Größe", "groß", "plan"),  # stored escaped
        ("eq", 'a"b\\c', 1, "people"),  # metadata with NaN, which is no JSON
        ("ne", "author", "Kim", "plan, Old plan [1], people, empty, page"),
        ("gt", "year", 2023, "plan, people"),
        ("gte", "year", 2023, "costs, plan, people"),
        ("lt", "year", 2023, "page"),
        ("lte", "author", "Kim", "costs, empty"),
        ("in", "author", ["Kim", "Lee"], "costs, plan"),
        ("in", "author", ["Kim", 7], "costs"),
        ("nin", "year", [2023, 2025, 1], "plan, Old plan [1], empty"),
        ("contains", "tags", "money", "costs"),
        ("contains", "tags", "mon", ""),
        ("contains", "author", "e", "plan"),
        ("icontains", "Größe", "GROSS", "plan"),
        ("glob", "source", "*.md", "plan, Old plan [1]"),
        ("is_empty", "author", None, "Old plan [1], people, empty, page"),
        ("is_empty", "tags", None, "plan, Old plan [1], people, empty, page"),
        ("is_empty", "gap", None, "costs, plan, Old plan [1], people, empty, page"),
        # known without metadata
        ("eq", "source", "people.jsonl#7", "people"),
        ("eq", "source", "crm", "people"),
        ("eq", "file_name", "costs.pdf", "costs"),
        ("eq", "folder", "reports/2023", "costs"),
        ("eq", "extension", ".jsonl", "people"),
        ("in", "extension", [".pdf", ".html"], "costs, page"),
        ("contains", "title", "plan", "plan, Old plan [1]"),
    ],
)  # fmt: skip
def test_a_comparison_selects_all_passages_of_documents(
    corpus: Corpus, type: str, key: str, value: Any, found: str
) -> None:
    chosen = Filter.parse({"type": type, "key": key, "value": value})
    assert selected(corpus, chosen) == {*filter(None, found.split(", "))}


def test_filters_are_joined_by_and_or_and_not(corpus: Corpus) -> None:
    late = {"type": "gte", "key": "year", "value": 2024}
    drafts = {"type": "eq", "key": "draft", "value": True}
    either = {"type": "or", "filters": [late, {"type": "glob", "key": "source", "value": "*.txt"}]}
    nested = {"type": "and", "filters": [either, {"type": "not", "filters": [drafts]}]}
    assert selected(corpus, Filter.parse(either)) == {"plan", "people", "empty"}
    assert selected(corpus, Filter.parse(nested)) == {"people", "empty"}
    parts = Filter.parse(late), Filter.parse(drafts), Filter.only("*.txt")
    assert selected(corpus, (parts[0] | parts[2]) & ~parts[1]) == {"people", "empty"}


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        (["year=2023"], "costs, Old plan [1]"),  # a number or a text
        (["year != 2023"], "plan, people, empty, page"),
        (["year>=2024", "author=Lee"], "plan"),
        (["draft=true"], "plan"),
        (["title~OLD"], "Old plan [1]"),
        (["author<L"], "costs, empty"),
        (["year>300"], "costs, plan, Old plan [1], people"),  # a text that is a number, too
        (["year<300"], "page"),
        (["_date>2024"], "plan"),  # no number
        (['{"type": "eq", "key": "author", "value": "Kim"}'], "costs"),
    ],
)
def test_a_condition_is_written_as_a_text(
    corpus: Corpus, conditions: list[str], found: str
) -> None:
    assert selected(corpus, Filter.where(*conditions)) == {*found.split(", ")}


@pytest.mark.parametrize(
    ("pattern", "source", "is_match"),
    [
        ("*.pdf", "/a/b/x.pdf", True), ("docs/*.md", "docs/a.md", True),
        ("docs/*.md", "/home/docs/a.md", True), ("docs/*.md", "/home/docs/s/a.md", False),
        ("docs/**", "/home/docs/s/a.md", True), ("docs/", "/home/docs/s/a.md", True),
        ("docs", "/home/docs/s/a.md", True), ("/home/docs/*.md", "/home/docs/a.md", True),
        ("/docs/*.md", "/home/docs/a.md", False), ("/docs/*.md", "docs/a.md", False),
        ("../d/*.md", "../d/a.md", True), ("./x/*.md", "x/a.md", True), ("a.md/", "x/a.md", False),
        ("**/b/**/c.md", "a/b/c.md", True), ("b/**/c.md", "a/b/d/e/c.md", True),
        ("b/**/c.md", "a/b/d/e/f", False), ("*.jsonl", "/a/r.jsonl#12", True),
        ("a [1].pdf", "/x/a [1].pdf", True), ("[", "x/[", True), ("a\\", "x", False),
        ("https://x.org/*", "https://x.org/a.html", True), ("!a.md", "x/!a.md", True),
        ("*a" * 300 + "b", "a" * 4000, False),  # at once
    ],
)  # fmt: skip
def test_patterns_match_names_folders_and_records(
    pattern: str, source: str, is_match: bool
) -> None:
    assert matches(pattern, source) == is_match


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["a"], "is a list, expected an object"),
        ({"type": "eqq", "key": "a", "value": 1}, "has the type 'eqq'; did you mean eq"),
        ({"key": "a", "value": 1}, "has no type; expected one of eq, ne"),
        ({"type": "eq", "key": "a"}, "of type eq has 'key', expected key and value"),
        ({"type": "and", "key": "a"}, "of type and has 'key', expected filters"),
        ({"type": "and", "filters": {}}, "expected a list of filters"),
        ({"type": "or", "filters": []}, "joins no filters"),
        ({"type": "eq", "key": 3, "value": 1}, "has the key 3, expected the name of a field"),
        ({"type": "eq", "key": "a", "value": None}, "compares with None, .* is_empty finds"),
        ({"type": "eq", "key": "a", "value": {}}, "expected a text or a number, true or false"),
        ({"type": "gt", "key": "a", "value": True}, "with True, expected a text or a number"),
        ({"type": "gt", "key": "a", "value": float("nan")}, "compares with nan"),
        ({"type": "in", "key": "a", "value": "ab"}, "expected a list of values"),
        ({"type": "glob", "key": "source", "value": 3}, "compares with 3, expected a text"),
        ({"type": "glob", "key": "source", "value": "/"}, "is no pattern"),
        ({"type": "eq", "key": "a", "value": "\ud800"}, "lone surrogate"),
    ],
)
def test_a_malformed_filter_is_one_clear_sentence(given: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says) as raised:
        Filter.parse(given)
    assert tiny.one_sentence(str(raised.value))


def test_an_endless_filter_is_refused() -> None:
    one: dict[str, Any] = {"type": "eq", "key": "a", "value": 1}
    deep = one
    for _ in range(MAX_DEPTH):
        deep = {"type": "not", "filters": [deep]}
    with pytest.raises(InvalidOptionError, match=f"nests more than {MAX_DEPTH} deep"):
        Filter.parse(deep)
    with pytest.raises(InvalidOptionError, match="201 comparisons with 201 values"):
        Filter.parse({"type": "or", "filters": [one] * (MAX_COMPARISONS + 1)})


@pytest.mark.parametrize("text", ["", "year", "=3", "year=", "{year: 3}"])
def test_a_text_that_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"no condition, expected FIELD|valid JSON"):
        Filter.where(text)


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("yaer=3", "names the field 'yaer', which no document has; did you mean year"),
        ("colour!=red", "which no document has; expected one of year, .*file_name"),
        ("draft~true", "but it holds truth values; compare it otherwise than with ~, which is for"),
        ("draft=maybe", "the field 'draft' with 'maybe', but it holds truth values"),
        ("tags>3", None),  # tags has texts, to which 3 is compared as one
        ('{"type": "gt", "key": "author", "value": 3}', "'author' with 3, but it holds texts"),
        ('{"type": "eq", "key": "folder", "value": 3}', "'folder' with 3, but it holds texts"),
        ('{"type": "eq", "key": "gap", "value": 3}', "but it holds no values that can be compared"),
        ('{"type": "eq", "key": "year", "value": true}', "but it holds texts and numbers"),
    ],
)
def test_a_field_that_no_document_can_be_compared_by_is_refused(
    corpus: Corpus, condition: str, says: str | None
) -> None:
    if says is None:
        corpus.selections.passages(Filter.where(condition))
        return
    with pytest.raises(InvalidOptionError, match=says) as raised:
        corpus.selections.passages(Filter.where(condition))
    assert tiny.one_sentence(str(raised.value))


def test_a_selection_follows_changes_of_the_corpus(tmp_path: Path) -> None:
    chosen = Filter.where("year>2000")
    with Corpus.open(tmp_path, create=True) as corpus:
        corpus.begin(MANIFEST)
        add(corpus, "a.txt", {"year": 2001})
        assert len(corpus.selections.passages(chosen)) == 2
        with Corpus.open(tmp_path) as other:
            add(other, "b.txt", {"year": 2002})
        assert len(corpus.selections.passages(chosen)) == 4
        assert corpus.selections.passages(chosen) is corpus.selections.passages(chosen)
        corpus.remove_source("a.txt")
        assert len(corpus.selections.passages(chosen)) == 2


def test_many_comparisons_and_large_numbers_are_selected(corpus: Corpus) -> None:
    years = Filter.parse({"type": "in", "key": "year", "value": [*range(-5000, 4000)]})
    assert selected(corpus, years) == {"costs", "people", "page"}
    chosen = Filter.where("year=2023")
    for _ in range(MAX_COMPARISONS - 1):
        chosen = chosen & Filter.where("year=2023")
    assert selected(corpus, chosen) == {"costs", "Old plan [1]"}
    assert selected(corpus, Filter.where(f"year<{10**30}")) >= {"costs", "plan"}


def test_damaged_metadata_is_in_no_selection_and_no_error(tmp_path: Path) -> None:
    with Corpus.open(tmp_path, create=True) as corpus:
        corpus.begin(MANIFEST)
        for name in "abc":
            add(corpus, name, {"year": 1})
        with corpus.file.writing() as connection:
            for name, metadata in (("a", "{"), ("b", "[" * 5000 + "]" * 5000)):
                connection.execute(
                    "UPDATE document SET metadata = ? WHERE source = ?", (metadata, name)
                )
            connection.execute("UPDATE document SET title = CAST(x'ff' AS TEXT)")
        assert len(corpus.selections.passages(Filter.where("year=1"))) == 2
        assert len(corpus.selections.passages(Filter.where("title~b"))) == 0
