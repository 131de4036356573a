"""The outline of a text: its headings, or the definitions of source code, and what encloses a place.

Markdown (also what readers of HTML, DOCX and XLSX make) and reStructuredText have headings. In source code a
definition goes on until a line with no more indentation. That holds in all common languages as people format
them, takes one pass over the lines, and gives the same cut on every machine. A parser (tree-sitter) would
need a package for each language, whose versions change where chunks are cut.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

#: Characters of a heading, or of the line of a definition, where it is repeated.
MAX_LABEL_CHARS = 120
#: Characters of a line that are looked at.
_LINE_CHARS = 400
#: Levels of definitions that are told apart.
_MAX_DEPTH = 12

_MARKDOWN = frozenset(
    {"md", "markdown", "mdx", "qmd", "rmd", "html", "htm", "docx", "xlsx", "xlsm"}
)
#: Texts without a suffix, and those of JSON lines: Markdown if blank lines surround the headings.
_PERHAPS_MARKDOWN = frozenset({"", "jsonl"})
_RST = frozenset({"rst", "rest"})
_WITHOUT_KEYWORD = (
    "c h cc cpp cxx hh hpp hxx m mm cs java js jsx mjs cjs ts tsx dart groovy scala sh bash"
)
#: Languages in which a function may begin without a keyword.
_BRACES = frozenset(_WITHOUT_KEYWORD.split())
_WITH_KEYWORD = "py pyi pyx rb go rs kt kts swift php lua jl ex exs ps1 r zig sol"
_CODE = _BRACES | frozenset(_WITH_KEYWORD.split())


class Section(NamedTuple):
    """What begins at ``start``: a heading or a definition, with decorators and comments right above it.

    It ends where the next one of the same or a smaller ``depth`` begins. ``label`` is empty for what follows
    a definition. ``body`` is where the text below the heading begins.
    """

    start: int
    body: int
    depth: int
    label: str


class Leaf(NamedTuple):
    """The text from one heading to the next. A heading without text is joined to the next, deeper one."""

    start: int
    end: int
    depth: int


class Outline:
    """The sections of a text, ascending. ``name``: the file's, for source code."""

    def __init__(self, sections: Sequence[Section] = (), name: str = "") -> None:
        self.sections = sections
        self.name = name
        self._parents: list[int] = []
        within: list[int] = []
        for number, section in enumerate(sections):
            while within and sections[within[-1]].depth >= section.depth:
                within.pop()
            self._parents.append(within[-1] if within else -1)
            within.append(number)

    def leaves(self, text: str) -> list[Leaf]:
        """The whole text in pieces that no heading divides."""
        made: list[Leaf] = []
        begin = depth = 0
        is_open = False
        for number, section in enumerate(self.sections):
            if number == 0 and text[: section.start].strip():
                made.append(Leaf(0, section.start, 0))
            if not is_open:
                begin, depth = (section.start if made else 0), section.depth
            is_last = number + 1 == len(self.sections)
            end = len(text) if is_last else self.sections[number + 1].start
            is_deeper = not is_last and self.sections[number + 1].depth > section.depth
            is_open = is_deeper and not text[section.body : end].strip()
            if not is_open:
                made.append(Leaf(begin, end, depth))
        return made or [Leaf(0, len(text), 0)]

    def section_at(self, text: str, place: int) -> tuple[int, bool]:
        """The number of the last section that begins at or before a place, -1 if there is none, and whether
        the place is its beginning."""
        number = bisect_right(self.sections, place, key=lambda section: section.start) - 1
        if number < 0:
            return number, False
        start = self.sections[number].start
        return number, place == start or (
            place - start < _LINE_CHARS and text[start:place].isspace()
        )

    def path(self, number: int, is_beginning: bool) -> list[str]:
        """The labels of what encloses a place of :meth:`section_at`, outermost first, without a heading that
        begins there."""
        labels = []
        at = self._parents[number] if number >= 0 and is_beginning else number
        while at >= 0:
            labels.append(self.sections[at].label)
            at = self._parents[at]
        return [label for label in reversed(labels) if label]


def outline_of(text: str, source: str = "") -> Outline:
    """The outline of a text. ``source``: name of its file, whose suffix tells the kind."""
    path = PurePosixPath(source)
    suffix = "jsonl" if ".jsonl#" in source else path.suffix.lower().lstrip(".")
    if suffix in _CODE:
        return Outline(list(_definitions(text, suffix)), path.name)
    if suffix in _RST:
        return Outline(list(_underlined(text)))
    if suffix in _MARKDOWN:
        return Outline(list(markdown_headings(text)))
    if suffix in _PERHAPS_MARKDOWN:
        headings = list(markdown_headings(text))
        return Outline(headings if all(_is_apart(text, each) for each in headings) else ())
    return Outline()


def _label(line: str) -> str:
    """A heading on one line of limited length."""
    line = " ".join(line[: 4 * MAX_LABEL_CHARS].split())
    return line if len(line) <= MAX_LABEL_CHARS else f"{line[: MAX_LABEL_CHARS - 1]}…"


# -- headings ---------------------------------------------------------------------------------------

_MARKS = re.compile(
    r"(?m)^ {0,3}(?:(?P<fence>`{3,}|~{3,})|(?P<marks>#{1,6})(?=[ \t\n]|\Z)|(?P<under>==+|--+)[ \t]*$)"
)
#: Lines above dashes that are no heading: items, quotes, tables, and what is underlined itself.
_NOT_UNDERLINED = re.compile(r"[ \t]{4}|[ \t]*(?:$|[-*+>|#=~`]|\d+[.)] )")


def markdown_headings(text: str) -> Iterator[Section]:
    """Headings outside of code blocks and front matter."""
    fence, begin, after = "", 0, -1
    if text.startswith("---\n") and (front := text.find("\n---\n", 3, 1 << 16)) > 0:
        begin = front + 5
    for mark in _MARKS.finditer(text, begin):
        line_end = text.find("\n", mark.end())
        line_end = len(text) if line_end < 0 else line_end
        if mark["fence"]:
            beside = text[mark.end() : line_end].strip()
            if not fence and not (mark["fence"][0] == "`" and "`" in beside):
                fence = mark["fence"]
            elif fence and mark["fence"].startswith(fence) and not beside:
                fence = ""
        elif fence:
            continue
        elif mark["marks"]:
            # a regular expression takes quadratic time for the number signs that may close it
            words = text[mark.end() : line_end].rstrip(" \t").rstrip("#")
            if label := _label(words):
                yield Section(mark.start(), line_end, len(mark["marks"]), label)
            after = line_end
        elif mark.start() > begin:
            start = max(text.rfind("\n", after + 1, mark.start() - 1) + 1, after + 1, begin)
            line = text[start : mark.start() - 1]
            is_alone = start < 2 or start == begin or text[start - 2 : start] == "\n\n"
            if is_alone and len(line) < _LINE_CHARS and not _NOT_UNDERLINED.match(line):
                yield Section(start, line_end, 1 if mark["under"][0] == "=" else 2, _label(line))
            after = line_end


def _is_apart(text: str, section: Section) -> bool:
    """Whether blank lines, the beginning or the end of the text surround a heading."""
    before = text[max(0, section.start - 2) : section.start]
    return before in ("", "\n", "\n\n") and text[section.body : section.body + 2] in (
        "",
        "\n",
        "\n\n",
    )


_UNDERLINE = re.compile(r"""(?m)^([=\-~^"'`#*+.:_])\1{2,}[ \t]*$""")


def _underlined(text: str) -> Iterator[Section]:
    """The headings of reStructuredText: underlined, some with a line above. Each new style is deeper."""
    depths: dict[tuple[str, bool], int] = {}
    above, done = -1, 0
    for line in _UNDERLINE.finditer(text):
        start = text.rfind("\n", done, max(line.start() - 1, 0)) + 1
        start = max(start, done)
        words = text[start : max(line.start() - 1, start)]
        is_heading = words.strip() and len(words.rstrip()) <= len(line[0].rstrip())
        if is_heading and len(words) < _LINE_CHARS and not _UNDERLINE.match(words):
            has_above = above >= 0 and above == start - 1
            first = text.rfind("\n", done, above) + 1 if has_above else start
            depth = depths.setdefault((line[1], has_above), len(depths) + 1)
            yield Section(max(first, done), line.end(), depth, _label(words))
            above, done = -1, line.end()
        else:
            above = line.end()


# -- definitions ------------------------------------------------------------------------------------

_MODIFIERS = (
    "export|default|public|private|protected|internal|static|final|abstract|async|sealed|partial|override|"
    "virtual|open|data|inline|extern|unsafe|pub|const|local|declare|readonly|suspend|mutating|operator|"
    "native|synchronized|constexpr|enum"
)
_KEYWORDS = (
    "class|interface|struct|enum|trait|impl|fn|func|fun|function|def|defp|defmodule|module|namespace|object|"
    "record|protocol|extension|union|type|contract"
)
#: A line that begins a definition with a keyword.
_DEFINITION = re.compile(
    rf"(?:(?:{_MODIFIERS})(?:\([\w: ]{{1,40}}\))?[ \t]+){{0,6}}"
    rf"(?:{_KEYWORDS})\b[ \t]*[\w$*(<&~@'\"\[:]"
)
_ARROW = re.compile(
    r"(?:export[ \t]+)?(?:default[ \t]+)?(?:const|let|var)[ \t]+[\w$]+(?:[ \t]*:[^=\n]{1,80})?[ \t]*=[ \t]*"
    r"(?:async[ \t]*)?(?:function\b|\(|[\w$]+[ \t]*=>)"
)
#: A function of C or a method, up to its parameters, and what only looks like one.
_FUNCTION = re.compile(r"[A-Za-z_~$][\w \t*&<>,:\[\]~.?$@]*\(")
_STATEMENT = re.compile(
    r"(?:if|for|foreach|while|switch|catch|else|return|do|try|using|lock|synchronized|with|new|await|throw|"
    r"yield|case|super|this|typeof|sizeof|assert)\b"
)
_COMMENT = re.compile(r"#|//|/\*|\*|--[ \t]|;;|@|\[[A-Z]")
#: The line goes on with what is above it.
_CONTINUATION = re.compile(
    r"[)\]}{]|end\b|else\b|elsif\b|elif\b|except\b|rescue\b|finally\b|catch\b|then\b"
)
_LINE = re.compile(r"(?m)^[ \t]*(?=[^\s])")
_TAB_COLUMNS = 4


def _definitions(text: str, suffix: str) -> Iterator[Section]:
    """Definitions, and what follows the end of one."""
    within: list[int] = []  # columns of the definitions that are open
    above: _Above | None = None
    is_python, quotes, end = suffix.startswith("py"), "", -1
    for found in _LINE.finditer(text):
        start, begin = found.span()
        last, end = end, text.find("\n", begin)
        end = len(text) if end < 0 else end
        line = text[begin : min(end, begin + _LINE_CHARS)]
        if is_python:
            was_quoted, quotes = quotes, _open_quotes(text[begin:end], quotes)
            if was_quoted:
                continue
        column = len(found[0].expandtabs(_TAB_COLUMNS))
        is_comment = _COMMENT.match(line) is not None
        if above is not None and not above.is_decorator and start > last + 1:
            above = None  # a blank line parts a comment from what follows
        if is_comment:
            if above is None or column < above.column:
                above = _Above(start, column, line[0] in "@[")
            continue
        if above is not None and column > above.column:
            if above.is_decorator:
                continue  # an argument
            above = None
        if _CONTINUATION.match(line):
            continue
        is_definition = _begins(text, line, end, suffix)
        is_after = bool(within) and within[-1] >= column
        while within and within[-1] >= column:
            within.pop()
        if is_definition or is_after:
            first = above.start if above is not None and above.column == column else start
            label = _signature(line, column) if is_definition else ""
            yield Section(first, end, min(len(within), _MAX_DEPTH) + 1, label)
        if is_definition:
            within.append(column)
        above = None


class _Above(NamedTuple):
    """The first of the comments and decorators above a line."""

    start: int
    column: int
    is_decorator: bool


def _begins(text: str, line: str, end: int, suffix: str) -> bool:
    """Whether a definition begins with this line, which ends at ``end``."""
    if _DEFINITION.match(line) or _ARROW.match(line):
        return True
    if suffix not in _BRACES or _STATEMENT.match(line) or not _FUNCTION.match(line):
        return False
    ending = line.rstrip()[-1:]
    return ending == "{" or (
        ending == ")" and text[end + 1 : end + _LINE_CHARS].lstrip()[:1] == "{"
    )


def _signature(line: str, column: int) -> str:
    return " " * min(column, MAX_LABEL_CHARS // 4) + _label(line.rstrip(" \t{"))


_QUOTES = re.compile(r"\"{3}|'{3}|#")


def _open_quotes(line: str, quotes: str) -> str:
    """The triple quotes that are open at the end of a line of Python, which begins inside ``quotes``."""
    for mark in _QUOTES.finditer(line):
        if quotes:
            quotes = "" if mark[0] == quotes else quotes
        elif mark[0] == "#":
            break
        else:
            quotes = mark[0]
    return quotes
