"""Read files into documents: text of any kind, Markdown, HTML, JSON lines, PDF, DOCX and XLSX.

Text is known by its content (:mod:`blendrag.text.decoding`). A file that cannot be read
raises :class:`UnreadableDocumentError` with the reason, so that ingest can report it and continue.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blendrag.errors import InvalidInputError, UnreadableDocumentError, check_unicode
from blendrag.store import regular_files
from blendrag.store.identity import digest_fields
from blendrag.text import office_files
from blendrag.text.chunking import CHUNKING_REVISION
from blendrag.text.decoding import BEGINNING_BYTES, decoded
from blendrag.text.names import MAX_ID_CHARS, MAX_TITLE_CHARS, check_metadata, check_name, cut_title
from blendrag.text.outline import markdown_headings
from blendrag.text.tables import markdown_table

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

MetadataValue = str | int | float | bool | list[str | int | float | bool]
#: Metadata of what was read from a file: the day of its last change, in UTC, as ``2026-11-26``.
FILE_DATE = "file_date"

#: Size limit of a file, and of the documents in it.
MAX_FILE_BYTES = 1024 * regular_files.MIB
MAX_FILE_DOCUMENTS = 250_000
#: Size limit of a document's text: 15 times the Bible, 30,000 chunks of 512 tokens.
MAX_TEXT_CHARS = 64 * 1024**2
#: Depth of HTML. Tags that are never closed nest, as the paragraphs of old pages.
MAX_HTML_DEPTH = 100_000
_HTML = re.compile(r"\s*<(!doctype html|html)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Document:
    """One text and where it came from.

    ``source`` is the file's path with forward slashes; for JSON lines ``path#id`` or ``path#line``.
    """

    source: str
    text: str
    title: str
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)
    damage: str = ""
    """What of its file could not be read, for the report of an ingest; no part of the document."""


#: Metadata of a PDF: where each page begins in the text, as decimal numbers.
PAGE_STARTS = "_page_starts"


def page_at(starts: object, place: int) -> int | None:
    """The number of the page that holds a character, from 1. ``starts``: :data:`PAGE_STARTS` of its document,
    ``None`` without pages."""
    pages = _page_starts(starts) if isinstance(starts, str) else ()
    return bisect_right(pages, place) or None


@lru_cache(maxsize=4)
def _page_starts(starts: str) -> tuple[int, ...]:
    numbers = starts.split()
    return tuple(map(int, numbers)) if all(map(_DECIMAL.fullmatch, numbers)) else ()


_DECIMAL = re.compile(r"[0-9]{1,9}")


def check_document(document: Document) -> None:
    """Raise :class:`InvalidInputError` for a document that is too long or has too long a name."""
    for name in ("source", "title", "text"):
        check_unicode(getattr(document, name), f"its {name}")
    check_name("its source", document.source)
    check_name("its title", document.title, MAX_TITLE_CHARS)
    check_metadata("its metadata", document.metadata)
    if len(document.text) > MAX_TEXT_CHARS:
        raise InvalidInputError(
            f"it has {len(document.text):,} characters, expected at most {MAX_TEXT_CHARS:,}; split it "
            "into several documents"
        )


def digest_of(document: Document) -> str:
    """SHA-256 over text, title and metadata but the file's date, and how texts are cut. Re-ingest skips a
    document whose digest is unchanged."""
    counted = {name: value for name, value in document.metadata.items() if name != FILE_DATE}
    metadata = json.dumps(counted, sort_keys=True)
    cut = f"document, cut {CHUNKING_REVISION}"
    fields = (cut, document.title, document.text, metadata)
    return digest_fields(field.encode("utf-8", "surrogatepass") for field in fields)


class Opened(NamedTuple):
    """A file that was read but not parsed."""

    kind: str
    """``PDF``, ``DOCX``, ``XLSX``, or one of :data:`_READERS`."""
    work_bytes: int
    """What its reader goes through: the XML in a DOCX or XLSX, else the file."""
    documents: Iterator[Document]


def open_documents(path: Path) -> Opened:
    """One file, and its documents in order.

    Raises :class:`UnreadableDocumentError`, also while documents are read; for JSON lines only after all good
    lines. Hostile files take any time and memory: :mod:`blendrag.text.limited_reading` reads with limits.
    """
    data = _read_bytes(path)
    if kind := office_files.kind_of(path, data):
        work_bytes = office_files.work_bytes(path, kind, data)
        return Opened(kind, work_bytes, _checked(path, _read_office(path, kind, data)))
    text, damage = _text_of(path, data)
    kind = _KINDS.get(path.suffix.lower(), "HTML" if _HTML.match(text) else "text")
    return Opened(kind, len(data), _checked(path, _READERS[kind](path, text), damage))


def _checked(path: Path, documents: Iterator[Document], damage: str = "") -> Iterator[Document]:
    """The documents within the limits, with the file's date; the first carries the damage of the file."""
    dated: dict[str, MetadataValue] = {}
    with suppress(OSError, OverflowError, ValueError):  # it is gone, or its date is none
        dated[FILE_DATE] = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
    for number, document in enumerate(documents):
        if number == MAX_FILE_DOCUMENTS:
            raise UnreadableDocumentError(
                path,
                f"holds more than {MAX_FILE_DOCUMENTS:,} documents; split it into several files",
            )
        try:
            check_document(document)
        except InvalidInputError as bad:
            raise UnreadableDocumentError(path, f"is refused: {bad}") from bad
        metadata = {**dated, **document.metadata}
        yield replace(document, metadata=metadata, damage="" if number else damage)


def _read_office(path: Path, kind: str, data: bytes) -> Iterator[Document]:
    text, title, _, pages = office_files.read(path, kind, data)
    metadata = {PAGE_STARTS: " ".join(map(str, pages))} if pages else {}
    title = cut_title(title) or _stem_title(path)
    yield Document(path.as_posix(), _with_newlines(text), title, metadata)


def _read_bytes(path: Path) -> bytes:
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as exc:
        shown = str(path).encode("utf-8", "backslashreplace").decode("utf-8")
        raise UnreadableDocumentError(shown, "has a name that is not UTF-8; rename it") from exc
    try:
        return regular_files.read_bytes(path, MAX_FILE_BYTES, follow=True)
    except OSError as exc:
        raise UnreadableDocumentError(
            path, f"cannot be read ({exc.strerror or exc}); check that it exists and is readable"
        ) from exc


def _text_of(path: Path, data: bytes) -> tuple[str, str]:
    """The text with ``\\n`` line ends, and what of it is damaged."""
    found = None if office_files.is_unread(path, data) else decoded(data)
    if found is None:
        raise UnreadableDocumentError(path, "is binary, expected text; convert it to text first")
    text = _with_newlines(found.text)
    if not text.strip():
        raise UnreadableDocumentError(path, "is empty, expected text; remove it or fill it")
    return text, f"{path}: {found.damage}" * bool(found.damage)


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _stem_title(path: Path) -> str:
    return " ".join(path.stem.replace("-", " ").replace("_", " ").split())


def _read_plain(path: Path, text: str) -> Iterator[Document]:
    yield Document(path.as_posix(), text, _stem_title(path))


#: YAML before a text, as site generators and note programs write it.
_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)


def _read_markdown(path: Path, text: str) -> Iterator[Document]:
    metadata = _front_matter(text)
    heading = next(markdown_headings(text[:BEGINNING_BYTES]), None)
    title = str(metadata.pop("title", "")).strip() or (heading.label if heading is not None else "")
    yield Document(path.as_posix(), text, cut_title(title) or _stem_title(path), metadata)


def _front_matter(text: str) -> dict[str, MetadataValue]:
    """The fields of the YAML that begins a text; none if it is not YAML."""
    found = _FRONT_MATTER.match(text[:BEGINNING_BYTES])
    if found is None:
        return {}
    import yaml  # type: ignore[import-untyped]

    try:
        fields = yaml.safe_load(found[1])
        return _metadata(fields) if isinstance(fields, dict) else {}
    # a rule between paragraphs, a date that is none
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}


def _metadata(fields: Mapping[Any, Any]) -> dict[str, MetadataValue]:
    """Fields of a file as metadata: texts, numbers, truth values and lists of them, other values as JSON."""
    return {
        str(name): value if _is_metadata(value) else _as_json(value)
        for name, value in fields.items()
        if value is not None
    }


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, default=str).strip('"')
    except (TypeError, ValueError):  # YAML: a key that is a date, a value inside itself
        return str(value)


def _is_metadata(value: object) -> bool:
    each = value if isinstance(value, list) else [value]
    return all(isinstance(one, str | int | float | bool) for one in each)


_UNREAD_TAGS = ("script", "style", "noscript", "template", "head", "svg")
_BLOCK_NAMES = (
    "address article aside blockquote body dd details div dl dt fieldset figcaption figure "
    "footer form h1 h2 h3 h4 h5 h6 header hr li main nav ol p pre section summary table tr ul"
)
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})


#: Characters of a cell of a table, and columns that one may span.
MAX_CELL_CHARS = 500
_SPANS = frozenset(map(str, range(1, 101)))


def _read_html(path: Path, text: str) -> Iterator[Document]:
    from bs4 import BeautifulSoup

    class Shallow(BeautifulSoup):
        def pushTag(self, tag: Any) -> None:
            if len(self.tagStack) > MAX_HTML_DEPTH:
                raise UnreadableDocumentError(
                    path,
                    f"nests tags more than {MAX_HTML_DEPTH:,} deep; close them, or save it as text",
                )
            super().pushTag(tag)

    soup = Shallow(text, "html.parser")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    if not (body := _html_text(soup)):
        raise UnreadableDocumentError(path, "contains no text besides tags; leave it out")
    yield Document(path.as_posix(), body, cut_title(title) or _stem_title(path))


def _html_text(soup: BeautifulSoup) -> str:
    """Markdown in reading order, one blank line between blocks. In linear time."""
    lines = (line.rstrip(" ") for line in "".join(_html_pieces(soup)).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?m)^ (?! )", "", "\n".join(lines))).strip()


def _html_pieces(soup: BeautifulSoup) -> Iterator[str]:
    """Strings with what separates them. Walks the tree: methods of bs4 look through all ancestors."""
    inside: list[tuple[str, Iterator[Any]]] = [("", iter(soup.contents))]
    in_pre = in_heading = 0
    while inside:
        name, contents = inside[-1]
        for node in contents:
            kind, child = type(node).__name__, getattr(node, "name", None)
            if child == "br":
                yield " " if in_heading else "\n"
            elif child == "table" and (table := _html_table(node)):
                yield f"\n\n{table}\n\n"
            elif child is not None and child not in _UNREAD_TAGS:
                if child in _BLOCKS:
                    yield " " if in_heading else "\n\n"
                if child == "pre" and not in_pre and not in_heading:
                    yield "```\n"  # its lines are no headings
                elif child in _HEADINGS and not in_heading and not in_pre:
                    yield f"{'#' * int(child[1])} "
                elif child in ("td", "th") and name in ("td", "th"):  # one that is not closed
                    yield " "
                in_pre += child == "pre"
                in_heading += child in _HEADINGS
                inside.append((child, iter(node.contents)))
                break
            elif kind == "NavigableString":
                yield node if in_pre and not in_heading else re.sub(r"\s+", " ", node)
            elif kind == "CData":
                yield node
        else:
            inside.pop()
            in_pre -= name == "pre"
            in_heading -= name in _HEADINGS
            if name == "pre" and not in_pre and not in_heading:
                yield "\n```\n\n"
            elif name in ("td", "th") or in_heading:
                yield " "
            elif name in _BLOCKS:
                yield "\n\n"


def _html_table(table: Any) -> str:
    """A table with its caption as Markdown; empty if it places text on a page: it has one row or column,
    long cells, tables inside, or cells that are not closed. In linear time, as it ends at a table inside."""
    rows: list[list[str]] = []
    caption: list[str] = []
    inside: list[tuple[Any, Iterator[Any]]] = [(table, iter(table.contents))]
    cell: list[str] | None = None
    while inside:
        element, contents = inside[-1]
        for node in contents:
            name = getattr(node, "name", None)
            if name == "table" or (name in ("td", "th", "tr") and cell is not None):
                return ""
            if name == "tr":
                rows.append([])
            elif name in ("td", "th", "caption"):
                cell = caption if name == "caption" else []
            if name is not None and name not in _UNREAD_TAGS:
                inside.append((node, iter(node.contents)))
                break
            if type(node).__name__ in ("NavigableString", "CData"):
                if cell is not None:
                    cell.append(node)
                elif node.strip():  # which belongs nowhere
                    return ""
        else:
            inside.pop()
            if element.name == "caption":
                cell = None
            elif element.name in ("td", "th") and cell is not None:
                text = " ".join("".join(cell).split())
                if not rows or len(text) > MAX_CELL_CHARS:
                    return ""
                span = str(element.get("colspan", "1"))
                rows[-1] += [text] * (int(span) if span in _SPANS else 1)
                cell = None
            elif cell is not None and (element.name in _BLOCKS or element.name == "br"):
                cell.append(" ")
    rows = [row for row in rows if any(row)]
    if len(rows) < 2 or max(map(len, rows)) < 2:
        return ""
    return f"{' '.join(''.join(caption).split())}\n\n{markdown_table(rows)}".strip()


def _read_jsonl(path: Path, text: str) -> Iterator[Document]:
    """Yields every good line, then raises an error that names the first bad one."""
    seen: set[str] = set()
    first_fault, bad_lines = "", 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = _jsonl_document(path, number, line)
            if document.source in seen:
                raise _BadLine(f"repeats an id ({document.source}); ids must differ")
        except _BadLine as bad:
            first_fault = first_fault or f"line {number} {bad}"
            bad_lines += 1
        else:
            seen.add(document.source)
            yield document
    if bad_lines:
        skipped = f"{bad_lines} bad line{'s' if bad_lines > 1 else ''} skipped"
        raise UnreadableDocumentError(path, f"{first_fault}; {skipped}, {len(seen)} read")


class _BadLine(Exception):
    """Why a line is not a document."""


def _jsonl_document(path: Path, number: int, line: str) -> Document:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as exc:
        why = str(exc)
        if isinstance(exc, json.JSONDecodeError):  # its own text calls each line the first one
            why = f"{exc.msg} at character {exc.pos}"
        raise _BadLine(f"is not valid JSON ({why}); write one object to a line") from exc
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise _BadLine('is not an object with a string under "text"; write {"text": "…"}')
    if not (text := _with_newlines(record["text"])).strip():
        raise _BadLine('has an empty "text"; fill it or remove the line')
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as exc:
        raise _BadLine("contains a lone surrogate, expected valid Unicode; replace it") from exc
    except RecursionError as exc:
        raise _BadLine("is nested too deeply; write plain values next to the text") from exc
    has_id = record.get("id") not in (None, "")
    name = str(record["id"] if has_id else number)
    document = Document(
        source=f"{path.as_posix()}#{name}",
        text=text,
        title=str(record.get("title") or _stem_title(path)),
        metadata=_metadata({k: v for k, v in record.items() if k not in ("text", "title")}),
    )
    try:
        check_name("its id", name, MAX_ID_CHARS)
        check_document(document)
    except InvalidInputError as bad:
        raise _BadLine(f"is refused: {bad}") from bad
    return document


#: Kinds of text by suffix; HTML is also known by its beginning.
_KINDS = {
    **dict.fromkeys((".md", ".markdown"), "Markdown"),
    **dict.fromkeys((".html", ".htm"), "HTML"),
    ".jsonl": "JSON lines",
}
_READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    "text": _read_plain,
    "Markdown": _read_markdown,
    "HTML": _read_html,
    "JSON lines": _read_jsonl,
}
