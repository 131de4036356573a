"""Files that are made to hang, fill the memory or confuse a reader, and good ones beside them."""

from __future__ import annotations

import json
import os
import socket
import zipfile
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from xml.sax.saxutils import escape

_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_TYPE = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"


def docx(body: str, before: str = "", parts: dict[str, bytes] | None = None) -> bytes:
    """A DOCX with this XML in its body; ``before``: in front of the document's root."""
    files = {
        "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types"><Default Extension="rels" '
        f'ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Default Extension="xml" '
        'ContentType="application/xml"/><Override PartName="/word/document.xml" '
        f'ContentType="{_TYPE}"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="r1" '
        f'Type="{_OFFICE}/officeDocument" Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'{before}<w:document xmlns:w="{_WORD}"><w:body>{body}</w:body></w:document>',
    }
    made = BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (files | (parts or {})).items():
            archive.writestr(name, content)
    return made.getvalue()


def paragraph(text: str) -> str:
    return f"<w:p><w:r><w:t>{escape(text)}</w:t></w:r></w:p>"


def cell(text: str, span: int) -> str:
    return f'<w:tc><w:tcPr><w:gridSpan w:val="{span}"/></w:tcPr>{paragraph(text)}</w:tc>'


def table(cells: str) -> str:
    return f"<w:tbl><w:tblPr/><w:tblGrid/><w:tr>{cells}</w:tr></w:tbl>"


def pdf(*lines: str, kids: str = "3 0 R", drawn: str | None = None) -> bytes:
    """A PDF with these lines of text on its page; ``kids`` may name page 3 again and again."""
    shown = " ".join(f"({line}) Tj 0 -20 Td" for line in lines)
    drawn = f"BT /F1 12 Tf 72 700 Td {shown} ET" if drawn is None else drawn
    parts = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {kids.count('R')} >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
    ]
    body = "".join(f"{i} 0 obj\n{part}\nendobj\n" for i, part in enumerate(parts, 1))
    # without a table of objects; readers rebuild it
    return f"%PDF-1.4\n{body}trailer\n<< /Root 1 0 R /Size 5 >>\nstartxref\n0\n%%EOF\n".encode()


def _entities(levels: int) -> str:
    """Entities each of which repeats the one before ten times."""
    made = ['<!ENTITY e0 "lol">']
    made += [f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, levels)]
    return f"<!DOCTYPE w [{''.join(made)}]>"


def _json(**fields: object) -> bytes:
    return json.dumps({"text": "Words."} | fields).encode()


_NESTED_TABLE = "<w:tbl><w:tblPr/><w:tblGrid/><w:tr><w:tc>"
_WORDS = "Plain words of a plain document about nothing at all. "

#: Bytes of a file that cannot be ingested, by name.
HOSTILE: dict[str, Callable[[], bytes]] = {
    "span.docx": lambda: docx(table(cell("x", 300_000_000))),
    "many-spans.docx": lambda: docx(table(cell("x" * 99, 999) * 20_000)),
    "bomb.docx": lambda: docx(paragraph(" " * 30_000_000)),
    "media-bomb.docx": lambda: docx(paragraph("x"), parts={"word/m.xml": bytes(30_000_000)}),
    "paragraphs.docx": lambda: docx("<w:p/>" * 7_500_000),
    "parts.docx": lambda: docx(paragraph("x"), parts={f"p{n}.xml": b"" for n in range(20_000)}),
    "nested.docx": lambda: docx(_NESTED_TABLE * 20_000 + "</w:tc></w:tr></w:tbl>" * 20_000),
    "entities.docx": lambda: docx(paragraph("&e9;").replace("&amp;", "&"), _entities(10)),
    "external.docx": lambda: docx(
        paragraph("&e;").replace("&amp;", "&"), '<!DOCTYPE w [<!ENTITY e SYSTEM "/etc/passwd">]>'
    ),
    "cut.docx": lambda: docx(paragraph(_WORDS))[:500],
    "no-parts.docx": lambda: b"PK\x03\x04" + bytes(100),
    "pages.pdf": lambda: pdf(*[_WORDS] * 20, kids="3 0 R " * 100_000),
    "loop.pdf": lambda: pdf("x", kids="2 0 R"),
    "arrays.pdf": lambda: pdf(drawn="[" * 100_000),
    "dictionaries.pdf": lambda: b"%PDF-1.4\n1 0 obj\n" + b"<< /A " * 100_000,
    "count.pdf": lambda: pdf("x").replace(b"/Count 1", b"/Count 999999999999").replace(b"3 0 R", b"9 0 R"),
    "cut.pdf": lambda: pdf(_WORDS)[:90],
    "attributes.html": lambda: b"<html><body>" + b"<a " * 100_000,
    "closing.html": lambda: b"<html><body>" + b"</a x=" * 100_000,
    "tags.html": lambda: b"<html><body>" + b"<b><i>" * 50_000 + b"</b>" * 50_000,
    "cells.html": lambda: b"<html><table>" + b"<td>" * 20_000,
    "divs.html": lambda: b"<html>" + b"<div>" * 440_000,
    "comments.html": lambda: b"<html><!--" * 50_000,
    "only-scripts.html": lambda: b"<script>x</script>" * 10_000,
    "id.jsonl": lambda: _json(id="x" * 84_000),
    "title.jsonl": lambda: _json(title="x" * 84_000),
    "metadata.jsonl": lambda: _json(notes="x" * 2_000_000),
    "nested.jsonl": lambda: b'{"text": "x", "a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "number.jsonl": lambda: b'{"text": "x", "a": ' + b"9" * 100_000 + b"}",
    "surrogate.jsonl": lambda: b'{"text": "\\ud800"}',
    "empty-lines.jsonl": lambda: b"\n" * 1_000_000,
    "repeated.jsonl": lambda: (_json(id="x") + b"\n") * 2,
    "large.txt": lambda: b"words " * 12_000_000,
    "wide.txt": lambda: b"\xff\xfe\x00\x00" + b"x\x00\x00\x00" * 100_000 + b"\x00\x00\x11\x11" * 9,
    "controls.txt": lambda: bytes(range(32)) * 3_000,
    "spaces.md": lambda: b" \t\n" * 300_000,
}  # fmt: skip

#: Files that look hostile and are read.
ODD: dict[str, Callable[[], bytes]] = {
    "headings.md": lambda: b"# \n" * 100_000 + b"# " + b" #" * 100_000 + b"x\n",
    "line.txt": lambda: b"word " * 200_000,
    "title.html": lambda: b"<html><title>" + b"x" * 84_000 + b"</title><body>" + _WORDS.encode(),
    "references.html": lambda: b"<html><body>" + b"</" * 5_000,
    "heading.md": lambda: b"# " + b"y" * 84_000 + b"\n\n" + _WORDS.encode(),
}


def write_hostile(folder: Path, names: Iterable[str] = tuple(HOSTILE)) -> None:
    """A new folder with these files, a pipe, a socket, and links to a device and to themselves."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(HOSTILE[name]())
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as bound:
        where = os.getcwd()
        os.chdir(folder)  # paths of sockets are short
        bound.bind("socket.txt")
        os.chdir(where)
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "device.txt").symlink_to("/dev/zero")


def good_files(words: Callable[[int], str]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of good files without end, with the text ``words`` of each number."""
    number = 0
    while True:
        text = words(number)
        yield f"good-{number}.txt", text.encode()
        yield f"good-{number + 1}.md", f"# Title\n\n{words(number + 1)}".encode()
        yield (
            f"good-{number + 2}.html",
            f"<html><body><p>{words(number + 2)}</p></body></html>".encode(),
        )
        yield f"good-{number + 3}.jsonl", json.dumps({"text": words(number + 3)}).encode()
        yield f"good-{number + 4}.docx", docx(paragraph(words(number + 4)))
        yield f"good-{number + 5}.pdf", pdf(words(number + 5))
        number += 6
