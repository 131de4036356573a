"""Filters in the forms that LangChain's users write, as a :class:`blendrag.engine.Filter`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.documents import Document

from blendrag.errors import InvalidInputError
from blendrag.option import refuse_unknown
from blendrag.wording import a_type

if TYPE_CHECKING:
    from blendrag.corpus.filters import Filter

#: By metadata: a value, a list of values, or operators as in Chroma and PGVector.
MetadataFilter: TypeAlias = "Filter | Mapping[str, Any]"
#: Or by a function of a document, which is slower.
AnyFilter: TypeAlias = "MetadataFilter | Callable[[Document], bool]"

#: The keys of a filter as blendrag writes it; its ``type`` tells it from metadata with such fields.
_OWN = ({"type", "filters"}, {"type", "key", "value"}, {"type", "key"})
#: Operators of MongoDB's form, and what blendrag calls them.
_OPERATORS = {
    **{f"${name}": name for name in ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "contains")},
    "$neq": "ne",  # as in LangChain's FAISS
    "$ilike": "icontains",
}  # fmt: skip
_JOINED = {"$and": "and", "$or": "or", "$not": "not"}


def filter_of(given: Any) -> Filter | None:
    """A filter by metadata; ``None`` if all documents pass. Raises :class:`InvalidInputError`."""
    from blendrag.corpus.filters import Filter

    if given is None or (isinstance(given, Mapping) and not given):
        return None
    if not isinstance(given, Filter | Mapping):
        raise InvalidInputError(
            f"filter is {a_type(given)}, expected metadata such as {{'source': 'a.txt'}}, "
            "{'year': {'$gte': 2024}} or a Filter"
        )
    return Filter.parse(given if isinstance(given, Filter) else _parsed(given))


def _parsed(given: Any) -> dict[str, Any]:
    """A mapping, of which all parts must hold, as blendrag writes it; one in that form stays as it is."""
    from blendrag.corpus.filters import TYPES

    if not isinstance(given, Mapping):
        raise InvalidInputError(
            f"filter has {a_type(given)} in place of metadata, expected {{'field': value}}"
        )
    if given.get("type") in TYPES and {*given} in _OWN:
        return dict(given)
    parts = [
        _joined(key, value) if str(key).startswith("$") else _compared(key, value)
        for key, value in given.items()
    ]
    return parts[0] if len(parts) == 1 else {"type": "and", "filters": parts}


def _joined(name: str, parts: Any) -> dict[str, Any]:
    refuse_unknown([name], _JOINED, "an operator that joins filters")
    is_list = isinstance(parts, Sequence) and not isinstance(parts, str)
    if name == "$not" and not is_list:
        parts = [parts]
    elif not is_list:
        raise InvalidInputError(f"filter {name} has {a_type(parts)}, expected a list of filters")
    return {"type": _JOINED[name], "filters": [_parsed(part) for part in parts]}


def _compared(key: str, wanted: Any) -> dict[str, Any]:
    """A field that has a value, one of a list, none (``None``), or what operators say."""
    if isinstance(wanted, Mapping):
        if not wanted:
            raise InvalidInputError(
                f"filter {key!r:.40} has no operators, expected a value or operators such as {{'$gte': 2024}}"
            )
        refuse_unknown(wanted, _OPERATORS, "an operator that compares")
        parts = [
            {"type": _OPERATORS[name], "key": key, "value": value} for name, value in wanted.items()
        ]
        return parts[0] if len(parts) == 1 else {"type": "and", "filters": parts}
    if wanted is None:
        return {"type": "is_empty", "key": key}
    if isinstance(wanted, list | tuple | set):
        return {"type": "in", "key": key, "value": [*wanted]}
    return {"type": "eq", "key": key, "value": wanted}
