"""Markup is parsed, or refused with file, line and what was expected."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from blendrag.errors import SchemaError
from blendrag.frameworks.schema_prompts import filled
from blendrag.schema.markup import MAX_BYTES, MAX_DEPTH, parse_prompt, parse_schema
from blendrag.schema.nodes import (
    Import,
    Module,
    Node,
    Parameter,
    Role,
    Text,
    Union,
    with_role_texts,
)
from schema.travel import PROMPT, TRAVEL


def outline(nodes: Sequence[Node]) -> list:
    """Nodes as plain values."""
    found: list = []
    for node in nodes:
        if isinstance(node, Text):
            found.append(node.text)
        elif isinstance(node, Parameter):
            found.append((node.name, node.max_tokens))
        elif isinstance(node, Union):
            found.append(outline(node.members))
        elif isinstance(node, Role):
            found.append((node.role, *outline(node.children)))
        elif isinstance(node, Module):
            found.append((node.name, *outline(node.children)))
        else:
            assert isinstance(node, Import)
            arguments = {argument.name: argument.text for argument in node.arguments}
            found.append((node.name, arguments, *outline(node.children)))
    return found


def in_schema(content: str) -> list:
    return outline(parse_schema(f'<schema name="s">{content}</schema>').children)


def in_module(content: str) -> list:
    [(_, *found)] = in_schema(f'<module name="m">{content}</module>')
    return found


def in_prompt(content: str) -> list:
    return outline(parse_prompt(f'<prompt schema="s">{content}</prompt>').children)


# -- tags -----------------------------------------------------------------------------------------


def test_schema_of_the_paper():
    schema = parse_schema(TRAVEL)
    assert schema.name == "travel"
    assert outline(schema.children) == [
        ("system", "You are a travel planner."),
        (
            "user",
            (
                "travel-plan",
                "Plan a trip of ",
                ("duration", 4),
                ".\n",
                [
                    ("domestic", "My eyes are set on ", ("city", 3), ".\n"),
                    (
                        "overseas",
                        "I want to see other countries.\n",
                        [
                            ("tokyo", "Tokyo, a bustling city."),
                            ("rome", "Rome, the eternal city of ruins."),
                        ],
                        "Tell me about visas.\n",
                    ),
                ],
                "Be brief.\n",
            ),
            ("budget", "Money is short.\n"),
        ),
        ("assistant", "I have read about the city."),
    ]
    assert [scaffold.modules for scaffold in schema.scaffolds] == [
        ("travel-plan", "overseas", "tokyo")
    ]


def test_prompt_of_the_paper():
    prompt = parse_prompt(PROMPT)
    assert prompt.schema == "travel"
    assert outline(prompt.children) == [
        ("travel-plan", {"duration": "3 days"}, ("overseas", {}, ("tokyo", {}))),
        ("user", "Highlight the surf spots."),
    ]


def test_nodes_know_their_place_in_the_file():
    schema = parse_schema(TRAVEL, "travel.xml")
    assert str(schema.modules["budget"].at) == "travel.xml:23:5"
    [text] = schema.modules["budget"].children
    assert text.at.line == 24


def test_names_may_have_dots_hyphens_and_letters_of_any_script():
    names = ["unit.py", "trip-plan", "_x", "Größe", "旅行"]
    schema = parse_schema(
        '<schema name="s">' + "".join(f'<module name="{n}">x</module>' for n in names) + "</schema>"
    )
    assert list(schema.modules) == names
    assert in_prompt("".join(f"<{n}/>" for n in names)) == [(n, {}) for n in names]


def test_entities_and_cdata_are_text():
    assert in_module("a &lt;b&gt; &amp; &#8364;<![CDATA[ <param> & ]]>") == ["a <b> & € <param> & "]
    assert in_prompt("<m p='&lt;&quot;&#10;'/>") == [("m", {"p": '<"\n'})]


def test_role_texts_replace_roles_and_join_their_neighbours():
    schema = parse_schema(TRAVEL)
    flat = with_role_texts(schema, lambda role: (f"[{role.role}] ", " [end]\n"))
    assert outline(flat.children)[0] == "[system] You are a travel planner. [end]\n[user] "
    assert outline(flat.children)[-1] == " [end]\n[assistant] I have read about the city. [end]\n"
    assert list(flat.modules) == list(schema.modules)
    prompt = with_role_texts(parse_prompt(PROMPT), lambda role: ("<", ">"))
    assert outline(prompt.children)[-1] == "<Highlight the surf spots.>"


# -- whitespace -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "parsed"),
    [
        ("one line", ["one line"]),
        (" kept as written ", [" kept as written "]),
        ("\n  a\n  b\n", ["a\nb\n"]),
        ("\n\n  a\n\n\n  b\n\n", ["a\n\n\nb\n"]),
        ("\n  def f():\n    return 1\n", ["def f():\n  return 1\n"]),
        ("\n\ta\n\t  b\n", ["a\n  b\n"]),
        ("\n  a\n\tb\n", ["  a\n\tb\n"]),
        ("first\n    second\n    third", ["first\nsecond\nthird"]),
        ("\n  a <!-- c --> b\n  <!-- line -->\n  c\n", ["a  b\nc\n"]),
        ("\n  a\n  <!--\n    lines\n  -->\n  b", ["a\nb"]),
        ("\r\n  a\r\n  b\r\n", ["a\nb\n"]),
        ("\n  for <param name='p' len='3'/> days\n", ["for ", ("p", 3), " days\n"]),
        ("\n  <param name='p' len='3'/>\n  end\n", [("p", 3), "\nend\n"]),
        (
            "\n  <param name='p' len='3'/> <param name='q' len='3'/>\n",
            [("p", 3), " ", ("q", 3), "\n"],
        ),
        ("\n  a\n  <module name='n'>b</module>\n  c\n", ["a\n", ("n", "b"), "c\n"]),
        ("\n  a\n\n  <module name='n'>b</module>\n\n  c\n", ["a\n", ("n", "b"), "c\n"]),
        ("a <module name='n'>b</module> c", ["a ", ("n", "b"), " c"]),
        ("\n  a <module name='n'>b</module>\n  c\n", ["a ", ("n", "b"), "\nc\n"]),
    ],
)
def test_whitespace_that_lays_out_markup_is_no_text(content: str, parsed: list):
    assert in_module(content) == parsed


def test_whitespace_between_modules_is_no_text():
    a, b = '<module name="a">a</module>', '<module name="b">b</module>'
    for between in ("", " ", "\n", "\n\n  ", "\n<!-- comment -->\n"):
        assert in_schema(a + between + b) == [("a", "a"), ("b", "b")]
        assert in_prompt(f"<a/>{between}<b/>{between}") == [("a", {}), ("b", {})]


def test_last_line_break_of_roles_and_prompts_is_no_text():
    assert in_schema("<user>\n  a\n</user>") == [("user", "a")]
    assert in_prompt("\n<a/>\n  Answer:\n") == [("a", {}), "Answer:"]
    assert in_prompt("<user>\n  a\n\n</user>") == [("user", "a")]


def test_preserved_whitespace_is_text():
    assert in_schema('<module name="a" xml:space="preserve">\n  a\n<!-- c -->\n</module>') == [
        ("a", "\n  a\n\n")
    ]
    schema = parse_schema(
        '<schema name="s" xml:space="preserve"> <module name="a"> a </module>\n'
        '<module name="b" xml:space="default">\n  b\n</module></schema>'
    )
    assert outline(schema.children) == [" ", ("a", " a "), "\n", ("b", "b\n")]


# -- errors ---------------------------------------------------------------------------------------

UNION = '<union><module name="a">a</module><module name="b">b</module></union>'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\n <modul name='x'>x</modul>", "f:2:2: <modul> is no tag of a schema, expected <module>, "),
        ("a\n b < c", "f:2:5: not valid XML; put values"),
        ("a & b", "f:1:21: not valid XML; put values"),
        ("&nbsp;", "f:1:18: unknown entity, expected &lt;"),
        ("\x01", "f:1:18: not valid XML"),
        ("<module name=domestic>x</module>", "f:1:31: not valid XML; put values of attributes in quot"),
        ("a\n<module name='a'>\nx", "f:3:4: this closing tag fits no open tag, expected </module> for the "),
        ("\ud800", "f:1:1: lone surrogate"),
        ("", "the schema is empty, expected text or <module>"),
        ("<module>x</module>", "<module> has no name, expected <module name=…>"),
        ("<module name='a'/>", "module 'a' is empty, expected text"),
        ("<module name='a b'>x</module>", "name of the module is 'a b', expected a letter or _"),
        ("<module name='½'>x</module>", "name of the module is '½', expected a letter"),
        ("<module name='user'>x</module>", "'user' is a tag of the markup, expected another name"),
        ("<module name='a' size='3'>x</module>", "<module> has no attribute 'size', expected name"),
        ("<module name='a' xml:space='no'>x</module>", "xml:space is 'no', expected 'preserve' or"),
        (UNION + "\n<module name='b'>b</module>", "f:2:1: module 'b' exists in line 1 already"),
        ("<param name='p' len='3'/>", "<param> is outside of a module, expected inside <module name=…>"),
        ("<user><param name='p' len='3'/></user>", "<param> is outside of a module"),
        ("<module name='a'><param name='p'/></module>", "<param> has no len, expected name and len"),
        (
            "<module name='a'><param name='p' len='3' length='3'/></module>",
            "<param> has both len and length, expected",
        ),
        ("<module name='a'><param name='p' len='0'/></module>", "len of parameter 'p' is '0', expected a"),
        ("<module name='a'><param name='p' len='x'/></module>", "len of parameter 'p' is 'x', expected a"),
        ("<module name='a'><param name='p' len='1000001'/></module>", "from 1 to 1,000,000"),
        ("<module name='a'><param name='p' len='3'>x</param></module>", "<param> has content, expected none"),
        (
            "<module name='a'><param name='p' len='3'/><param name='p' len='3'/></module>",
            "module 'a' has a parameter 'p' already, expected another name",
        ),
        ("<union/>", "<union> is empty, expected <module> tags in it"),
        ("<union>x</union>", "text 'x' in <union>, expected only <module>"),
        ("<union><user>x</user></union>", "<user> in <union>, expected only <module>"),
        ("<user><system>x</system></user>", "<system> is inside a role, expected outside"),
        ("x<scaffold modules='a'/>", "modules of <scaffold> is 'a', expected two or more different modules"),
        ("x<scaffold modules='a a'/>", "modules of <scaffold> is 'a a', expected two or more different"),
        ("x<scaffold>y</scaffold>", "<scaffold> has no modules, expected <scaffold modules=…>"),
        (UNION + "<scaffold modules='a c'/>", "scaffold names 'c', expected a module of the schema"),
        (UNION + "<scaffold modules='a b'/>", "scaffold needs 'a' and 'b', which are in one union"),
        ("<user>x<scaffold modules='a b'/></user>", "<scaffold> is inside <user>, expected directly inside"),
        ("<x:y/>", "<x:y> has a namespace, expected a tag without one"),
    ],
)  # fmt: skip
def test_wrong_schemas_are_refused(content: str, message: str):
    with pytest.raises(SchemaError) as caught:
        parse_schema(f'<schema name="s">{content}</schema>', "f")
    assert message in str(caught.value)
    assert str(caught.value).startswith("f:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no tag, expected <schema name=…> or <prompt schema=…>"),
        ("<schema name='s'>x</schema>", "the root is <schema>, expected <prompt>"),
        ("hello", "f:1:1: there is no tag"),
        ("<prompt schema='s'>x</prompt>y", "f:1:30: there is more after the last closing tag"),
        ("<prompt schema='s'>x</prompt></prompt>", "there is more after the last closing tag"),
        ("<prompt schema='s'><a b='1' b='2'/></prompt>", "an attribute is given twice"),
        ("<prompt schema='s'>x", "f:1:21: the text ends, expected </prompt> for the tag of line 1"),
        ("<prompt>x</prompt>", "<prompt> has no schema, expected <prompt schema=…>"),
        ("<prompt schema='s'><union/></prompt>", "<union> is a tag of schemas, expected an import"),
        ("<prompt schema='s'><a><user/></a></prompt>", "<user> is inside another tag, expected"),
        ("<prompt schema='s'><a x:y=''/></prompt>", "<a> has no attribute 'x:y'"),
    ],
)
def test_wrong_prompts_are_refused(text: str, message: str):
    with pytest.raises(SchemaError) as caught:
        parse_prompt(text, "f")
    assert message in str(caught.value)


def test_document_types_are_refused_before_entities_expand():
    entities = '<!ENTITY a "aaaaaaaaaa">' + "".join(
        f'<!ENTITY {new} "{f"&{old};" * 10}">'
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    external = '<!ENTITY a SYSTEM "file:///etc/passwd">'
    for declared in (entities, external):
        with pytest.raises(SchemaError, match="<!DOCTYPE> is refused"):
            parse_schema(f'<!DOCTYPE s [{declared}]><schema name="s">&a;&i;</schema>')


def test_depth_and_size_are_limited():
    with pytest.raises(SchemaError, match=f"is inside {MAX_DEPTH} tags, expected fewer"):
        parse_prompt('<prompt schema="s">' + "<a>" * 10_000)
    with pytest.raises(SchemaError, match="bytes, expected at most 67,108,864"):
        parse_schema("x" * (MAX_BYTES + 1))


def test_the_encoding_that_a_declaration_names_is_ignored():
    schema = parse_schema(
        '\ufeff<?xml version="1.0" encoding="latin-1"?><schema name="s">é</schema>'
    )
    assert outline(schema.children) == ["é"]


def test_whitespace_that_is_written_as_a_reference_is_text():
    prompt = parse_prompt(
        '<prompt schema="s">\n  &#32;a&#10;  b\n   &#9;\n  c&#13;&#10;\n</prompt>'
    )
    [text] = prompt.children
    assert text.text == " a\n  b\n \t\nc\r\n"


def test_values_of_a_template_keep_their_whitespace():
    value = "  def f():\r\n\n\treturn 1 & 2\n"
    template = '<prompt schema="s">\n  <m a="{v}"/>\n  {v}\n</prompt>'
    imported, text = parse_prompt(filled(template, {"v": value})).children
    assert imported.arguments[0].text == text.text == value
