"""Text of PDF and DOCX files, through pypdf and python-docx (the extra ``files``)."""

from __future__ import annotations

import importlib.util
from io import BytesIO
from pathlib import Path

from blendrag.errors import UnreadableDocumentError

INSTALL = "pip install 'blendrag[files]'"
#: Module that reads each kind.
_MODULES = {"PDF": "pypdf", "DOCX": "docx"}


def kind_of(path: Path, beginning: bytes) -> str:
    """``PDF``, ``DOCX`` or empty."""
    if b"%PDF-" in beginning[:1024]:
        return "PDF"
    is_docx = beginning.startswith(b"PK\x03\x04") and path.suffix.lower() == ".docx"
    return "DOCX" if is_docx else ""


def lacks_reader(kind: str) -> bool:
    return importlib.util.find_spec(_MODULES[kind]) is None


def read(path: Path, kind: str, data: bytes) -> tuple[str, str]:
    """Text and title, which may be empty. Raises :class:`UnreadableDocumentError`."""
    if lacks_reader(kind):
        raise UnreadableDocumentError(
            path, f"is a {kind} file, read only with the extra: {INSTALL}"
        )
    try:
        text, title = _pdf(data) if kind == "PDF" else _docx(data)
    except Exception as exc:  # both libraries raise many types for damaged files
        first = str(exc).strip().split("\n")[0] or type(exc).__name__
        raise UnreadableDocumentError(
            path,
            f"cannot be read as {kind} ({first}); save it again, without a password, or as text",
        ) from exc
    if not text.strip():
        raise UnreadableDocumentError(
            path, f"is a {kind} file without text, such as a scan; recognise its text (OCR) first"
        )
    return text, " ".join(title.split())


def _pdf(data: bytes) -> tuple[str, str]:
    from pypdf import PdfReader

    reader = PdfReader(BytesIO(data))
    pages = [page.extract_text().strip() for page in reader.pages]
    title = reader.metadata.title if reader.metadata else None
    return "\n\n".join(filter(None, pages)), str(title or "")


def _docx(data: bytes) -> tuple[str, str]:
    from docx import Document
    from docx.table import Table

    document = Document(BytesIO(data))
    blocks = []
    for block in document.iter_inner_content():
        if isinstance(block, Table):
            rows = ([cell.text.strip() for cell in row.cells] for row in block.rows)
            blocks.append("\n".join(" | ".join(row) for row in rows))
        else:
            blocks.append(block.text.strip())
    return "\n\n".join(filter(None, blocks)), document.core_properties.title or ""
