"""The Prompt Markup Language (Prompt Cache, §3.2): text → :class:`Schema` or :class:`PromptMarkup`.

The markup is XML. Document types are refused, and with them all entities but the five of XML. Every error is
a :class:`SchemaError` with file and line. ``docs/schemas.md`` describes the tags and what whitespace means.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress, islice
from xml.parsers import expat

from blendrag.errors import SchemaError
from blendrag.option import ALIKE, did_you_mean, near_names
from blendrag.schema.nodes import (
    ROLES,
    Argument,
    Import,
    Location,
    Module,
    Parameter,
    PromptMarkup,
    PromptNode,
    Role,
    Scaffold,
    Schema,
    SchemaNode,
    Text,
    Union,
    walk,
    without_roles,
)
from blendrag.wording import a_type, quoted

MAX_BYTES = 64 * 1024**2
#: Tags inside each other. Deeper markup is a mistake or an attack on the recursion below.
MAX_DEPTH = 64
MAX_NAME_CHARS = 200
#: Names that an unknown one is compared with, which takes time that is quadratic in their length.
MAX_COMPARED = 1000
MAX_COMPARED_CHARS = 60
#: Tokens of one parameter.
MAX_TOKENS = 1_000_000

PARAMETERS = ("param", "parameter")
#: Names that no module can have, as imports are tags.
RESERVED = ("schema", "prompt", "module", "union", "scaffold", *PARAMETERS, *ROLES)

# These cannot occur in XML.
_COMMENT = "\0"
_TAG, _PARAMETER = "\5", "\6"
_COMMENT_LINES = re.compile(r"^[ \t]*\0[\0 \t]*\n", re.MULTILINE)
_SPACE = " \t\r\n"
#: Stand for whitespace that is written as a reference, as in &#10;, which is text and no layout.
_REFERENCED = dict(zip(_SPACE, "\1\2\3\4", strict=True))
_WHITESPACE = {ord(mark): space for space, mark in _REFERENCED.items()}
_CODES = expat.errors.codes
_NO_TAG = (_CODES[expat.errors.XML_ERROR_NO_ELEMENTS], _CODES[expat.errors.XML_ERROR_SYNTAX])


@dataclass(slots=True)
class _Run:
    """The text between two tags."""

    pieces: list[str]
    at: Location
    is_blank: bool = True


@dataclass(slots=True)
class _Element:
    """One tag as XML has it."""

    tag: str
    attributes: dict[str, str]
    at: Location
    keeps_space: bool
    runs: list[_Run]
    """One more than ``children``: before, between and after them."""
    children: list[_Element] = field(default_factory=list)

    def wrong(self, why: str) -> SchemaError:
        return SchemaError(self.at, why)


class ProgramMarkup(str):
    """Markup that a program made. Errors name its place in the program."""

    at: Location

    @classmethod
    def of(cls, text: str, at: Location) -> ProgramMarkup:
        markup = cls(text)
        markup.at = at
        return markup


def parse_schema(text: str, file: str = "<string>") -> Schema:
    """The schema that ``text`` describes. ``file`` is the name in errors. Raises :class:`SchemaError`."""
    schema, wrong = check_schema(text, file)
    if wrong:
        raise wrong[0]
    return schema


def check_schema(text: str, file: str = "<string>") -> tuple[Schema, list[SchemaError]]:
    """What can be read of the schema that ``text`` describes, and all that is wrong with it.

    Raises :class:`SchemaError` for text that is no XML of a schema with a name.
    """
    root = _parsed(text, file, "schema")
    name = _name(root, _attributes(root, ("name",))["name"], "schema")
    reader = _SchemaReader()
    children = tuple(reader.nodes(root, None, in_role=False))
    scaffolds = []
    for child in root.children:
        if child.tag == "scaffold":
            with reader.collecting():
                scaffolds.append(_scaffold(child))
    schema = Schema(name, children, tuple(scaffolds), root.at)
    wrong = reader.wrong
    if not wrong and not children:
        wrong.append(root.wrong("the schema is empty, expected text or <module>"))
    wrong += _name_errors(schema)
    if not wrong:  # else a scaffold may name what could not be read
        for scaffold in scaffolds:
            with reader.collecting():
                _check_scaffold(schema, scaffold)
    return schema, wrong


def parse_prompt(text: str, file: str = "<string>") -> PromptMarkup:
    """The prompt that ``text`` describes; not yet compared with its schema. Raises :class:`SchemaError`."""
    root = _parsed(text, file, "prompt")
    schema = _attributes(root, ("schema",))["schema"]
    return PromptMarkup(schema, tuple(_prompt_nodes(root, "prompt")), root.at)


# -- XML ------------------------------------------------------------------------------------------


def _parsed(text: str, file: str, root_tag: str) -> _Element:
    if not isinstance(text, str):
        raise SchemaError(
            Location(file, 1), f"{quoted(text, 40)} is {a_type(text)}, expected a str"
        )
    try:
        data = text.removeprefix("\ufeff").encode("utf-8")
    except UnicodeEncodeError as exc:
        at = Location(file, text.count("\n", 0, exc.start) + 1)
        raise SchemaError(
            at, f"lone surrogate {text[exc.start]!r}, expected valid Unicode; decode as UTF-8"
        ) from exc
    if len(data) > MAX_BYTES:
        raise SchemaError(
            Location(file, 1),
            f"{len(data):,} bytes, expected at most {MAX_BYTES:,}; split the schema",
        )
    program = text.at if isinstance(text, ProgramMarkup) else None
    root = _TreeBuilder(file, program).build(data)
    if root.tag != root_tag:
        raise root.wrong(f"the root is <{root.tag}>, expected <{root_tag}>")
    return root


class _TreeBuilder:
    """Builds the tree of elements from expat's events."""

    def __init__(self, file: str, program: Location | None) -> None:
        self._file = file
        self._program = program
        self._open: list[_Element] = []
        self._root: _Element | None = None
        self._parser = expat.ParserCreate("utf-8")
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text
        self._parser.CommentHandler = self._comment
        self._parser.ProcessingInstructionHandler = self._comment
        self._parser.StartDoctypeDeclHandler = self._refuse_doctype

    def build(self, data: bytes) -> _Element:
        self._data = data
        try:
            self._parser.Parse(data, True)
        except expat.ExpatError as exc:
            at = self._location(exc.lineno, exc.offset)
            raise SchemaError(at, self._what_is_malformed(exc)) from exc
        assert self._root is not None  # expat reports a file without elements
        return self._root

    def _here(self) -> Location:
        return self._location(self._parser.CurrentLineNumber, self._parser.CurrentColumnNumber)

    def _location(self, line: int, offset: int) -> Location:
        return self._program or Location(self._file, line, offset + 1)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        at = self._here()
        if len(self._open) == MAX_DEPTH:
            raise SchemaError(at, f"<{tag:.40}> is inside {MAX_DEPTH} tags, expected fewer")
        if ":" in tag:
            raise SchemaError(at, f"<{tag:.40}> has a namespace, expected a tag without one")
        keeps_space = bool(self._open) and self._open[-1].keeps_space
        space = attributes.pop("xml:space", None)
        if space not in (None, "preserve", "default"):
            raise SchemaError(
                at, f"xml:space is {quoted(space, 40)}, expected 'preserve' or 'default'"
            )
        if space is not None:
            keeps_space = space == "preserve"
        element = _Element(tag, attributes, at, keeps_space, [_Run([], at)])
        if self._open:
            self._open[-1].children.append(element)
            self._open[-1].runs.append(_Run([], at))
        else:
            self._root = element
        self._open.append(element)

    def _end(self, tag: str) -> None:
        self._open.pop()

    def _text(self, data: str) -> None:
        run = self._open[-1].runs[-1]
        if data in _REFERENCED and self._data[self._parser.CurrentByteIndex] == ord("&"):
            data = _REFERENCED[data]
        run.pieces.append(data)
        if run.is_blank and not data.isspace():
            run.is_blank = False
            run.at = self._here()

    def _comment(self, *_: str) -> None:
        if self._open:
            self._open[-1].runs[-1].pieces.append(_COMMENT)

    def _refuse_doctype(self, *_: object) -> None:
        raise SchemaError(
            self._here(), "<!DOCTYPE> is refused, as entities can expand without limit; remove it"
        )

    def _what_is_malformed(self, error: expat.ExpatError) -> str:
        innermost = self._open[-1] if self._open else None
        opened = innermost and f"</{innermost.tag:.80}> for the tag of line {innermost.at.line}"
        if error.code == _CODES[expat.errors.XML_ERROR_TAG_MISMATCH]:
            return f"this closing tag fits no open tag, expected {opened}"
        if error.code == _CODES[expat.errors.XML_ERROR_NO_ELEMENTS] and opened:
            return f"the text ends, expected {opened}"
        if self._root is None and error.code in _NO_TAG:
            return "there is no tag, expected <schema name=…> or <prompt schema=…>"
        if self._root is not None and not opened:
            return "there is more after the last closing tag, expected one <schema> or <prompt> per file"
        if error.code == _CODES[expat.errors.XML_ERROR_DUPLICATE_ATTRIBUTE]:
            return "an attribute is given twice, expected each name once"
        if error.code == _CODES[expat.errors.XML_ERROR_UNDEFINED_ENTITY]:
            return (
                "unknown entity, expected &lt; &gt; &amp; &quot; &apos; or a number such as &#160;; write "
                "&amp; for &"
            )
        if error.code == _CODES[expat.errors.XML_ERROR_INVALID_TOKEN]:
            return (
                "not valid XML; put values of attributes in quotation marks, write &lt; for < and &amp; for "
                "& in text, and leave out control characters"
            )
        return f"not valid XML: {expat.errors.messages.get(error.code, error.code)}"


# -- whitespace -----------------------------------------------------------------------------------


def _content(element: _Element, drops_last_break: bool = False) -> Iterator[Text | _Element]:
    """Texts and tags inside ``element``, without the whitespace that only lays the markup out."""
    texts = ["".join(run.pieces) for run in element.runs]
    if element.keeps_space:
        texts = [text.replace(_COMMENT, "") for text in texts]
    else:
        texts = _without_layout(texts, element.children, drops_last_break)
    for text, run, child in zip(texts, element.runs, [*element.children, None], strict=True):
        if text:
            yield Text(text.translate(_WHITESPACE), run.at)
        if child is not None:
            yield child


def _without_layout(
    texts: list[str], children: list[_Element], drops_last_break: bool
) -> list[str]:
    """``texts[i]`` precedes ``children[i]``; the last text follows all children.

    A line with text or a parameter is kept with its line break, less the indentation that all such lines have
    in common. Other lines are layout, except blank lines between two lines of text.
    """
    marks = [_PARAMETER if child.tag in PARAMETERS else _TAG for child in children]
    pairs = zip(map(_without_comments, texts), [*marks, ""], strict=True)
    lines = "".join(text + mark for text, mark in pairs).split("\n")
    is_written = [bool(line.strip(f" \t{_TAG}")) for line in lines]
    indents = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines]
    common = os.path.commonprefix([*compress(indents[1:], is_written[1:])])  # noqa: RUF071
    kept, blank = "", ""
    follows_text = False
    for i, line in enumerate(lines):
        if is_written[i]:
            kept += blank + _without_gaps(line[len(common) if i else 0 :])
            kept += "\n" * (i < len(lines) - 1)
        elif _TAG not in line and follows_text:
            blank += "\n"
            continue
        else:
            kept += _TAG * line.count(_TAG)
        blank, follows_text = "", is_written[i]
    if drops_last_break:
        kept = kept.removesuffix("\n")
    return re.split(f"[{_TAG}{_PARAMETER}]", kept)


def _without_comments(text: str) -> str:
    """A comment that is alone on its lines goes with them; the first line belongs to what is before."""
    first, separator, rest = text.partition("\n")
    return (first + separator + _COMMENT_LINES.sub("", rest)).replace(_COMMENT, "")


def _without_gaps(line: str) -> str:
    """A line without the blanks between tags, but for those next to a parameter."""
    parts = re.split(f"([{_TAG}{_PARAMETER}])", line)
    for i in range(0, len(parts), 2):
        if not parts[i].strip(" \t") and _PARAMETER not in parts[max(i - 1, 0) : i + 2]:
            parts[i] = ""
    return "".join(parts)


# -- tags → nodes ---------------------------------------------------------------------------------


class _SchemaReader:
    """Tags of a schema → nodes. A tag that is wrong is left out, and reading continues after it."""

    def __init__(self) -> None:
        self.wrong: list[SchemaError] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except SchemaError as error:
            self.wrong.append(error)

    def nodes(self, element: _Element, module: str | None, in_role: bool) -> Iterator[SchemaNode]:
        for item in _content(element, drops_last_break=element.tag in ROLES):
            if isinstance(item, Text):
                yield item
            elif item.tag != "scaffold" or element.tag != "schema":
                with self.collecting():
                    yield self._node(item, element, module, in_role)

    def _node(
        self, item: _Element, parent: _Element, module: str | None, in_role: bool
    ) -> SchemaNode:
        if item.tag == "module":
            return self._module(item, in_role)
        if item.tag == "union":
            return self._union(item, in_role)
        if item.tag in PARAMETERS:
            if module is None:
                raise item.wrong(
                    f"<{item.tag}> is outside of a module, expected inside <module name=…>"
                )
            return _parameter(item)
        if item.tag not in ROLES:
            raise item.wrong(_misplaced(item, parent))
        if in_role:
            raise item.wrong(f"<{item.tag}> is inside a role, expected outside")
        _attributes(item, ())
        return Role(item.tag, tuple(self.nodes(item, module, in_role=True)), item.at)

    def _module(self, element: _Element, in_role: bool) -> Module:
        name = _name(element, _attributes(element, ("name",))["name"], "module")
        if name in RESERVED:
            raise element.wrong(f"{name!r} is a tag of the markup, expected another name")
        before = len(self.wrong)
        children = tuple(self.nodes(element, name, in_role))
        if not children and len(self.wrong) == before:
            raise element.wrong(f"module {name!r} is empty, expected text or modules in it")
        seen: set[str] = set()
        for node in without_roles(children):
            if isinstance(node, Parameter):
                if node.name in seen:
                    error = f"module {name!r} has a parameter {node.name!r} already, expected another name"
                    self.wrong.append(SchemaError(node.at, error))
                seen.add(node.name)
        return Module(name, children, element.at)

    def _union(self, element: _Element, in_role: bool) -> Union:
        _attributes(element, ())
        before = len(self.wrong)
        members = []
        for item in _content(element):
            with self.collecting():
                if isinstance(item, Text):
                    if item.text.strip(_SPACE):
                        raise SchemaError(
                            item.at,
                            f"text {quoted(item.text.strip(_SPACE), 40)} in <union>, expected only <module>",
                        )
                elif item.tag != "module":
                    raise item.wrong(f"<{item.tag:.80}> in <union>, expected only <module>")
                else:
                    members.append(self._module(item, in_role))
        if not members and len(self.wrong) == before:
            raise element.wrong("<union> is empty, expected <module> tags in it")
        return Union(tuple(members), element.at)


def _misplaced(item: _Element, parent: _Element) -> str:
    if item.tag == "scaffold":
        return f"<scaffold> is inside <{parent.tag}>, expected directly inside <schema>"
    allowed = ["module", "union", *ROLES]
    allowed += ["param"] if parent.tag == "module" else []
    allowed += ["scaffold"] if parent.tag == "schema" else []
    tags = ", ".join(f"<{tag}>" for tag in allowed)
    return (
        f"<{item.tag:.80}> is no tag of a schema, expected {tags}{suggestion(item.tag, allowed)}; "
        "write &lt; for < in text"
    )


def _parameter(element: _Element) -> Parameter:
    lengths = [name for name in ("len", "length") if name in element.attributes]
    if len(lengths) != 1:
        found = "both len and length" if lengths else "no len"
        raise element.wrong(f"<{element.tag}> has {found}, expected name and len")
    attributes = _attributes(element, ("name", lengths[0]))
    name = _name(element, attributes["name"], "parameter")
    given = attributes[lengths[0]]
    if not re.fullmatch(r"0{0,9}[1-9][0-9]{0,6}", given) or int(given) > MAX_TOKENS:
        raise element.wrong(
            f"{lengths[0]} of parameter {name!r} is {quoted(given, 40)}, expected a number of "
            "tokens from 1 to "
            f"{MAX_TOKENS:,}"
        )
    if element.children or any(
        text.strip(_SPACE) for text in "".join(element.runs[0].pieces).split(_COMMENT)
    ):
        raise element.wrong(f"<{element.tag}> has content, expected none")
    return Parameter(name, int(given), element.at)


def _scaffold(element: _Element) -> Scaffold:
    names = tuple(_attributes(element, ("modules",))["modules"].split())
    if any(isinstance(item, _Element) or item.text.strip(_SPACE) for item in _content(element)):
        raise element.wrong(
            "<scaffold> has content, expected names only, as in <scaffold modules='a b'/>"
        )
    if len(names) < 2 or len(set(names)) < len(names):
        raise element.wrong(
            f"modules of <scaffold> is {quoted(' '.join(names), 80)}, expected two or more different modules"
        )
    return Scaffold(names, element.at)


def _prompt_nodes(element: _Element, inside: str) -> Iterator[PromptNode]:
    for item in _content(element, drops_last_break=inside != "import"):
        if isinstance(item, Text):
            yield item
        elif item.tag in ROLES and inside == "prompt":
            _attributes(item, ())
            yield Role(item.tag, tuple(_prompt_nodes(item, "role")), item.at)
        elif item.tag in RESERVED:
            why = "is inside another tag" if item.tag in ROLES else "is a tag of schemas"
            raise item.wrong(f"<{item.tag}> {why}, expected an import such as <name/>, or text")
        else:
            arguments = tuple(
                Argument(name, text, item.at) for name, text in _attributes(item, None).items()
            )
            children = tuple(_prompt_nodes(item, "import"))
            yield Import(item.tag, arguments, children, item.at)  # type: ignore[arg-type]


def _attributes(element: _Element, required: tuple[str, ...] | None) -> dict[str, str]:
    """The attributes, which are exactly ``required``, or any with ``None``."""
    for name in element.attributes:
        if ":" in name or (required is not None and name not in required):
            expected = ", ".join(required or ()) or "no attributes"
            raise element.wrong(
                f"<{element.tag:.80}> has no attribute {quoted(name, 80)}, expected {expected}"
            )
    for name in required or ():
        if name not in element.attributes:
            raise element.wrong(f"<{element.tag}> has no {name}, expected <{element.tag} {name}=…>")
    return element.attributes


def _name(element: _Element, name: str, of: str) -> str:
    if is_name(name):
        return name
    raise element.wrong(
        f"name of the {of} is {quoted(name, 60)}, expected a letter or _, then letters, digits, "
        "'.', '-' or '_', "
        f"at most {MAX_NAME_CHARS} characters"
    )


def is_name(name: str) -> bool:
    """Whether ``name`` can be the name of a tag or an attribute."""
    if len(name) > MAX_NAME_CHARS or not re.fullmatch(r"[^\W\d][\w.-]*", name):
        return False
    if name.isascii():
        return True
    try:  # XML's letters are not Python's
        expat.ParserCreate("utf-8").Parse(f"<{name}/>".encode(), True)
    except (expat.ExpatError, UnicodeEncodeError):
        return False
    return True


# -- the whole schema -----------------------------------------------------------------------------


def _name_errors(schema: Schema) -> Iterator[SchemaError]:
    seen: dict[str, Module] = {}
    for node in walk(schema.children):
        if isinstance(node, Module):
            first = seen.setdefault(node.name, node)
            if first is not node:
                yield SchemaError(
                    node.at,
                    f"module {node.name!r} exists in line {first.at.line} already, expected another name",
                )


def _check_scaffold(schema: Schema, scaffold: Scaffold) -> None:
    chosen: dict[Union, Module] = {}
    places = schema.places
    for name in scaffold.modules:
        if name not in schema.modules:
            raise SchemaError(
                scaffold.at,
                f"scaffold names {quoted(name, 80)}, expected a module of the schema"
                f"{suggestion(name, schema.modules)}",
            )
        for union, member in places[name].choices:
            if chosen.setdefault(union, member) is not member:
                raise SchemaError(
                    scaffold.at,
                    f"scaffold needs {chosen[union].name!r} and {member.name!r}, which are in one union "
                    f"(line {union.at.line}), expected modules that a prompt can import together",
                )


def suggestion(name: str, names: Iterable[str]) -> str:
    """``" (did you mean 'miami'?)"``, or nothing."""
    if len(name) > MAX_COMPARED_CHARS:
        return ""
    compared = [each for each in islice(names, MAX_COMPARED) if len(each) <= MAX_COMPARED_CHARS]
    near = near_names([name], compared, ALIKE)
    return f" ({did_you_mean(map(repr, near), '')})" if near else ""
