"""A prompt becomes parts in reading order, or an error that says how it does not fit its schema."""

from __future__ import annotations

import pytest

from blendrag.errors import SchemaError
from blendrag.schema.checking import check_context, check_lengths, resolve
from blendrag.schema.layout import lay_out
from blendrag.schema.markup import parse_prompt, parse_schema
from blendrag.schema.parts import CachedText, FilledParameter, Part
from schema.travel import PROMPT, TRAVEL, words

LETTERS = """<schema name="s">0<module name="a">a<param name="p" len="2"/></module>1
<union><module name="b">b</module><module name="c">c<module name="d">d</module>C</module></union>
2<module name="e">e</module><user>3<module name="f">f</module></user>4</schema>"""


def written(part: Part) -> str:
    if isinstance(part, FilledParameter):
        return f"{part.parameter.name}={part.argument.text}"
    return part.text.text.strip() if isinstance(part, CachedText) else part.text.text.upper()


def parts_of(content: str, schema: str = LETTERS) -> list[Part]:
    parsed = parse_schema(schema, "s.xml")
    return resolve(
        parsed, parse_prompt(f'<prompt schema="{parsed.name}">{content}</prompt>', "p.xml")
    )


def reading(content: str) -> str:
    return " ".join(map(written, parts_of(content)))


def test_parts_of_the_prompt_of_the_paper():
    parts = resolve(parse_schema(TRAVEL), parse_prompt(PROMPT))
    owners = [
        part.module.name if isinstance(part, CachedText) and part.module else "" for part in parts
    ]
    assert "".join(map(written, parts)).startswith(
        "You are a travel planner.Plan a trip ofduration=3 days."
    )
    assert owners == [
        "", "travel-plan", "", "travel-plan", "overseas", "tokyo", "overseas", "travel-plan", "", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("", "0 1 2 3 4"),
        ('<a p="x"/><f/>', "0 a p=x 1 2 3 f 4"),
        ('<a p=""/>', "0 a p= 1 2 3 4"),
        ("<c/>", "0 1 c C 2 3 4"),
        ("<c><d/></c>", "0 1 c d C 2 3 4"),
        # Imports are read in the order of the prompt.
        ('<e/><a p="x"/>', "0 1 2 e a p=x 3 4"),
        # Text of the prompt: at the end, in place of what is left out, or after its neighbour.
        ("<e/>text", "0 1 2 e 3 4 TEXT"),
        ("text", "0 1 2 3 4 TEXT"),
        ('<a p="x"/>text<e/>', "0 a p=x 1 TEXT 2 e 3 4"),
        ("<e/>text<f/>", "0 1 2 e TEXT 3 f 4"),
        ('<e/>text<a p="x"/>', "0 1 2 e TEXT a p=x 3 4"),
        ("text<e/>", "0 TEXT 1 2 e 3 4"),
        ('text<a p="x"/>', "0 TEXT a p=x 1 2 3 4"),
        ("<c>text</c>", "0 1 c C TEXT 2 3 4"),
        ("<c>text<d/>more</c>", "0 1 c TEXT d C MORE 2 3 4"),
        ("<user>text<e/>more</user>", "0 TEXT 1 2 e 3 4 MORE"),
    ],
)
def test_reading_order(content: str, read: str):
    assert reading(content) == read


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n<z/>", "p.xml:2:1: schema 's' has no module 'z', expected a, b, c, d, e, f"),
        (
            "<a/>",
            "argument 'p' of module 'a' is missing, expected p=\"…\" in <a>; p=\"\" leaves it empty",
        ),
        ("<a p='' q=''/>", "module 'a' has no parameter 'q', expected p"),
        ("<b p=''/>", "module 'b' has no parameter 'p', expected no arguments"),
        ("<b/>\n<b/>", "p.xml:2:1: module 'b' is imported in line 1 already"),
        (
            "<b/>\n<c/>",
            "p.xml:2:1: module 'c' is in one union with 'b' (imported in line 1), expected one",
        ),
        ("<d/>", "module 'd' is nested in 'c', expected <c><d/></c> with the arguments of each"),
        ("<b><d/></b>", "module 'd' is nested in 'c', expected <c><d/></c>"),
        ("<b><e/></b>", "module 'e' is not inside 'b', expected its import outside of it"),
        ("<user><f/></user>", "module 'f' is in a role of the schema already"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(content: str, message: str):
    with pytest.raises(SchemaError) as caught:
        parts_of(content)
    assert message in str(caught.value)


def test_a_misspelt_name_is_suggested():
    with pytest.raises(SchemaError, match=r"did you mean 'travel-plan'\?"):
        parts_of("<travelplan/>", TRAVEL)


def test_a_prompt_for_another_schema_is_refused():
    with pytest.raises(SchemaError, match="this prompt is for schema 't', expected 's'"):
        resolve(parse_schema(LETTERS), parse_prompt('<prompt schema="t"/>'))


def test_an_argument_longer_than_its_parameter_is_refused():
    check_lengths(parts_of('<a p="one two"/>'), words)
    with pytest.raises(SchemaError, match="p='one two three' has 3 tokens, expected at most 2"):
        check_lengths(parts_of('<a p="one two three"/>'), words)


def test_a_part_past_the_context_is_refused():
    schema = parse_schema(LETTERS)
    parts = resolve(schema, parse_prompt('<prompt schema="s"><e/>\nmy question</prompt>', "p.xml"))
    extents = lay_out(schema, words).place(parts, words)
    check_context(parts, extents, 15)
    with pytest.raises(
        SchemaError, match=r"p\.xml:2:1: .* positions 13 to 15, expected at most 14"
    ):
        check_context(parts, extents, 14)


def test_many_imports_in_any_order_take_linear_time():
    """A prompt that jumps over 3,000 modules, with text in between; quadratic code takes minutes."""
    names = [f"m{i}" for i in range(3_000)]
    schema = parse_schema(
        '<schema name="s">'
        + "".join(f'<module name="{n}">{n}</module>' for n in names)
        + "</schema>"
    )
    jumping = [name for pair in zip(names[:1000], reversed(names), strict=False) for name in pair]
    content = "".join(f"<{name}/>t" for name in jumping)
    parts = resolve(schema, parse_prompt(f'<prompt schema="s">{content}</prompt>'))
    assert len(parts) == 4_000


def test_an_unknown_long_name_is_not_compared_with_thousands_of_others():
    """Which takes minutes."""
    modules = "".join(f'<module name="{"m" * 150}{i}">text</module>' for i in range(1_000))
    schema = parse_schema(f'<schema name="s">{modules}</schema>')
    with pytest.raises(SchemaError, match="no module 'mmm") as unknown:
        resolve(schema, parse_prompt(f'<prompt schema="s"><{"m" * 150}/></prompt>'))
    assert "did you mean" not in str(unknown.value)
