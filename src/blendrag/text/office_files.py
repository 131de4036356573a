"""Text of PDF, DOCX and XLSX files, through pypdf, python-docx and openpyxl (the extra ``files``)."""

from __future__ import annotations

import importlib.util
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from blendrag.errors import UnreadableDocumentError, is_out_of_memory
from blendrag.store.durable import readable_size
from blendrag.store.regular_files import MIB
from blendrag.text import docx_files, xlsx_files
from blendrag.wording import first_line

INSTALL = "pip install 'blendrag[files]'"
#: The beginning of a PDF under any name: its version, usually a comment of binary bytes, and an object.
_PDF = re.compile(rb"\s*%PDF-\d\.\d[ \t]*[\r\n]\s*(?:%[^\r\n]*[\r\n]\s*)*\d+\s+\d+\s+obj\b")
#: Module that reads each kind.
_MODULES = {"PDF": "pypdf", "DOCX": "docx", "XLSX": "openpyxl"}
#: Kinds by suffix. A file with one is never read as text: if it is damaged, it may decode as text by chance.
_KINDS = {".pdf": "PDF", ".docx": "DOCX", ".xlsx": "XLSX", ".xlsm": "XLSX"}
#: Suffixes of zip archives that are not read.
_UNREAD = frozenset(
    [".docm", ".dotx", ".epub", ".odp", ".ods", ".odt", ".pptm", ".pptx", ".xlsb", ".zip"]
)


def kind_of(path: Path, beginning: bytes) -> str:
    """``PDF``, ``DOCX``, ``XLSX`` or empty."""
    return "PDF" if _PDF.match(beginning) else _KINDS.get(path.suffix.lower(), "")


def is_unread(path: Path, beginning: bytes) -> bool:
    """Whether a file that :func:`kind_of` does not know is a zip archive, damaged or not."""
    return path.suffix.lower() in _UNREAD or beginning.startswith(b"PK\x03\x04")


def lacks_reader(kind: str) -> bool:
    return importlib.util.find_spec(_MODULES[kind]) is None


#: Limits of an unpacked DOCX or XLSX: of all parts (images are large), and of those that are parsed.
MAX_PARTS, MAX_UNPACKED_BYTES, MAX_XML_BYTES = 10_000, 1024 * MIB, 256 * MIB
#: Parts of more than so many bytes are packed at most so well: text reaches 20 to 50.
RATIO_FROM_BYTES, MAX_RATIO = 8 * MIB, 100
#: Between two pages in a text.
_PAGE_END = "\n\n"
#: A page of a PDF is an object that its list of pages should name once.
MAX_PAGE_REPEATS = 100


def work_bytes(path: Path, kind: str, data: bytes) -> int:
    """What a parser goes through: the unpacked XML of an archive.

    Raises :class:`UnreadableDocumentError` for an archive that unpacks to too much, and for a damaged one.
    """
    if kind == "PDF":
        return len(data)
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            parts = archive.infolist()
    except Exception as exc:  # of many types for damaged archives
        raise _unreadable(path, kind, exc) from exc
    unpacked_bytes = sum(part.file_size for part in parts)
    xml_bytes = sum(p.file_size for p in parts if p.filename.endswith((".xml", ".rels")))
    is_bomb = xml_bytes > max(RATIO_FROM_BYTES, MAX_RATIO * len(data))
    if len(parts) > MAX_PARTS or unpacked_bytes > MAX_UNPACKED_BYTES or xml_bytes > MAX_XML_BYTES:
        is_bomb = True
    if is_bomb:
        raise UnreadableDocumentError(
            path,
            f"is {kind} of {readable_size(len(data))} that unpacks to {len(parts):,} parts of "
            f"{readable_size(unpacked_bytes)}, expected at most {MAX_PARTS:,} parts, {MAX_RATIO} times the "
            f"file and {readable_size(MAX_XML_BYTES)} of text; split it, or save it as text",
        )
    return xml_bytes


def _unreadable(path: Path, kind: str, exc: Exception) -> UnreadableDocumentError:
    return UnreadableDocumentError(
        path, f"cannot be read as {kind} ({first_line(exc)}); save it again, or as text"
    )


class OfficeText(NamedTuple):
    """What a file holds. ``title`` is what it claims, ``heading`` the title in its text; both may be empty.
    ``pages``: where each page of a PDF begins in the text."""

    text: str
    title: str
    heading: str = ""
    pages: Sequence[int] = ()


def read(path: Path, kind: str, data: bytes) -> OfficeText:
    """The text of a file. Raises :class:`UnreadableDocumentError`."""
    if lacks_reader(kind):
        raise UnreadableDocumentError(path, f"is {kind}, read only with the extra: {INSTALL}")
    try:
        found = _READERS[kind](path, data)
    except UnreadableDocumentError:
        raise
    except Exception as exc:  # the libraries raise many types for damaged files
        if is_out_of_memory(exc):
            raise MemoryError from exc
        if type(exc).__name__ == "DependencyError":
            raise UnreadableDocumentError(
                path, f"is a PDF encrypted with AES, read only with the whole extra: {INSTALL}"
            ) from exc
        raise _unreadable(path, kind, exc) from exc
    if not found.text.strip():
        raise UnreadableDocumentError(
            path, f"is {kind} without text; if it is a scan, recognise its text (OCR) first"
        )
    title = found.heading or _true_title(path.stem, found.title, found.text)
    return found._replace(title=title)


#: Characters at the beginning of a text in which its title is expected.
_TITLE_WITHIN_CHARS = 4000


def _true_title(stem: str, title: str, text: str) -> str:
    """The title that a file claims, if it says more than its name and the text begins with it. Programs write
    templates, names of drafts and "untitled" there."""
    claimed, words = _words(title), _words(text[:_TITLE_WITHIN_CHARS])
    is_shown = "".join(claimed) in "".join(words)
    return " ".join(title.split()) if is_shown and not {*claimed} <= {*_words(stem)} else ""


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _pdf(path: Path, data: bytes) -> OfficeText:
    from pypdf import PasswordType, PdfReader

    reader = PdfReader(BytesIO(data))
    # a file that only forbids printing or copying opens with an empty password
    if reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED:
        raise UnreadableDocumentError(
            path, "is a PDF that opens only with a password; save it again without one"
        )
    times = Counter(page.indirect_reference for page in reader.pages)
    if times and max(times.values()) > MAX_PAGE_REPEATS:
        raise ValueError(f"it shows one page {max(times.values()):,} times")
    pieces, starts, at = [], [], 0
    for page in reader.pages:
        # as readers write line ends, so that the places stay right
        text = page.extract_text().replace("\r\n", "\n").replace("\r", "\n").strip()
        starts.append(at)
        pieces += [text] * bool(text)
        at += (len(text) + len(_PAGE_END)) * bool(text)
    title = reader.metadata.title if reader.metadata else None
    return OfficeText(_PAGE_END.join(pieces), str(title or ""), pages=starts)


_READERS: dict[str, Callable[[Path, bytes], OfficeText]] = {
    "PDF": _pdf,
    "DOCX": lambda path, data: OfficeText(*docx_files.read(data)),
    "XLSX": lambda path, data: OfficeText(*xlsx_files.read(data)),
}
