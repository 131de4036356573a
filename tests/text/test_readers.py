"""Every supported file becomes documents; every other file is refused with a reason."""

from __future__ import annotations

import importlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blendrag.errors import InvalidInputError, UnreadableDocumentError
from blendrag.store.tiered import open_store
from blendrag.text.inputs import Patterns, scan_inputs
from blendrag.text.outline import outline_of
from blendrag.text.readers import PAGE_STARTS, Document, digest_of, open_documents, page_at
from text import hostile_files


def read_documents(path: Path) -> Iterator[Document]:
    yield from open_documents(path).documents


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    os.utime(path, (0, 0))
    return path


#: Metadata of what :func:`write` wrote.
DATED = {"file_date": "1970-01-01"}


@pytest.mark.parametrize(
    ("name", "content", "text", "title"),
    [
        ("the_north-cape.txt", "\ufeffOne.\r\nTwo.\r", "One.\nTwo.\n", "the north cape"),
        ("a.md", "```\n# not this\n```\n## The *cape* ##\n# Later\n", None, "The *cape*"),
        ("no-heading.markdown", "#tag is no heading", None, "no heading"),
        ("README", "= No suffix =", None, "README"),
        ("blendrag.1", ".TH BLENDRAG 1\n.SH NAME\n", None, "blendrag"),
        ("colours.log", "\x1b[31mred\x1b[0m\n" * 9, None, "colours"),
    ],
)
def test_the_title_is_the_first_heading_or_the_file_name(
    tmp_path: Path, name: str, content: str, text: str | None, title: str
) -> None:
    path = write(tmp_path / name, content)
    assert list(read_documents(path)) == [Document(path.as_posix(), text or content, title, DATED)]


def test_html_keeps_blocks_and_drops_scripts(tmp_path: Path) -> None:
    html = (
        "<html><head><title> A\n title </title><style>p{}</style></head><body><h1>Head</h1>"
        "<p>One <b>bold</b>\n word.</p><script>var x = 1;</script><!-- gone -->"
        "<p>Two<br>lines</p><ul><li>first</li><li>second</li></ul>"
        "<table><tr><td>a</td><td>b</td></tr></table><pre>x\n  y</pre></body></html>"
    )
    (document,) = read_documents(write(tmp_path / "a.HTML", html))
    assert document.title == "A title"
    assert document.text == (
        "# Head\n\nOne bold word.\n\nTwo\nlines\n\nfirst\n\nsecond\n\na b\n\n```\nx\n  y\n```"
    )


def test_headings_of_html_are_headings_and_lines_of_its_code_are_not(tmp_path: Path) -> None:
    html = (
        "<html><h1><div>The</div><p>guide<br>book</h1><h2>Install</h2><pre># no heading\n<pre>in\n</pre>"
        "</pre><h3><pre>a  b</pre></h3><ul><li><h4>Item</h4>text</ul>"
    )
    (document,) = read_documents(write(tmp_path / "a.html", html))
    found = [
        (each.depth, each.label) for each in outline_of(document.text, document.source).sections
    ]
    assert found == [(1, "The guide book"), (2, "Install"), (3, "a b"), (4, "Item")]
    assert "```\n# no heading\n" in document.text


def test_html_tables_become_markdown_and_those_that_place_text_do_not(tmp_path: Path) -> None:
    html = (
        "<p>Before.<table><thead><tr><th>sku<th>price</thead></table>"
        "<table><tr><th>sku</th><th colspan=2>price</th></tr>\n<tr><td>P<br>1</td><td><p>1|2</p></td>"
        "<td>3</td></tr><tr></tr></table>After."
        "<table><tr><td>Menu</td><td><table><tr><td>a</td><td>b</td></tr><tr><td>1</td><td>2</td></tr>"
        "</table></td></tr><tr><td>Foot</td></tr></table>"
    )
    (document,) = read_documents(write(tmp_path / "a.html", html))
    assert document.text == (
        "Before.\n\nsku price\n\n| sku | price | price |\n| --- | --- | --- |\n| P 1 | 1\\|2 | 3 |\n\n"
        "After.\n\nMenu\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\nFoot"
    )


def test_captions_and_cells_without_ends_lose_no_text(tmp_path: Path) -> None:
    rows = "<tr><td>a</td><td>b</td></tr>" * 2
    table = ["Prices", "", "| a | b |", "| --- | --- |", "| a | b |"]
    for html in (
        f"<table><caption>Prices</caption>{rows}</table>",
        "<table><tr><td>a<td>b<tr><td>c",
    ):
        (document,) = read_documents(write(tmp_path / "a.html", html))
        expected = table if "caption" in html else ["a b", "", "c"]
        assert [line.strip() for line in document.text.split("\n")] == expected


def test_deeply_nested_html_is_read(tmp_path: Path) -> None:
    html = "<div>" * 1100 + "deep" + "</div>" * 1100
    (document,) = read_documents(write(tmp_path / "a.html", html))
    assert document.text == "deep"


def test_json_lines_carry_title_id_and_metadata(tmp_path: Path) -> None:
    lines = [
        {"text": "One.", "title": "First", "id": "x", "year": 1871, "tags": ["a"], "none": None},
        {"text": "Two.", "id": 7},
        {"text": "Three."},
    ]
    path = write(tmp_path / "a.jsonl", "\n\n".join(json.dumps(line) for line in lines))
    first, second, third = read_documents(path)
    assert first == Document(
        f"{path.as_posix()}#x", "One.", "First", {**DATED, "id": "x", "year": 1871, "tags": ["a"]}
    )
    assert second.source.endswith("#7")
    assert third.source.endswith("#5")
    assert third.title == "a"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            '{"text": "ok"}\n{"text": ',
            r"line 2 is not valid JSON \(Expecting value at character 9\)",
        ),
        ('{"text": "ok"}\n[1]', "line 2 is not an object"),
        ('{"title": "x"}', 'line 1 is not an object with a string under "text"'),
        ('{"text": " "}', "line 1 has an empty"),
        ('{"text": "a", "id": 1}\n{"text": "b", "id": "1"}', "line 2 repeats an id"),
        ('{"text": "\\ud800"}', "line 1 contains a lone surrogate"),
        ("[" * 100_000, "line 1 is not valid JSON"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, content: str, reason: str) -> None:
    with pytest.raises(UnreadableDocumentError, match=f"{reason}.*; 1 bad line skipped, [01] read"):
        list(read_documents(write(tmp_path / "a.jsonl", content)))


def test_good_json_lines_are_read_past_bad_ones(tmp_path: Path) -> None:
    good = [f'{{"text": "line {number}"}}' for number in range(1, 6)]
    lines = [good[0], '{"text": ', good[2], '{"text": "x", "id": 9}', '{"text": "y", "id": 9}']
    path = write(tmp_path / "a.jsonl", "\n".join([*lines, "", "[]", good[4]]))
    documents = read_documents(path)
    texts = [next(documents).text for _ in range(4)]
    with pytest.raises(UnreadableDocumentError) as caught:
        next(documents)
    assert texts == ["line 1", "line 3", "x", "line 5"]
    assert str(caught.value).startswith(f"{path}: line 2 is not valid JSON (")
    assert str(caught.value).endswith("; 3 bad lines skipped, 4 read")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n\t", "is empty"),
        ("a.txt", b"abc\0def", "is binary"),
        ("a.md", b"\x7fELF\x02\x01\x01" + bytes(range(256)), "is binary"),
        ("a.txt", b"caf\xc3\xa9 " * 20_000 + b"\0" * 9999, "is binary"),
        ("a.jsonl", b"\n\n", "is empty"),
        ("a.htm", b"<script>x</script>", "contains no text"),
        ("a.pdf", b"%PDF-1.4\nnothing more", "cannot be read as PDF"),
        ("a.docx", b"PK\x03\x04nothing more", "cannot be read as DOCX"),
        # damaged files that decode as text
        ("a.pdf", b"nothing of a PDF", "cannot be read as PDF"),
        ("a.docx", b"nothing of an archive", "cannot be read as DOCX"),
        ("a.XLSX", b"nothing of an archive", "cannot be read as XLSX"),
        ("a.pptx", b"nothing of an archive", "is binary"),
        ("a.html", b"PK\x03\x04nothing more", "is binary"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(UnreadableDocumentError, match=reason) as caught:
        list(read_documents(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", "Où est la bibliothèque ? Le garçon a mangé la crème brûlée à l'hôtel."),
        ("latin-1", "# Author: José Muñoz\ndef f(x):\n    return x\n"),
        ("cp1252", "Größe: 5\nPreis: 10 €\n"),
        ("cp1252", "“Quotes” – and €5 for the café."),
        ("cp1250", "Příliš žluťoučký kůň úpěl ďábelské ódy. Všichni lidé se rodí svobodní."),
        ("cp1251", "Все люди рождаются свободными и равными в своем достоинстве и правах."),
        ("shift_jis", "これは日本語の文章です。漢字とかなが混ざっています。"),
        ("gb18030", "这是一个中文文本，用于测试编码检测。我们需要足够长的文本。"),
        ("utf-16", "Café in UTF-16, as Windows writes it."),
        ("utf-16-le", "UTF-16 without a byte order mark."),
    ],
)
def test_encodings_other_than_utf8_are_guessed(tmp_path: Path, encoding: str, text: str) -> None:
    (document,) = read_documents(write(tmp_path / "a.txt", text.encode(encoding)))
    assert document.text == text


def test_html_is_known_without_a_suffix(tmp_path: Path) -> None:
    (document,) = read_documents(write(tmp_path / "page", "\n<!DOCTYPE html><p>One</p>"))
    assert document.text == "One"


def pdf(*lines: str) -> bytes:
    """A PDF of one page, with these lines of text."""
    shown = " ".join(f"({line}) Tj 0 -20 Td" for line in lines)
    drawn = f"BT /F1 12 Tf 72 700 Td {shown} ET"
    parts = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
    ]
    body = "".join(f"{i} 0 obj\n{part}\nendobj\n" for i, part in enumerate(parts, 1))
    # without a table of objects; readers rebuild it
    return f"%PDF-1.4\n{body}trailer\n<< /Root 1 0 R /Size 5 >>\nstartxref\n0\n%%EOF\n".encode()


def test_pdf_and_docx_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    docx = pytest.importorskip("docx")
    (page,) = read_documents(write(tmp_path / "the-manual.bin", pdf("The warranty.", "Two years.")))
    assert page.text.split("\n") == ["The warranty.", "Two years."]
    assert page.title == "the manual"
    letter = docx.Document()
    letter.core_properties.title = "A letter"
    letter.add_heading("A  letter", 0)
    letter.add_heading("Terms")
    letter.add_heading("Payment", 2)
    letter.add_table(1, 2).rows[0].cells[1].text = "30 days"
    letter.add_paragraph("Signed.")
    letter.save(tmp_path / "a.docx")
    (document,) = read_documents(tmp_path / "a.docx")
    assert (document.title, document.text) == (
        "A letter",
        "# A letter\n\n# Terms\n\n## Payment\n\n| 30 days\n\nSigned.",
    )
    with pytest.raises(UnreadableDocumentError, match="is PDF without text; if it is a scan"):
        list(read_documents(write(tmp_path / "scan.pdf", pdf())))


@pytest.mark.parametrize(
    ("paragraphs", "title"),
    [
        ([("Heading 1", "Terms"), ("Title", "A  letter"), ("Heading 1", "Payment")], "A letter"),
        ([("Normal", "Draft"), ("Heading 2", "Aim"), ("Heading 1", "The plan")], "The plan"),
        ([("Title", "Letter 7")], "Letter 7"),
        ([("Titel", "Ein Brief")], "Ein Brief"),
        ([("Heading 2", "Aim"), ("Normal", "Signed.")], "letter 7"),
    ],
)
def test_the_title_of_a_docx_is_its_title_paragraph_or_first_heading(
    tmp_path: Path, paragraphs: list[tuple[str, str]], title: str
) -> None:
    docx = pytest.importorskip("docx")
    letter = docx.Document()
    letter.core_properties.title = "Word Document"
    letter.styles["Title"].element.set(
        "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}styleId",
        "Titel" if paragraphs[0][0] == "Titel" else "Title",  # as a German Word writes it
    )
    for style, text in paragraphs:
        letter.add_paragraph(text, style="Title" if style == "Titel" else style)
    letter.save(tmp_path / "letter-7.docx")
    (document,) = read_documents(tmp_path / "letter-7.docx")
    assert document.title == title


@pytest.mark.parametrize(
    ("name", "claimed", "title"),
    [
        ("harrow-lamps.pdf", "Microsoft Word - draft3.doc", "harrow lamps"),
        ("harrow-lamps.pdf", "untitled", "harrow lamps"),
        ("harrow-lamps-2024.pdf", "Harrow lamps", "harrow lamps 2024"),
        ("2405.16444.pdf", " Harrow\nlamps: an overview", "Harrow lamps: an overview"),
        ("2405.16444.pdf", "", "2405.16444"),
    ],
)
def test_the_title_of_a_pdf_is_its_name_unless_the_text_begins_with_what_it_claims(
    tmp_path: Path, name: str, claimed: str, title: str
) -> None:
    writer = pytest.importorskip("pypdf").PdfWriter()
    writer.append(io.BytesIO(pdf("HARROW LAMPS", "An overview")))
    writer.add_metadata({"/Title": claimed})
    writer.write(tmp_path / name)
    (document,) = read_documents(tmp_path / name)
    assert document.title == title


def test_the_pages_of_a_pdf_are_known(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    two = hostile_files.pdf("The warranty.", "Two years.", kids="3 0 R 3 0 R")
    (document,) = read_documents(write(tmp_path / "a.pdf", two))
    starts, second = document.metadata[PAGE_STARTS], document.text.rindex("The warranty.")
    assert second > 0
    assert [page_at(starts, place) for place in (0, second - 1, second, 10**6)] == [1, 1, 2, 2]
    assert page_at(None, 5) is page_at("0 x", 5) is page_at("", 5) is page_at(7, 5) is None


@pytest.mark.parametrize(
    "content",
    [
        b"# A note\n\nIt mentions %PDF-1.4 somewhere.",
        b"x = '%PDF-'",
        b"%PDF- begins each file.",
        b"%PDF-1.7\n%comment\n\nis how 1 0 obj may begin.",
    ],
)
def test_a_text_that_mentions_the_mark_of_a_pdf_is_text(tmp_path: Path, content: bytes) -> None:
    (document,) = read_documents(write(tmp_path / "a.txt", content))
    assert document.text == content.decode()


@pytest.mark.parametrize("algorithm", ["RC4-40", "RC4-128", "AES-128", "AES-256-R5", "AES-256"])
def test_a_pdf_that_opens_without_a_password_is_read(tmp_path: Path, algorithm: str) -> None:
    path = write(tmp_path / "a.pdf", encrypted("", algorithm))
    (document,) = read_documents(path)
    assert document.text == "The warranty."
    write(path, encrypted("secret", algorithm))
    with pytest.raises(
        UnreadableDocumentError, match=r"only with a password; save it again withou"
    ):
        list(read_documents(path))


def encrypted(password: str, algorithm: str) -> bytes:
    pypdf = pytest.importorskip("pypdf")
    writer, made = pypdf.PdfWriter(clone_from=io.BytesIO(pdf("The warranty."))), io.BytesIO()
    writer.encrypt(password, "of the owner", algorithm=algorithm)
    writer.write(made)
    return made.getvalue()


def test_a_broken_encryption_is_named_and_no_password_asked_for(tmp_path: Path) -> None:
    broken = encrypted("", "AES-256").replace(b"/V 5", b"/V 9")
    with pytest.raises(UnreadableDocumentError, match="V=9 NOT supported") as caught:
        list(read_documents(write(tmp_path / "a.pdf", broken)))
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("algorithm", ["AES-128", "AES-256"])
def test_without_cryptography_a_pdf_in_aes_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    path = write(tmp_path / "a.pdf", encrypted("", algorithm))
    fallback = importlib.import_module("pypdf._crypt_providers._fallback")
    encryption = importlib.import_module("pypdf._encryption")
    for name in ("CryptAES", "aes_cbc_decrypt", "aes_cbc_encrypt", "aes_ecb_encrypt"):
        monkeypatch.setattr(encryption, name, getattr(fallback, name))
    with pytest.raises(
        UnreadableDocumentError, match=r"AES, .* extra: pip install 'blendrag\[files"
    ):
        list(read_documents(path))


def test_without_the_extra_pdf_files_are_skipped_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = write(tmp_path / "a.pdf", pdf("Text."))
    assert scan_inputs([tmp_path]) == (
        [],
        {"PDF, which needs pip install 'blendrag[files]'": [str(path)]},
    )
    with pytest.raises(UnreadableDocumentError, match=r"extra: pip install 'blendrag\[files\]'$"):
        list(read_documents(path))


def test_missing_and_odd_files_are_refused_without_blocking(tmp_path: Path) -> None:
    with pytest.raises(UnreadableDocumentError, match="cannot be read"):
        list(read_documents(tmp_path / "gone.txt"))
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UnreadableDocumentError, match="not a regular file"):
        list(read_documents(tmp_path / "pipe.txt"))


def test_a_name_that_is_not_utf8_is_refused_in_words(tmp_path: Path) -> None:
    path = write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")), "text")
    with pytest.raises(UnreadableDocumentError, match="rename it") as caught:
        list(read_documents(path))
    str(caught.value).encode("utf-8")


def test_directories_are_searched_in_order_and_hidden_ones_left_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/Makefile", ".git/x.txt", "a/.hidden.md", "c.JSONL"):
        write(tmp_path / name, "x")
    write(tmp_path / "node_modules" / "x.js", "x")
    png = write(tmp_path / "a" / "y.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0")
    empty = write(tmp_path / "a" / "__init__.py", "\n")
    (tmp_path / "loop").symlink_to(tmp_path)
    inputs = scan_inputs([tmp_path, tmp_path / "b.txt"])
    assert inputs.files == [
        tmp_path / name for name in ("b.txt", "c.JSONL", "a/Makefile", "a/z.md")
    ]
    assert inputs.skipped == {"empty": [str(empty)], "binary": [str(png)]}


def test_links_lead_to_no_file_that_was_not_chosen(tmp_path: Path) -> None:
    outside = write(tmp_path / "secret.txt", "x")
    docs = tmp_path / "docs"
    write(docs / "a.txt", "x")
    write(docs / ".env", "x")
    write(docs / "private" / "p.txt", "x")
    links = {"out.md": outside, "env.md": docs / ".env", "p.md": docs / "private" / "p.txt"}
    for name, target in links.items():
        (docs / name).symlink_to(target)
    (docs / "same.md").symlink_to("a.txt")
    inputs = scan_inputs([docs], Patterns(exclude=("private/",)))
    assert [path.name for path in inputs.files] == ["a.txt", "same.md"]
    assert inputs.skipped == {
        "a link out of the directory": [str(docs / "out.md")],
        "a link to a file that is left out": [str(docs / "env.md"), str(docs / "p.md")],
    }
    assert scan_inputs([docs / "out.md"]).files == [docs / "out.md"]


def test_a_file_without_content_to_wait_for_is_no_file(tmp_path, monkeypatch) -> None:
    """As /proc/kmsg, whose reading would block."""
    path = write(tmp_path / "a.txt", "x")

    class Queue(io.BytesIO):
        def read(self, size: int | None = -1) -> None:  # type: ignore[override]
            return None

        def fileno(self) -> int:
            return descriptor

    descriptor = os.open(path, os.O_RDONLY)
    monkeypatch.setattr(os, "fdopen", lambda fd, mode: os.close(fd) or Queue())
    assert scan_inputs([tmp_path]).skipped == {"not a file": [str(path)]}
    with pytest.raises(UnreadableDocumentError, match="not a regular file"):
        list(read_documents(path))
    os.close(descriptor)


def test_patterns_choose_the_files_of_directories(tmp_path: Path) -> None:
    for name in ("a.md", "a.log", "docs/b.md", "docs/old/c.md", "src/d.py", ".github/e.md"):
        write(tmp_path / name, "x")

    def found(*include: str, exclude: tuple[str, ...] = ()) -> list[str]:
        files = scan_inputs([tmp_path], Patterns(include, exclude)).files
        return [path.relative_to(tmp_path).as_posix() for path in files]

    assert found("*.md") == ["a.md", "docs/b.md", "docs/old/c.md"]
    assert found("docs/", "*.py", exclude=("old/",)) == ["docs/b.md", "src/d.py"]
    assert found(exclude=("*.md", "/src/*")) == ["a.log"]
    (hidden,) = scan_inputs([tmp_path / ".github"]).files
    assert hidden.name == "e.md"
    assert scan_inputs([tmp_path / "a.log"], Patterns(exclude=("*.log",))).files
    with pytest.raises(InvalidInputError, match=r"expected patterns as in \.gitignore"):
        found("!")


def test_a_kv_store_below_a_directory_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "x")
    write(tmp_path / "format" / "b.txt", "x")
    write(tmp_path / "c" / "format", "no store")
    os.mkfifo(tmp_path / "format" / "format")
    open_store(tmp_path / "kv", ram_bytes=0, disk_bytes=None).close()
    assert any(path.is_file() for path in (tmp_path / "kv").iterdir())
    inputs = scan_inputs([tmp_path])
    assert [path.name for path in inputs.files] == ["a.txt", "format", "b.txt"]
    assert inputs.skipped == {"not a file": [str(tmp_path / "format" / "format")]}


def test_a_file_named_explicitly_is_kept_and_a_missing_one_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", bytes(9))
    assert scan_inputs([tmp_path, path]) == ([path], {})
    with pytest.raises(InvalidInputError, match="does not exist"):
        scan_inputs([tmp_path / "gone"])


@pytest.mark.parametrize(
    ("matter", "title", "metadata"),
    [
        ("title: The plan\ndate: 2024-05-01\ndraft: true", "The plan", {"date": "2024-05-01", "draft": True}),
        ("tags: [a, b]\nnone:\nwho: {name: Kim}", "Head", {"tags": ["a", "b"], "who": '{"name": "Kim"}'}),
        ("file_date: 2020-01-01\n1: one", "Head", {"file_date": "2020-01-01", "1": "one"}),
        ("b: &b [*b]\nd: {2024-05-01: x}", "Head", {"b": "[[...]]", "d": "{datetime.date(2024, 5, 1): 'x'}"}),
        ("title: ' '\ndate: 2024-99-99", "Head", {}),
        ("no: yaml: here", "Head", {}),
        ("only a line", "Head", {}),
        ("- a list", "Head", {}),
    ],
)  # fmt: skip
def test_the_yaml_before_a_markdown_file_is_its_metadata(
    tmp_path: Path, matter: str, title: str, metadata: dict[str, Any]
) -> None:
    text = f"---\n{matter}\n---\n\n# Head\n\nText.\n"
    (document,) = read_documents(write(tmp_path / "a.md", text))
    assert (document.text, document.title) == (text, title)
    assert document.metadata == {**DATED, **metadata}
    (plain,) = read_documents(write(tmp_path / "a.txt", text))
    assert plain.metadata == DATED


def test_a_file_that_was_only_touched_is_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "Text.")
    (before,) = read_documents(path)
    os.utime(path, (1e9, 1e9))
    (after,) = read_documents(path)
    assert (before.metadata["file_date"], after.metadata["file_date"]) == (
        "1970-01-01",
        "2001-09-09",
    )
    assert digest_of(before) == digest_of(after)


def test_the_digest_changes_with_text_title_and_metadata_only() -> None:
    base = Document("a", "text", "title", {"x": 1, "y": 2})
    assert digest_of(base) == digest_of(Document("b", "text", "title", {"y": 2, "x": 1}))
    changes = (
        {"text": "texts"},
        {"title": "titles"},
        {"metadata": {"x": 1}},
        {"metadata": {"x": True, "y": 2}},
    )
    others = [replace(base, **change) for change in changes]
    assert len({digest_of(document) for document in [base, *others]}) == 5


def test_a_scan_for_the_first_files_does_not_walk_through_all(tmp_path, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text("A text.")
    walked = []
    real = os.walk

    def walk(top, **options):
        for found in real(top, **options):
            walked.append(found[0])
            yield found

    monkeypatch.setattr(os, "walk", walk)
    assert scan_inputs([tmp_path], most=1).files == [tmp_path / "a" / "text.txt"]
    assert walked == [str(tmp_path), str(tmp_path / "a")]
    assert scan_inputs([tmp_path / "b", tmp_path / "a"], most=1).files == [tmp_path / "b/text.txt"]
    with pytest.raises(InvalidInputError, match="does not exist"):
        scan_inputs([tmp_path, tmp_path / "missing"], most=1)
