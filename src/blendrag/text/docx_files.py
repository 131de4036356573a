"""Text of DOCX files in reading order, from the XML that python-docx opens (the extra ``files``).

python-docx itself leaves out what is inside content controls, insertions, text boxes and notes. Here all is
read but deletions, comments and codes of fields. Headings and tables become Markdown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from blendrag.text.tables import markdown_table

#: Columns of a table. A cell that spans several is repeated in each.
MAX_COLUMNS = 1000

_NAMESPACE = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/"
#: Elements that hold no text of the document.
_UNREAD = frozenset({
    "del", "moveFrom", "delText", "instrText", "pPr", "rPr", "tblPr", "tblGrid", "trPr", "tcPr", "sectPr",
    "sdtPr", "sdtEndPr", "rt",
})  # fmt: skip
#: Levels of the outline that are headings of Markdown, and how long a chain of styles is followed.
_LEVELS, _MAX_STYLES = "012345", 10
_CHARACTERS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def read(data: bytes) -> tuple[str, str, str]:
    """Text, the title in the properties and the title in the text, each of which may be empty. Raises many
    types for damaged files."""
    from docx import Document

    document = Document(BytesIO(data))
    for span in document.element.body.iter(f"{_NAMESPACE}gridSpan"):
        _columns(span.get(f"{_NAMESPACE}val", "1"))
    walk = _Walk(document.part)
    blocks = [*walk.blocks(document.element.body)]
    for kind in ("header", "footer"):
        blocks += dict.fromkeys(
            text
            for part in walk.related(kind)
            for text in walk.blocks(part)
            if sum(map(str.isalpha, text)) > 3  # no page numbers
        )
    text = "\n\n".join(filter(None, [*blocks, *walk.noted()]))
    return text, document.core_properties.title or "", walk.title


def _name(element: Any) -> str:
    tag = element.tag
    return tag.rpartition("}")[2] if isinstance(tag, str) else ""


def _value(element: Any, *path: str) -> str | None:
    """The ``w:val`` of a descendant; ``None`` if there is none."""
    for name in path:
        element = element.find(_NAMESPACE + name) if element is not None else None
    return None if element is None else element.get(f"{_NAMESPACE}val", "")


def _inside(element: Any, name: str) -> Iterator[Any]:
    """Rows of a table or cells of a row, inside content controls and insertions too."""
    for child in element:
        if _name(child) == name:
            yield child
        elif _name(child) not in _UNREAD and _name(child) != "tbl":
            yield from _inside(child, name)


class _Walk:
    """One way through a document, which numbers its lists and notes."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._counts: Counter[tuple[str, int]] = Counter()
        self._notes: dict[tuple[str, str], int] = {}
        self._formats: dict[tuple[str, int], str] = {}
        for numbering in self.related("numbering"):
            self._read_formats(numbering)
        self._styles: dict[str, Any] = {
            style.get(f"{_NAMESPACE}styleId"): style.find(f"{_NAMESPACE}pPr")
            for styles in self.related("styles")
            for style in styles.iter(f"{_NAMESPACE}style")
        }
        #: Styles whose name is Title: their ids are in the language of the program.
        self._titles = {"Title"} | {
            style.get(f"{_NAMESPACE}styleId")
            for styles in self.related("styles")
            for style in styles.iter(f"{_NAMESPACE}style")
            if (_value(style, "name") or "").lower() == "title"
        }
        self._found = {"title": "", "heading": ""}
        self._based_on: dict[str, str] = {
            style.get(f"{_NAMESPACE}styleId"): _value(style, "basedOn") or ""
            for styles in self.related("styles")
            for style in styles.iter(f"{_NAMESPACE}style")
        }

    def related(self, kind: str) -> list[Any]:
        """The roots of the parts of this kind."""
        from docx.oxml import parse_xml

        rels = [rel for rel in self._part.rels.values() if not rel.is_external]
        parts = [rel.target_part for rel in rels if rel.reltype == _RELATION + kind]
        return [p.element if hasattr(p, "element") else parse_xml(p.blob) for p in parts]

    def _read_formats(self, numbering: Any) -> None:
        levels = {
            (abstract.get(f"{_NAMESPACE}abstractNumId"), level.get(f"{_NAMESPACE}ilvl")): _value(
                level, "numFmt"
            )
            for abstract in numbering.iter(f"{_NAMESPACE}abstractNum")
            for level in abstract.iter(f"{_NAMESPACE}lvl")
        }
        for number in numbering.iter(f"{_NAMESPACE}num"):
            for (abstract, level), form in levels.items():
                if abstract == _value(number, "abstractNumId"):
                    self._formats[number.get(f"{_NAMESPACE}numId"), int(level)] = form or ""

    def blocks(self, element: Any) -> Iterator[str]:
        """Paragraphs and tables below an element."""
        for child in element:
            name = _name(child)
            if name == "p":
                yield from self._paragraph(child)
            elif name == "tbl":
                yield from self._table(child)
            elif name == "AlternateContent":
                yield from self.blocks(_chosen(child))
            elif name not in _UNREAD:
                yield from self.blocks(child)

    def _paragraph(self, paragraph: Any) -> Iterator[str]:
        boxes: list[Any] = []
        if text := "".join(self._pieces(paragraph, boxes)).strip():
            marks = "#" * self._heading_level(paragraph)
            if marks == "#":
                kind = "title" if self._style(paragraph) in self._titles else "heading"
                self._found[kind] = self._found[kind] or " ".join(text.split())
            text = self._label(paragraph) + text
            yield f"{marks} {' '.join(text.split())}" if marks else text
        for box in boxes:
            yield from self.blocks(box)

    def _pieces(self, element: Any, boxes: list[Any]) -> Iterator[str]:
        for child in element:
            name = _name(child)
            if name == "t":
                yield child.text or ""
            elif name in _CHARACTERS:
                yield _CHARACTERS[name]
            elif name in ("footnoteReference", "endnoteReference"):
                key = name.removesuffix("Reference"), child.get(f"{_NAMESPACE}id", "")
                yield f"[{self._notes.setdefault(key, len(self._notes) + 1)}]"
            elif name == "txbxContent":
                boxes.append(child)
            elif name == "AlternateContent":
                yield from self._pieces(_chosen(child), boxes)
            elif name not in _UNREAD:
                yield from self._pieces(child, boxes)

    @property
    def title(self) -> str:
        """The first paragraph in the style Title, else the first heading of level 1; may be empty."""
        return self._found["title"] or self._found["heading"]

    @staticmethod
    def _style(paragraph: Any) -> str:
        return _value(paragraph.find(f"{_NAMESPACE}pPr"), "pStyle") or ""

    def _heading_level(self, paragraph: Any) -> int:
        """1 to 6 for a heading, whose style or itself has a level of the outline; else 0."""
        own, style = paragraph.find(f"{_NAMESPACE}pPr"), self._style(paragraph)
        if style in self._titles:
            return 1
        for _ in range(_MAX_STYLES):
            level = _value(own, "outlineLvl")
            if level is not None:
                return int(level) + 1 if level in tuple(_LEVELS) else 0
            if style not in self._styles:
                break
            own, style = self._styles[style], self._based_on.get(style, "")
        return 0

    def _label(self, paragraph: Any) -> str:
        """Number or bullet of an item of a list."""
        own = paragraph.find(f"{_NAMESPACE}pPr")
        style = self._styles.get(_value(own, "pStyle") or "")
        for properties in (own, style):
            number = _value(properties, "numPr", "numId")
            if number is not None:
                break
        level = int(_value(own, "numPr", "ilvl") or _value(style, "numPr", "ilvl") or 0)
        form = self._formats.get((number or "", level), "")
        if not number or form in ("", "none"):
            return ""
        for deeper in [key for key in self._counts if key[0] == number and key[1] > level]:
            del self._counts[deeper]
        self._counts[number, level] += 1
        return "  " * level + ("- " if form == "bullet" else f"{self._counts[number, level]}. ")

    def _table(self, table: Any) -> Iterator[str]:
        rows = [row for row in _inside(table, "tr") if _value(row, "trPr", "del") is None]
        if self._is_layout(rows):
            for row in rows:
                for cell in _inside(row, "tc"):
                    yield from self.blocks(cell)
            return
        texts: list[list[str]] = []
        for row in rows:
            cells = [""] * _columns(_value(row, "trPr", "gridBefore") or "0")
            for cell in _inside(row, "tc"):
                merge = cell.find(f"{_NAMESPACE}tcPr/{_NAMESPACE}vMerge")
                text = " ".join(self.blocks(cell))
                if merge is not None and merge.get(f"{_NAMESPACE}val") != "restart" and texts:
                    above = texts[-1][len(cells) : len(cells) + 1]
                    text = text or "".join(above)
                cells += [text] * _columns(_value(cell, "tcPr", "gridSpan") or "1")
                if len(cells) > MAX_COLUMNS:
                    raise ValueError(f"a table has more than {MAX_COLUMNS:,} columns")
            texts.append(cells)
        if any(map(any, texts)):
            yield markdown_table(texts) if len(texts) > 1 else " | ".join(texts[0]).strip()

    @staticmethod
    def _is_layout(rows: list[Any]) -> bool:
        """Whether a table only places text: it has one column, or tables inside."""
        one = all(sum(1 for _ in _inside(row, "tc")) < 2 for row in rows)
        return one or any(next(row.iter(f"{_NAMESPACE}tbl"), None) is not None for row in rows)

    def noted(self) -> Iterator[str]:
        """The notes that the text refers to."""
        for kind in ("footnote", "endnote"):
            for notes in self.related(f"{kind}s"):
                for note in notes:
                    number = self._notes.get((kind, note.get(f"{_NAMESPACE}id", "")))
                    if number is not None:
                        yield f"[{number}] {' '.join(self.blocks(note))}"


def _columns(value: str) -> int:
    if (columns := int(value)) > MAX_COLUMNS:
        raise ValueError(f"a cell spans {columns:,} columns")
    return columns


def _chosen(alternatives: Any) -> Any:
    """The first alternative that has text; Word writes text boxes twice."""
    with_text = (
        each for each in alternatives if next(each.iter(f"{_NAMESPACE}t"), None) is not None
    )
    return next(with_text, ())
