"""Read files into documents: plain text, Markdown, HTML and JSON lines.

A file that cannot be read raises :class:`UnreadableDocumentError` with the reason, so that ingest can
report it and continue.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blendrag.errors import InvalidInputError, UnreadableDocumentError
from blendrag.store import regular_files
from blendrag.store.identity import digest_fields

if TYPE_CHECKING:
    from bs4 import BeautifulSoup

MetadataValue = str | int | float | bool

#: Size limit of a document's file.
MAX_DOCUMENT_BYTES = 1024 * regular_files.MIB


@dataclass(frozen=True)
class Document:
    """One text and where it came from.

    ``source`` is the file's path with forward slashes; for JSON lines ``path#id`` or ``path#line``.
    """

    source: str
    text: str
    title: str
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)


def digest_of(document: Document) -> str:
    """SHA-256 over text, title and metadata. Re-ingest skips a document whose digest is unchanged."""
    metadata = json.dumps(dict(document.metadata), sort_keys=True)
    fields = ("document", document.title, document.text, metadata)
    return digest_fields(field.encode("utf-8", "surrogatepass") for field in fields)


# -- which files ------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The files found in a list of paths, each once."""

    files: list[Path]
    unsupported: list[Path]
    """Files found in a directory that no reader supports. They are reported, not read."""


def scan_inputs(paths: Sequence[Path]) -> Inputs:
    """The files named, and the supported files below the directories named (recursive, sorted).

    Skips hidden files, hidden directories and KV stores, and does not follow links to directories. A
    file named explicitly is always returned: reading it then reports why it cannot be read. Raises
    :class:`InvalidInputError` for a path that does not exist or a directory that cannot be listed.
    """
    files: dict[Path, None] = {}
    unsupported: dict[Path, None] = {}
    for path in map(Path, paths):
        try:
            is_directory, exists = path.is_dir(), path.exists() or path.is_symlink()
        except OSError as exc:
            raise InvalidInputError(
                f"{path} cannot be accessed ({exc.strerror}); check its name and the permissions of "
                "the directories above it, or leave it out"
            ) from exc
        if is_directory:
            for found in _files_below(path):
                (files if found.suffix.lower() in SUPPORTED_SUFFIXES else unsupported)[found] = None
        elif exists:
            files[path] = None
        else:
            raise InvalidInputError(
                f"{path} does not exist, expected a file or a directory; check the spelling"
            )
    return Inputs(list(files), [path for path in unsupported if path not in files])


def _files_below(directory: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise InvalidInputError(
            f"{error.filename} cannot be listed ({error.strerror}); "
            "change its permissions or leave it out"
        ) from error

    for folder, folders, names in os.walk(directory, onerror=refuse):
        folders[:] = sorted(
            name for name in folders if not (name.startswith(".") or _is_store(Path(folder, name)))
        )
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _is_store(directory: Path) -> bool:
    try:
        mark = regular_files.read_bytes(directory / "format", regular_files.MIB)
    except OSError:
        return False
    return mark.startswith(b"blendrag-kv ")


# -- one file ---------------------------------------------------------------------------------------


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of one file, in order.

    Raises :class:`UnreadableDocumentError`; for JSON lines only after all good lines were yielded.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UnreadableDocumentError(
            path,
            f"suffix {path.suffix!r} is not supported, expected one of {', '.join(_READERS)}; "
            "convert it to text first",
        )
    yield from reader(path, _read_text(path))


def _read_text(path: Path) -> str:
    """The file as text with ``\\n`` line ends."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as exc:
        shown = str(path).encode("utf-8", "backslashreplace").decode("utf-8")
        raise UnreadableDocumentError(shown, "has a name that is not UTF-8; rename it") from exc
    try:
        data = regular_files.read_bytes(path, MAX_DOCUMENT_BYTES, follow=True)
    except OSError as exc:
        raise UnreadableDocumentError(
            path, f"cannot be read ({exc.strerror or exc}); check that it exists and is readable"
        ) from exc
    if b"\0" in data:
        raise UnreadableDocumentError(
            path, "is binary (contains NUL bytes), expected UTF-8 text; convert it to text first"
        )
    try:
        text = _with_newlines(data.decode("utf-8-sig"))
    except UnicodeDecodeError as exc:
        raise UnreadableDocumentError(
            path, f"is not UTF-8 (byte {exc.start}); convert it, for example with iconv"
        ) from exc
    if not text.strip():
        raise UnreadableDocumentError(path, "is empty, expected text; remove it or fill it")
    return text


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _stem_title(path: Path) -> str:
    return " ".join(path.stem.replace("-", " ").replace("_", " ").split())


def _read_plain(path: Path, text: str) -> Iterator[Document]:
    yield Document(path.as_posix(), text, _stem_title(path))


_FENCE = re.compile(r"\s{0,3}(```|~~~)")
_HEADING = re.compile(r"\s{0,3}#{1,6}[ \t]+(.*?)[ \t]*#*[ \t]*$")


def _read_markdown(path: Path, text: str) -> Iterator[Document]:
    yield Document(path.as_posix(), text, _first_heading(text) or _stem_title(path))


def _first_heading(text: str) -> str | None:
    """The first Markdown heading outside code blocks."""
    fence = None
    for line in text.splitlines():
        if opening := _FENCE.match(line):
            if fence is None:
                fence = opening[1]
            elif fence == opening[1]:
                fence = None
        elif fence is None and (heading := _HEADING.match(line)) and heading[1]:
            return heading[1]
    return None


_UNREAD_TAGS = ("script", "style", "noscript", "template", "head", "svg")
_BLOCKS = (
    "address article aside blockquote body dd details div dl dt fieldset figcaption figure "
    "footer form h1 h2 h3 h4 h5 h6 header hr li main nav ol p pre section summary table tr ul"
)


def _read_html(path: Path, text: str) -> Iterator[Document]:
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(text, "html.parser")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    if not (body := _html_text(soup)):
        raise UnreadableDocumentError(path, "contains no text besides tags; leave it out")
    yield Document(path.as_posix(), body, title or _stem_title(path))


def _html_text(soup: BeautifulSoup) -> str:
    """Text in reading order, one blank line between blocks, lines of ``pre`` kept."""
    for tag in soup.find_all(_UNREAD_TAGS):
        tag.decompose()
    for string in soup.find_all(string=True):
        if type(string).__name__ == "NavigableString" and string.find_parent("pre") is None:
            string.replace_with(re.sub(r"\s+", " ", string))
    for tag in soup.find_all("br"):
        tag.replace_with("\n")
    for tag in soup.find_all(["td", "th"]):
        tag.append(" ")
    for tag in soup.find_all(_BLOCKS.split()):
        tag.insert_before("\n\n")
        tag.append("\n\n")
    lines = (line.rstrip(" ") for line in soup.get_text().split("\n"))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?m)^ (?! )", "", "\n".join(lines))).strip()


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
        raise _BadLine(f"is not valid JSON ({exc}); write one object to a line") from exc
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise _BadLine('is not an object with a string under "text"; write {"text": "…"}')
    if not (text := _with_newlines(record["text"])).strip():
        raise _BadLine('has an empty "text"; fill it or remove the line')
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as exc:
        raise _BadLine("contains a lone surrogate, expected valid Unicode; replace it") from exc
    has_id = record.get("id") not in (None, "")
    return Document(
        source=f"{path.as_posix()}#{record['id'] if has_id else number}",
        text=text,
        title=str(record.get("title") or _stem_title(path)),
        metadata={
            key: value if isinstance(value, MetadataValue) else json.dumps(value)
            for key, value in record.items()
            if key not in ("text", "title") and value is not None
        },
    )


_READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".txt": _read_plain,
    **dict.fromkeys((".md", ".markdown"), _read_markdown),
    **dict.fromkeys((".html", ".htm"), _read_html),
    ".jsonl": _read_jsonl,
}
SUPPORTED_SUFFIXES = tuple(_READERS)
