"""Which documents a search may find: comparisons of their fields, joined by and, or and not.

A field is what a document's metadata holds under that name. :data:`KNOWN_FIELDS` are known of every document
besides, and :data:`PAGE_FIELDS` of the passages of PDFs. A list is compared element by element: it equals a
value that it contains.

Filters are written as in OpenAI's file search (https://platform.openai.com/docs/guides/retrieval)::

    {"type": "and", "filters": [
        {"type": "glob", "key": "source", "value": "reports/*.pdf"},
        {"type": "gte", "key": "year", "value": 2024}]}

or as texts: ``Filter.only("reports/*.pdf") & Filter.where("year>=2024")``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from itertools import chain
from typing import Any

from blendrag.errors import InvalidOptionError, check_unicode
from blendrag.option import did_you_mean, is_number, near_names
from blendrag.wording import a_type, quoted

#: What is known of a document without any metadata.
KNOWN_FIELDS = ("source", "file_name", "folder", "extension", "title")
#: What is known of a passage of a PDF: its pages, as numbers and as the frameworks show them.
PAGE_FIELDS = ("page", "page_label")
#: Most values and comparisons of one filter, and how deep it may nest.
MAX_VALUES = 10_000
MAX_COMPARISONS = 200
MAX_DEPTH = 20
_TOO_DEEP = f"nests more than {MAX_DEPTH} deep; join fewer filters"

FieldValue = str | int | float | bool

#: Comparisons, and how a text spells those that it can.
_SPELLED = {"eq": "=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<=", "icontains": "~"}
#: Comparisons of texts alone.
OF_TEXTS = ("glob", "icontains")
ORDERED = ("gt", "gte", "lt", "lte")
#: Comparisons that deny another.
_DENIED = {"ne": "eq", "nin": "in"}
_JOINED = ("and", "or", "not")
TYPES = (
    "eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "contains", "icontains", "glob", "is_empty", *_JOINED
)  # fmt: skip
_WRITTEN = re.compile(r"\s*(.+?)\s*(!=|>=|<=|==|=|>|<|~)\s*(.*?)\s*", re.DOTALL)
_TYPE_OF = {written: name for name, written in _SPELLED.items()} | {"==": "eq", "!=": "ne"}


class Filter:
    """Which documents are searched; made by :meth:`parse`, :meth:`only` and :meth:`where`. Immutable.

    ``a & b``, ``a | b`` and ``~a`` are filters, too.
    """

    @staticmethod
    def parse(given: Filter | Mapping[str, Any]) -> Filter:
        """A filter as it is, or one written as JSON: ``{"type", "key", "value"}`` or ``{"type", "filters"}``.

        ``type`` is ``eq``, ``ne``, ``gt``, ``gte``, ``lt``, ``lte``; ``in``, ``nin`` (lists of values);
        ``contains`` (an element of a list, a part of a text), ``icontains`` (in any case), ``glob`` (a
        pattern as in ``.gitignore``), ``is_empty`` (no value); ``and``, ``or``, ``not`` (none of them).
        Raises :class:`InvalidOptionError`.
        """
        made = _parsed(given, MAX_DEPTH)
        _check_depth(made, MAX_DEPTH)
        comparisons = list(made.comparisons())
        values = sum(len(each.values) for each in comparisons)
        if len(comparisons) > MAX_COMPARISONS or values > MAX_VALUES:
            raise wrong(
                f"has {len(comparisons)} comparisons with {values} values, expected at most "
                f"{MAX_COMPARISONS} with {MAX_VALUES}; list values with type in, or search more than once"
            )
        return made

    @staticmethod
    def only(*patterns: str) -> Filter:
        """Documents whose source matches one of these patterns, as in ``.gitignore``.

        ``*.pdf`` is a name in any folder, ``reports/`` all below any folder of that name, and
        ``reports/*.pdf`` the files right in it. A name with special characters matches as it is, too.
        """
        return _joined("or", tuple(_comparison("glob", "source", each) for each in patterns))

    @staticmethod
    def where(*conditions: str) -> Filter:
        """Documents that meet all these: ``field=value``, with ``=``, ``!=``, ``>``, ``>=``, ``<``, ``<=``,
        or ``~`` for texts that contain the value in any case; or a filter as JSON.

        A value is compared as a number or a truth value, too, if it can be read as one; ``>`` and the like
        then compare a text that is a number as one, and other texts, such as dates, as texts.
        """
        return _joined("and", tuple(map(_written, conditions)))

    def comparisons(self) -> Iterator[Comparison]:
        """All comparisons in it."""
        raise NotImplementedError

    def __and__(self, other: Filter) -> Filter:
        return _joined("and", (self, other))

    def __or__(self, other: Filter) -> Filter:
        return _joined("or", (self, other))

    def __invert__(self) -> Filter:
        return Joined("not", (self,))


@dataclass(frozen=True)
class Comparison(Filter):
    """One field compared with a value, or with several of which one must fit."""

    type: str
    key: str
    values: tuple[FieldValue, ...] = ()

    def comparisons(self) -> Iterator[Comparison]:
        yield self

    def __str__(self) -> str:
        values = " or ".join(quoted(value, 40) for value in self.values[:3])
        more = " or …" if len(self.values) > 3 else ""
        return f"{quoted(self.key, 40)} {self.sign} {values}{more}".rstrip()

    @property
    def sign(self) -> str:
        """Its type, as ``--where`` spells it."""
        return _SPELLED.get(self.type, self.type)


@dataclass(frozen=True)
class Joined(Filter):
    """All (``and``), one (``or``) or none (``not``) of its filters hold."""

    type: str
    filters: tuple[Filter, ...]

    def comparisons(self) -> Iterator[Comparison]:
        for each in self.filters:
            yield from each.comparisons()

    def __str__(self) -> str:
        if self.type == "not":
            return f"not ({' or '.join(map(str, self.filters))})"
        return f" {self.type} ".join(
            f"({each})" if isinstance(each, Joined) and each.type != "not" else str(each)
            for each in self.filters
        )


#: A filter, or one written as JSON.
FilterLike = Filter | Mapping[str, Any]


def chosen(
    only: Sequence[str] | None, where: Sequence[str] | None, names: Sequence[str]
) -> Filter | None:
    """The filter of patterns, of which one must match, and conditions, all of which must hold, or ``None``.

    ``names``: what the caller calls the two. Raises :class:`InvalidOptionError`."""
    parts = []
    for name, texts, make in zip(names, (only, where), (Filter.only, Filter.where), strict=True):
        if texts:
            try:
                parts.append(Filter.parse(make(*texts)))
            except InvalidOptionError as error:
                raise error.called(name) from None
    return _joined("and", tuple(parts)) if parts else None


def nothing_found(chosen: FilterLike) -> InvalidOptionError:
    """The error for a question that finds no passage under its filter."""
    return wrong(
        f"({Filter.parse(chosen)}) leaves no passage that the question finds, expected at least one; widen it"
    )


def wrong(what: str) -> InvalidOptionError:
    """What is wrong with a filter; surfaces that call it otherwise rename the option."""
    return InvalidOptionError("filter", what)


# -- reading ----------------------------------------------------------------------------------------


def _parsed(given: Any, depth: int) -> Filter:
    if isinstance(given, Filter):
        return given
    if not isinstance(given, Mapping):
        raise wrong(
            f"{quoted(given, 60)} is {a_type(given)}, expected an object such as "
            '{"type": "eq", "key": "author", "value": "Kim"}'
        )
    if not depth:
        raise wrong(_TOO_DEEP)
    kind = given.get("type")
    if kind not in TYPES:
        near = near_names([kind], TYPES) if isinstance(kind, str) else []
        meant = did_you_mean(near, f"expected one of {', '.join(TYPES)}")
        raise wrong(
            f"has the type {quoted(kind, 40)}; {meant}"
            if "type" in given
            else f"has no type; {meant}"
        )
    needed = (
        ("filters",) if kind in _JOINED else ("key",) if kind == "is_empty" else ("key", "value")
    )
    if {*given} != {"type", *needed} and not (kind == "is_empty" and given.get("value") is None):
        names = ", ".join(quoted(name, 40) for name in given if name != "type") or "nothing else"
        raise wrong(f"of type {kind} has {names}, expected {' and '.join(needed)}")
    if kind not in _JOINED:
        return _comparison(kind, given["key"], given.get("value"))
    parts = given["filters"]
    if isinstance(parts, str | Mapping) or not isinstance(parts, Sequence):
        raise wrong(f"of type {kind} has filters {quoted(parts, 40)}, expected a list of filters")
    return _joined(kind, tuple(_parsed(each, depth - 1) for each in parts))


def _joined(kind: str, filters: tuple[Filter, ...]) -> Filter:
    if not filters:
        raise wrong(f"of type {kind} joins no filters, expected at least one; leave it out instead")
    if kind == "not":
        return Joined(kind, filters)
    own = (
        (each.filters if isinstance(each, Joined) and each.type == kind else (each,))
        for each in filters
    )
    flat = tuple(chain.from_iterable(own))
    return flat[0] if len(flat) == 1 else Joined(kind, flat)


def _check_depth(made: Filter, depth: int) -> None:
    if not depth:
        raise wrong(_TOO_DEEP)
    if isinstance(made, Joined):
        for each in made.filters:
            _check_depth(each, depth - 1)


def _comparison(kind: str, key: Any, value: Any) -> Filter:
    if not isinstance(key, str) or not key:
        raise wrong(f"has the key {quoted(key, 40)}, expected the name of a field")
    check_unicode(key, "the filter's key")
    if kind in _DENIED:
        return Joined("not", (_comparison(_DENIED[kind], key, value),))
    if kind == "is_empty":
        return Comparison(kind, key)
    if kind == "in":
        if isinstance(value, str | Mapping) or not isinstance(value, Sequence | set | frozenset):
            raise wrong(f"of {quoted(key, 40)} has {quoted(value, 40)}, expected a list of values")
        return Comparison("eq", key, tuple(_value(kind, key, each) for each in value))
    return Comparison(kind, key, (_value(kind, key, value),))


def _value(kind: str, key: str, value: Any) -> FieldValue:
    if isinstance(value, str):
        check_unicode(value, f"the filter's value for {quoted(key, 40)}")
    expected = "a text" if kind in OF_TEXTS else "a text or a number"
    fits = isinstance(value, str) or (
        kind not in OF_TEXTS
        and (is_number(value) or (isinstance(value, bool) and kind not in ORDERED))
    )
    if not fits:
        more = "; is_empty finds documents without a value" * (value is None)
        expected += ", true or false" * (kind not in OF_TEXTS and kind not in ORDERED)
        raise wrong(
            f"of {quoted(key, 40)} compares with {quoted(value, 40)}, expected {expected}{more}"
        )
    if kind == "glob" and not str(value).strip("/ "):
        raise wrong(
            f"{quoted(value)} is no pattern; expected one as in .gitignore, such as '*.pdf'"
        )
    return value


def _written(text: str) -> Filter:
    """A condition as a text."""
    if text.lstrip().startswith("{"):
        try:
            return Filter.parse(json.loads(text))
        except (json.JSONDecodeError, RecursionError) as exc:
            raise wrong(f"{quoted(text, 60)} is not valid JSON ({exc})") from None
    found = _WRITTEN.fullmatch(text)
    if found is None or not found[3]:
        raise wrong(
            f"{quoted(text, 60)} is no condition, expected FIELD=VALUE, or !=, >, >=, <, <= or ~ (contains) "
            "in place of ="
        )
    key, sign, value = found.groups()
    kind = _TYPE_OF[sign]
    compared = _comparison(_DENIED.get(kind, kind), key, value)
    assert isinstance(compared, Comparison)
    with suppress(ValueError, RecursionError, InvalidOptionError):  # then it is a text only
        other = _value(compared.type, key, json.loads(value))
        compared = Comparison(compared.type, key, (value, other))
    return Joined("not", (compared,)) if kind in _DENIED else compared


# -- patterns ---------------------------------------------------------------------------------------


def matches(pattern: str, source: str) -> bool:
    """Whether a source matches a pattern of :meth:`Filter.only`; a record of a file matches by its file."""
    path = source.partition("#")[0]
    if pattern in (source, path) or source.endswith(f"/{pattern}") or path.endswith(f"/{pattern}"):
        return True
    return _matches(pattern, source) or (path != source and _matches(pattern, path))


def _matches(pattern: str, path: str) -> bool:
    """In time that grows with the product of both lengths at most, as patterns come from clients."""
    parts, is_rooted, is_folder = _compiled(pattern)
    if is_rooted and not path.startswith("/"):
        return False
    names = [name for name in path.split("/") if name not in ("", ".")]
    reached = {0} if is_rooted else {*range(len(names))}
    for part in parts:
        if part is None:
            reached = {*range(min(reached, default=len(names)), len(names))}
        else:
            reached = {at + 1 for at in reached if at < len(names) and part.match(names[at])}
    return any(at < len(names) or not is_folder for at in reached)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> tuple[list[re.Pattern[str] | None], bool, bool]:
    """An expression for each name of a path (``None`` for ``**``), and whether the pattern begins at the root
    and stands for a folder."""
    names = pattern.removeprefix("./").split("/")
    is_folder = names[-1] in ("", "**")
    parts = [
        None if name == "**" else re.compile(translate(name))
        for name in (names[:-1] if is_folder else names)
        if name
    ]
    return parts, not names[0], is_folder
