"""The passages that a filter selects: a :class:`Filter` as SQL over the documents' metadata."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from blendrag.corpus.database import CorpusFile, entry_of
from blendrag.corpus.filters import (
    KNOWN_FIELDS,
    OF_TEXTS,
    ORDERED,
    PAGE_FIELDS,
    Comparison,
    FieldValue,
    Filter,
    Joined,
    matches,
    wrong,
)
from blendrag.option import did_you_mean, near_names
from blendrag.text.names import page_label
from blendrag.text.readers import PAGE_STARTS, page_at
from blendrag.wording import quoted

#: Selections that are remembered while the corpus does not change.
_REMEMBERED = 32
#: Most names of fields that a message lists.
_LISTED_FIELDS = 12

#: JSON types of values, by what a message calls them.
_KINDS = {
    "texts": ("text",),
    "numbers": ("integer", "real"),
    "truth values": ("true", "false"),
}
#: Documents with metadata that SQLite can read; Python writes NaN, which is no JSON.
_DOCUMENTS = (
    "(SELECT id, source, title, CASE WHEN json_valid(metadata) THEN metadata "
    "ELSE blendrag_json(CAST(metadata AS BLOB)) END AS metadata FROM document)"
)


class Selections:
    """The passages of one corpus that filters select. Safe for use from several threads."""

    def __init__(self, file: CorpusFile) -> None:
        self._file = file
        self._known: OrderedDict[str, tuple[int, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()
        with file.lock:
            for name, function in _FUNCTIONS.items():
                file.connection.create_function(
                    f"blendrag_{name}", -1, function, deterministic=True
                )

    def passages(self, chosen: Filter) -> np.ndarray:
        """Ids of the passages of all documents that the filter selects, int64, ascending.

        Raises :class:`InvalidOptionError` for a field that no document has, and for one that is compared
        with a value of another type than any document's.
        """
        generation, name = self._file.generation(), repr(chosen)  # 1 and True are equal
        with self._lock:
            remembered = self._known.get(name)
            if remembered is not None and remembered[0] == generation:
                self._known.move_to_end(name)
                return remembered[1]
        for comparison in chosen.comparisons():
            self._check(comparison)
        statement = _Statement()
        condition = f"{_DOCUMENTS} AS d WHERE {statement.holds(chosen)}"
        where = f"document IN (SELECT d.id FROM {condition})"
        if any(comparison.key in PAGE_FIELDS for comparison in chosen.comparisons()):
            where = f"EXISTS (SELECT 1 FROM {condition} AND d.id = passage.document)"
        rows = self._file.rows(
            f"SELECT id FROM passage WHERE {where} ORDER BY id", *statement.parameters
        )
        found = np.fromiter((passage for (passage,) in rows), np.int64, len(rows))
        with self._lock:
            self._known[name] = generation, found
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return found

    def _check(self, comparison: Comparison) -> None:
        """Raise unless some document has the field with a value of a type that it is compared with."""
        kinds = dict.fromkeys(map(_kind_of, comparison.values))
        known = self._known_kind(comparison.key)
        if not kinds or known in kinds:
            return
        statement = _Statement()
        types = [each for kind in kinds for each in _KINDS[kind]]
        fits = statement.any_own(comparison.key, lambda _, kind: f"{kind} IN {_literals(types)}")
        if self._file.rows(
            f"SELECT 1 FROM {_DOCUMENTS} AS d WHERE {fits} LIMIT 1", *statement.parameters
        ):
            return
        held = self._kinds_held(comparison.key)
        if not held:
            raise self._unknown_field(comparison.key)
        value = comparison.values[-1]
        remedy = "give a value of that type"
        if comparison.type in OF_TEXTS:
            remedy = f"compare it otherwise than with {comparison.sign}, which is for texts"
        raise wrong(
            f"compares the field {quoted(comparison.key, 40)} with {quoted(value, 40)}, but it holds "
            f"{' and '.join(held)}; {remedy}"
        )

    def _known_kind(self, key: str) -> str:
        """The kind of what is known under a name without metadata; empty if nothing is."""
        if key in PAGE_FIELDS and self._has_pages():
            return "numbers" if key == "page" else "texts"
        return "texts" if key in KNOWN_FIELDS else ""

    def _has_pages(self) -> bool:
        paged = "EXISTS (SELECT 1 FROM json_each(d.metadata) AS f WHERE f.key = ?)"
        return bool(
            self._file.rows(f"SELECT 1 FROM {_DOCUMENTS} AS d WHERE {paged} LIMIT 1", PAGE_STARTS)
        )

    def _kinds_held(self, key: str) -> list[str]:
        element = "SELECT DISTINCT CASE f.type WHEN 'array' THEN e.type ELSE f.type END"
        rows = self._file.rows(
            f"{element} FROM {_DOCUMENTS} AS d, json_each(d.metadata) AS f "
            "LEFT JOIN json_each(CASE f.type WHEN 'array' THEN f.value ELSE '[]' END) AS e "
            "WHERE f.key = ?",
            key,
        )
        types = {kind for (kind,) in rows}
        known = self._known_kind(key)
        names = [name for name, of in _KINDS.items() if types.intersection(of) or name == known]
        return names or ["no values that can be compared"] * bool(types)

    def _unknown_field(self, key: str) -> Exception:
        rows = self._file.rows(
            f"SELECT f.key, count(*) FROM {_DOCUMENTS} AS d, json_each(d.metadata) AS f "
            "WHERE typeof(f.key) = 'text' GROUP BY f.key ORDER BY count(*) DESC LIMIT 1000"
        )
        own = [name for name, _ in rows if not name.startswith("_")]
        pages = PAGE_FIELDS[:1] if self._has_pages() else ()
        known = dict.fromkeys([*own[:_LISTED_FIELDS], *KNOWN_FIELDS, *pages])
        meant = did_you_mean(
            near_names([key], [*own, *KNOWN_FIELDS, *pages]),
            f"expected one of {', '.join(quoted(name, 40)[1:-1] for name in known)}",
        )
        return wrong(f"names the field {quoted(key, 40)}, which no document has; {meant}")


#: From SQL of a value and of its JSON type to a condition.
_Test = Callable[[str, str], str]


class _Statement:
    """Conditions on a row ``d`` of :data:`_DOCUMENTS`, and their parameters."""

    def __init__(self) -> None:
        self.parameters: list[Any] = []

    def mark(self, value: Any) -> str:
        """The numbered mark of a parameter, which may be used more than once."""
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            value = float(value)  # as SQLite reads such a number in JSON
        self.parameters.append(value)
        return f"?{len(self.parameters)}"

    def holds(self, chosen: Filter) -> str:
        if isinstance(chosen, Joined):
            word = " AND " if chosen.type == "and" else " OR "
            joined = f"({word.join(map(self.holds, chosen.filters))})"
            return f"NOT {joined}" if chosen.type == "not" else joined
        assert isinstance(chosen, Comparison)
        if chosen.type == "is_empty":
            return f"NOT {self.any_value(chosen.key, _is_filled)}"
        marks: dict[str, list[str]] = {}
        for value in chosen.values:
            marks.setdefault(_kind_of(value), []).append(self.mark(value))

        def compared(type: str, value: str, of: str) -> str:
            as_text = _TESTS[type](value, marks[of])
            if of != "texts" or type not in ORDERED or "numbers" not in marks:
                return as_text
            # the value is written as a text and may be a number: so may the text in the metadata
            number = f"blendrag_number(CAST({value} AS BLOB))"
            as_number = _TESTS[type](number, marks["numbers"])
            return f"CASE WHEN {number} IS NULL THEN {as_text} ELSE {as_number} END"

        def test(type: str, value: str, kind: str) -> str:
            tests = (
                f"({kind} IN {_literals(_KINDS[of])} AND {compared(type, value, of)})"
                for of in marks
            )
            return f"({' OR '.join(tests) or '0'})"

        of_elements = "eq" if chosen.type == "contains" else chosen.type
        return self.any_value(chosen.key, partial(test, chosen.type), partial(test, of_elements))

    def any_value(self, key: str, test: _Test, of_elements: _Test | None = None) -> str:
        """Whether a field's value passes ``test``: the one of its metadata, an element of that, or the one
        that is known without metadata."""
        own = self.any_own(key, test, of_elements)
        if key in KNOWN_FIELDS:
            value = f"blendrag_known({key!r}, CAST(d.source AS BLOB), CAST(d.title AS BLOB))"
            return f"({own} OR {test(value, _TEXT)})"
        if key in PAGE_FIELDS:
            place = "passage.start, passage.end"
            pages = f"blendrag_pages({key!r}, CAST({_PAGE_STARTS} AS BLOB), {place})"
            passes = test("p.value", "p.type")
            return f"({own} OR EXISTS (SELECT 1 FROM json_each({pages}) AS p WHERE {passes}))"
        return own

    def any_own(self, key: str, test: _Test, of_elements: _Test | None = None) -> str:
        """Whether a value of the metadata, or an element of it, passes ``test``."""
        return (
            f"EXISTS (SELECT 1 FROM json_each(d.metadata) AS f WHERE f.key = {self.mark(key)} AND "
            f"({test('f.value', 'f.type')} OR (f.type = 'array' AND EXISTS (SELECT 1 FROM "
            f"json_each(f.value) AS e WHERE {(of_elements or test)('e.value', 'e.type')}))))"
        )


_TEXT = "'text'"
_PAGE_STARTS = f"(SELECT f.value FROM json_each(d.metadata) AS f WHERE f.key = {PAGE_STARTS!r})"


def _is_filled(value: str, kind: str) -> str:
    return f"({kind} NOT IN ('null', 'array') AND NOT ({kind} = 'text' AND {value} = ''))"


def _literals(words: Iterable[str]) -> str:
    return f"({', '.join(map(repr, words))})"


def _kind_of(value: FieldValue) -> str:
    if isinstance(value, bool):
        return "truth values"
    return "texts" if isinstance(value, str) else "numbers"


def _ordered(sign: str) -> Callable[[str, list[str]], str]:
    return lambda value, marks: f"{value} {sign} {marks[0]}"


#: From SQL of a value and the marks of what it is compared with to a condition. JSON's truth values are
#: 0 and 1.
_TESTS: dict[str, Callable[[str, list[str]], str]] = {
    "eq": lambda value, marks: f"{value} IN ({', '.join(marks)})",
    "gt": _ordered(">"),
    "gte": _ordered(">="),
    "lt": _ordered("<"),
    "lte": _ordered("<="),
    "contains": lambda value, marks: f"instr({value}, {marks[0]}) > 0",
    "icontains": lambda value, marks: f"blendrag_icontains(CAST({value} AS BLOB), {marks[0]})",
    "glob": lambda value, marks: f"blendrag_glob(CAST({value} AS BLOB), {marks[0]})",
}


# -- functions of the connection, which never fail --------------------------------------------------


def _text(data: Any) -> str:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else ""


def _json(metadata: bytes) -> str:
    """The comparable values of metadata that SQLite does not take for JSON, as JSON."""
    try:
        given = json.loads(metadata)
        items = given.items()
    except (ValueError, RecursionError, AttributeError):
        return "{}"
    return json.dumps({key: value for key, value in items if _is_comparable(value)})


def _is_comparable(value: Any) -> bool:
    if isinstance(value, list):
        return all(not isinstance(each, list) and _is_comparable(each) for each in value)
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _known(field: str, source: Any, title: Any) -> str:
    """A field of :data:`KNOWN_FIELDS`."""
    stored = _text(source)
    entry, shown = entry_of(stored)
    if field == "title":  # LlamaIndex's entries have all their metadata in their title
        return _text(title) if entry is None else ""
    if field == "source":
        return shown
    folder, _, name = shown.partition("#")[0].rpartition("/")
    if field == "extension":
        stem, dot, suffix = name.rpartition(".")
        return f"{dot}{suffix}".lower() if stem else ""
    return name if field == "file_name" else folder


def _pages(field: str, starts: Any, start: Any, end: Any) -> str:
    """A field of :data:`PAGE_FIELDS` as a JSON list: each page of a passage, and what its label says."""
    if not (isinstance(start, int) and isinstance(end, int)):
        return "[]"
    first, last = (page_at(_text(starts), place) for place in (start, max(start, end - 1)))
    pages: list[int | str] = [] if first is None else [*range(first, 1 + (last or first))]
    if field == "page":
        return json.dumps(pages)
    return json.dumps([*map(str, pages), *[page_label(first, last)] * (len(pages) > 1)])


def _number(value: Any) -> float | None:
    """A text as a number; ``None`` if it is none."""
    try:
        number = float(_text(value))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "json": _json,
    "number": _number,
    "known": _known,
    "pages": _pages,
    "icontains": lambda value, part: part.casefold() in _text(value).casefold(),
    "glob": lambda value, pattern: matches(pattern, _text(value)),
}
