"""Records of questions: JSON lists or JSON lines of ``{question, ctxs: [{title, text}, …]}`` and the like."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from blendrag.errors import InvalidInputError
from blendrag.store import regular_files
from blendrag.text.json_records import Record

#: Size limit of a file.
MAX_BYTES = 4096 * regular_files.MIB


def read_text(path: Path, expected: str) -> str:
    """Raises :class:`InvalidInputError`, which says what was ``expected``."""
    try:
        # utf-8-sig: Windows editors begin files with a mark.
        return regular_files.read_text(path, MAX_BYTES, follow=True, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidInputError(f"{path} cannot be read ({reason}); expected {expected}") from exc


def passages_of(record: Record, where: str) -> list[tuple[str, str]]:
    """Title, which may be empty, and text of each passage in ``ctxs``."""
    passages = record.get("ctxs")
    if not isinstance(passages, list) or not passages:
        raise InvalidInputError(
            f"{where} has an empty chunk list, expected ctxs: [{{title, text}}, …]; leave it out"
        )
    found = []
    for passage in passages:
        given = {"text": passage} if isinstance(passage, str) else passage
        if not isinstance(given, Mapping) or not isinstance(given.get("text"), str):
            raise InvalidInputError(f"{where} has a passage without text, expected {{title, text}}")
        found.append((str(given.get("title") or "").strip(), given["text"]))
    return found


def passage_texts(record: Record, where: str) -> list[str]:
    """Each passage in ``ctxs`` under its title, as prompts have it."""
    named = passages_of(record, where)
    return [f"{title}\n{text}" if title else text for title, text in named]
