"""No text of a DOCX file is lost in silence: containers, tables, lists and notes are read in order."""

from __future__ import annotations

import io

import pytest

from text.hostile_files import docx, paragraph

files = pytest.importorskip("blendrag.text.docx_files")
python_docx = pytest.importorskip("docx")

_RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def read(body: str, **parts: bytes) -> str:
    """The text of a document with this body, and parts such as ``footnotes``."""
    given = {f"word/{name}.xml": content for name, content in parts.items()}
    links = "".join(
        f'<Relationship Id="p{n}" Type="{_RELATIONS}/{name}" Target="{name}.xml"/>'
        for n, name in enumerate(parts)
    )
    given["word/_rels/document.xml.rels"] = (
        f'<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{links}'
        "</Relationships>"
    ).encode()
    return files.read(docx(body, parts=given))[0]


def run(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


def cell(content: str, properties: str = "") -> str:
    content = content if content.startswith("<") else paragraph(content)
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{content}</w:tc>"


def row(*cells: str) -> str:
    return f"<w:tr>{''.join(each if each.startswith('<w:tc>') else cell(each) for each in cells)}</w:tr>"


def table(*rows: str) -> str:
    return f"<w:tbl><w:tblPr/><w:tblGrid/>{''.join(rows)}</w:tbl>"


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        (f"<w:hyperlink>{run('link')}</w:hyperlink>", "A link b."),
        (
            f"<w:ins>{run('new')}</w:ins><w:del><w:r><w:delText>old</w:delText></w:r></w:del>",
            "A new b.",
        ),
        (f"<w:moveTo>{run('new')}</w:moveTo><w:moveFrom>{run('old')}</w:moveFrom>", "A new b."),
        (f"<w:sdt><w:sdtPr/><w:sdtContent>{run('field')}</w:sdtContent></w:sdt>", "A field b."),
        (f'<w:fldSimple w:instr="DATE">{run("1874")}</w:fldSimple>', "A 1874 b."),
        (f"<w:r><w:instrText>PAGE</w:instrText></w:r>{run('7')}", "A 7 b."),
        (f"<w:smartTag>{run('tag')}</w:smartTag>", "A tag b."),
        ("<w:r><w:t>x</w:t><w:tab/><w:noBreakHyphen/><w:br/></w:r>", "A x\t-\n b."),
    ],
)
def test_text_in_containers_of_a_paragraph_is_read_and_deleted_text_is_not(
    inside: str, text: str
) -> None:
    assert read(f"<w:p>{run('A ')}{inside}{run(' b.')}</w:p>") == text


def test_content_controls_text_boxes_and_tables_are_read_in_order() -> None:
    box = f"<w:txbxContent>{paragraph('In a box.')}</w:txbxContent>"
    compatible = "http://schemas.openxmlformats.org/markup-compatibility/2006"
    drawing = (
        f'<mc:AlternateContent xmlns:mc="{compatible}"><mc:Choice><w:drawing>{box}</w:drawing></mc:Choice>'
        f"<mc:Fallback><w:pict>{box}</w:pict></mc:Fallback></mc:AlternateContent>"
    )
    body = (
        f"<w:sdt><w:sdtContent>{paragraph('Controlled.')}</w:sdtContent></w:sdt>"
        f"{table(row('sku', 'price'), row('P-1', '1|2'))}"
        f"<w:p>{run('With')}<w:r>{drawing}</w:r></w:p>{paragraph('End.')}"
    )
    assert read(body) == (
        "Controlled.\n\n| sku | price |\n| --- | --- |\n| P-1 | 1\\|2 |\n\nWith\n\nIn a box.\n\nEnd."
    )


def test_merged_cells_are_repeated_and_rows_in_controls_are_kept() -> None:
    begin, go_on, wide = '<w:vMerge w:val="restart"/>', "<w:vMerge/>", '<w:gridSpan w:val="2"/>'
    controlled = f"<w:sdt><w:sdtContent>{row('c', 'd', 'e')}</w:sdtContent></w:sdt>"
    gone = f"<w:tr><w:trPr><w:del/></w:trPr>{cell('old')}{cell('old')}</w:tr>"
    text = read(
        table(
            row("", cell("Year", wide)),
            row(cell("a", begin), "1", "2"),
            row(cell("<w:p/>", go_on), "3", "4"),
            controlled,
            gone,
        )
    )
    assert text.split("\n") == [
        "|  | Year | Year |", "| --- | --- | --- |", "| a | 1 | 2 |", "| a | 3 | 4 |", "| c | d | e |",
    ]  # fmt: skip


def test_nested_tables_and_tables_that_place_text_are_read_in_order() -> None:
    inner = table(row("a", "b"), row("1", "2"))
    text = read(table(row(cell(paragraph("Before.") + inner + paragraph("After.")), "Right.")))
    assert text == "Before.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\nAfter.\n\nRight."
    assert read(table(row("One."), row("Two."))) == "One.\n\nTwo."


def test_notes_headers_and_footers_follow_the_text() -> None:
    notes = (
        f'<w:footnotes xmlns:w="{_WORD}"><w:footnote w:id="0" w:type="separator"/>'
        f'<w:footnote w:id="7">{paragraph("A note.")}</w:footnote></w:footnotes>'
    ).encode()
    head = f'<w:hdr xmlns:w="{_WORD}">{paragraph("Harrow Works")}{paragraph("7")}</w:hdr>'.encode()
    text = read(
        f'<w:p>{run("Text")}<w:r><w:footnoteReference w:id="7"/></w:r></w:p>',
        footnotes=notes,
        header=head,
    )
    assert text == "Text[1]\n\nHarrow Works\n\n[1] A note."


def test_lists_keep_their_numbers() -> None:
    letter, made = python_docx.Document(), io.BytesIO()
    for text, style in (("One", "Number"), ("Two", "Number"), ("Dot", "Bullet")):
        letter.add_paragraph(text, f"List {style}")
    letter.save(made)
    assert files.read(made.getvalue())[0] == "1. One\n\n2. Two\n\n- Dot"
