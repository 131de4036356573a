"""Limits of what names a document: source, id, title and metadata.

Names go into prompts, lists and errors, so a long one is refused where it is given. A title that a reader
found in a file is cut.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blendrag.errors import InvalidInputError
from blendrag.wording import quoted

#: A path of the longest that systems open, or a URL.
MAX_SOURCE_CHARS = 4096
MAX_TITLE_CHARS = 1024
#: Bytes of metadata as JSON.
MAX_METADATA_BYTES = 1024**2
#: Characters of an id in a file of JSON lines, which becomes a part of a source.
MAX_ID_CHARS = 1024
#: Characters of a name where it is shown. A file's name has at most 255 bytes.
MAX_SHOWN_CHARS = 256


def check_name(name: str, text: str, limit_chars: int = MAX_SOURCE_CHARS) -> None:
    """Raise :class:`InvalidInputError` if ``text``, which the caller knows as ``name``, is too long."""
    if len(text) > limit_chars:
        raise InvalidInputError(
            f"{name} has {len(text):,} characters ({quoted(text)}), expected at most {limit_chars:,}; "
            "shorten it, and put long text into the document"
        )


def check_metadata(name: str, metadata: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidInputError` if ``metadata``, which holds JSON values, is too long."""
    try:
        size_bytes = len(json.dumps(dict(metadata)))
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInputError(
            f"{name} is not JSON ({quoted(str(exc))}); expected text, numbers and truth values"
        ) from exc
    if size_bytes > MAX_METADATA_BYTES:
        raise InvalidInputError(
            f"{name} takes {size_bytes:,} bytes as JSON, expected at most {MAX_METADATA_BYTES:,}; leave "
            "out what no search needs, or put it into the text"
        )


def cut_title(title: str) -> str:
    """A title that a reader found in a file, on one line."""
    return _cut(title, MAX_TITLE_CHARS)


def short_name(name: str) -> str:
    """A name for prompts and messages: on one line, and short enough for any context."""
    return _cut(name, MAX_SHOWN_CHARS)


def _cut(text: str, limit_chars: int) -> str:
    """In one line; beginning and end of a long text with an ellipsis between."""
    if len(text) > limit_chars:
        kept = limit_chars - 1
        text = f"{text[: kept - kept // 3]}…{text[-(kept // 3) :]}"
    return " ".join(text.split())


def page_label(first: int | None, last: int | None) -> str:
    """The page or pages of a passage, as frameworks name them: ``3``, ``3–4``; empty if ``first`` is none."""
    return str(first or "") if last in (None, first) else f"{first}–{last}"
