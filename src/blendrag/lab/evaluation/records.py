"""A file of questions → its records, JSON objects by number.

Owns the two ways such a file is written, a JSON list and JSON lines, and where in it something is
wrong. Does not know what a record means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blendrag.errors import InvalidInputError
from blendrag.store import regular_files

Record = Mapping[str, Any]

#: Size limit of a dataset.
MAX_BYTES = 4096 * regular_files.MIB
FORMS = "{question, answers, ctxs} or {context, input, answers}"


def read_records(path: Path) -> list[Record]:
    """All records of ``path``.

    Raises :class:`InvalidInputError` for a file that cannot be read, a line that is no JSON and a record
    that is no object, each by its number.
    """
    try:
        text = regular_files.read_text(
            path, MAX_BYTES, follow=True, encoding="utf-8-sig"
        )  # Windows editors begin files with a mark
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidInputError(
            f"dataset {path} cannot be read ({reason}); expected synthetic, or a JSON or JSON lines "
            f"file of {FORMS}"
        ) from exc
    found = list(_list(text, path) if text.lstrip().startswith("[") else _lines(text, path))
    for number, record in enumerate(found, 1):
        if not isinstance(record, Mapping):
            raise InvalidInputError(
                f"record {number} of {path} is {_with_article(type(record).__name__)}, expected {FORMS}"
            )
    return found


def _list(text: str, path: Path) -> list[Any]:
    try:
        found: list[Any] = json.loads(text)
    except json.JSONDecodeError as exc:
        raise _no_json(path, exc.lineno, f"{exc.msg} at column {exc.colno}") from exc
    except (ValueError, RecursionError) as exc:  # a number or a nesting beyond what Python reads
        raise InvalidInputError(f"dataset {path} cannot be parsed ({exc}); mend it") from exc
    return found


def _lines(text: str, path: Path) -> Iterator[Any]:
    # Not splitlines: U+2028 and its like stand unescaped within the strings of many files.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as exc:
            if "{" not in text:
                raise InvalidInputError(
                    f"dataset {path} is plain text, expected a list or lines of {FORMS}, as answers are "
                    "compared with known ones; questions alone are for blendrag calibrate --questions"
                ) from exc
            raise _no_json(path, number, f"{exc.msg} at column {exc.colno}") from exc
        except (ValueError, RecursionError) as exc:
            raise _no_json(path, number, str(exc)) from exc


def _no_json(path: Path, line: int, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"line {line} of dataset {path} is no JSON ({reason}); expected one list, or one record a line, "
        f"of {FORMS}"
    )


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
