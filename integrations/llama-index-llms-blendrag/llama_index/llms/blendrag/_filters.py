"""LlamaIndex's metadata filters as a :class:`blendrag.engine.Filter`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llama_index.core.vector_stores.types import FilterOperator, MetadataFilters

from blendrag.errors import InvalidInputError, InvalidOptionError
from blendrag.wording import a_type

if TYPE_CHECKING:
    from blendrag.corpus.filters import Filter

_TYPES = {
    FilterOperator.EQ: "eq",
    FilterOperator.NE: "ne",
    FilterOperator.GT: "gt",
    FilterOperator.GTE: "gte",
    FilterOperator.LT: "lt",
    FilterOperator.LTE: "lte",
    FilterOperator.IN: "in",
    FilterOperator.NIN: "nin",
    FilterOperator.CONTAINS: "contains",
    FilterOperator.TEXT_MATCH: "contains",
    FilterOperator.TEXT_MATCH_INSENSITIVE: "icontains",
    FilterOperator.IS_EMPTY: "is_empty",
}
#: Operators that compare with each value of a list.
_OF_EACH = {FilterOperator.ANY: "or", FilterOperator.ALL: "and"}


def filter_of(filters: MetadataFilters | None) -> Filter | None:
    """All operators and conditions of LlamaIndex, nested; ``None`` if all nodes pass."""
    if filters is None:
        return None
    if not isinstance(filters, MetadataFilters):
        raise InvalidInputError(
            f"filters is {a_type(filters)}, expected LlamaIndex's MetadataFilters"
        )
    from blendrag.corpus.filters import Filter

    parsed = _joined(filters)
    with naming_filters():
        return None if parsed is None else Filter.parse(parsed)


@contextmanager
def naming_filters() -> Iterator[None]:
    """Errors of a filter name ``filters``, as LlamaIndex calls it; also a decorator."""
    try:
        yield
    except InvalidOptionError as error:
        if error.name != "filter":
            raise
        raise error.called("filters") from error


def _joined(filters: MetadataFilters) -> dict[str, Any] | None:
    each = (_joined(f) if isinstance(f, MetadataFilters) else _compared(f) for f in filters.filters)
    parts = [part for part in each if part is not None]
    kind = filters.condition.value if filters.condition is not None else "and"
    return {"type": kind, "filters": parts} if parts else None


def _compared(one: Any) -> dict[str, Any]:
    """One ``MetadataFilter`` or ``ExactMatchFilter``."""
    operator = getattr(one, "operator", FilterOperator.EQ)
    if operator in _OF_EACH:
        if not isinstance(one.value, list) or not one.value:
            raise InvalidInputError(
                f"filter {one.key!r:.40} {operator.value} has {one.value!r:.40}, expected a list of values"
            )
        parts = [{"type": "contains", "key": one.key, "value": value} for value in one.value]
        return {"type": _OF_EACH[operator], "filters": parts}
    value = {} if operator == FilterOperator.IS_EMPTY else {"value": one.value}
    return {"type": _TYPES[operator], "key": one.key, **value}
