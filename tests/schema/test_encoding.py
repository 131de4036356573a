"""Schemas as tokens at positions: unions, parameters, scaffolds, roles of several chat templates."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from blendrag.errors import InvalidInputError
from blendrag.model.tokens import Tokens
from blendrag.schema.concatenation import CachedStretch
from blendrag.schema.encoding import TokenizedSchema, placeholder_of
from blendrag.schema.markup import parse_prompt, parse_schema
from blendrag.schema.roles import ChatTexts
from model.test_tokenizers import llama2

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '<|bos|>[INST] ' + ('<<SYS>>' + system + '<</SYS>> ' if loop.first and "
    "system else '') + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + ' <|end|>' }}{% endif %}"
    "{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
CHAT = (
    '<schema name="s"><system>Be brief.</system><user>Read. <module name="a">The ships.</module></user>'
    "<assistant>I have.</assistant></schema>"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Read. The ships."},
    {"role": "assistant", "content": "I have."},
    {"role": "user", "content": "Where?"},
]


def tokens(template: str | None = None, **changes: Any) -> Tokens:
    made = tiny.tokenizer()
    if template is not None:
        made.chat_template = template
    for name, value in changes.items():
        setattr(made, name, value)
    return Tokens(made)


def tokenized(markup: str, of: Tokens | None = None) -> TokenizedSchema:
    return TokenizedSchema(parse_schema(markup), of or tokens())


def shown(schema: TokenizedSchema, of: Tokens, content: str) -> str:
    placed = schema.place(parse_prompt(f'<prompt schema="s">{content}</prompt>'))
    return of.decode(schema.segments(placed).ids)


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, LLAMA2])
def test_a_prompt_reads_as_the_template_renders_its_conversation(template):
    of = tokens(template)
    assert shown(tokenized(CHAT, of), of, "<a/>Where?") == of.render(MESSAGES)


@pytest.mark.parametrize("content", ["", "<a/>", "<b/>", "<c/>", "<a/><c/>"])
def test_a_chat_begins_with_bos_whichever_module_begins_it(content):
    of = tokens()
    schema = tokenized(
        '<schema name="s"><union><module name="a"><system>Be brief.</system></module>'
        '<module name="b"><system>Be very brief.</system></module></union>'
        '<module name="c"><user>Hello.</user><assistant>Yes?</assistant></module></schema>',
        of,
    )
    system = {"<a/>": "Be brief.", "<b/>": "Be very brief."}.get(content.removesuffix("<c/>"))
    messages = [{"role": "system", "content": system}] if system else []
    if content.endswith("<c/>"):
        messages += [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Yes?"},
        ]
    messages.append({"role": "user", "content": "Where?"})
    assert shown(schema, of, f"{content}Where?") == of.render(messages)


def test_no_space_is_added_before_what_the_template_writes_inside_a_prompt():
    tokens = Tokens(llama2())
    tokens.tokenizer.chat_template = (
        "{{ bos_token + '[INST] ' + messages[0]['content'] + ' [/INST]' }}"
    )
    schema = parse_schema("<schema name='s'><user>Where?</user></schema>", "s.xml")
    [role] = schema.children
    chat = ChatTexts(tokens)
    before, after = chat.between([role], None, False)(role)
    assert "Where? [/INST]" in tokens.decode(chat.ids(f"{before}Where?{after}"))


def test_a_role_that_the_template_refuses_is_refused():
    with pytest.raises(
        InvalidInputError, match="refuses a message of role system; leave out <system>"
    ):
        tokenized(CHAT, tokens(NO_SYSTEM))
    with pytest.raises(
        InvalidInputError, match="<system> in a schema for a model whose tokenizer has no"
    ):
        tokenized(CHAT, tokens(""))


def test_members_of_a_union_begin_together_and_the_longest_decides_what_follows():
    schema = tokenized(
        '<schema name="s">One. <union><module name="a">Short.</module><module name="b">This one is longer.'
        '</module></union><module name="c">After.</module></schema>'
    )
    blocks = {block.name: block for block in schema.blocks}
    assert blocks["a"].positions[0] == blocks["b"].positions[0] == len(blocks["s"].ids)
    assert len(blocks["a"].ids) < len(blocks["b"].ids)
    assert blocks["c"].positions[0] == blocks["b"].positions[-1] + 1
    assert schema.end == blocks["c"].positions[-1] + 1


def test_arguments_take_the_first_positions_of_their_parameter():
    of = tokens()
    schema = tokenized(
        '<schema name="s"><module name="a">In <param name="days" len="5"/> days.</module></schema>',
        of,
    )
    (block,) = schema.blocks
    start, end = block.stretches[0][1], block.stretches[1][0]
    assert end - start == 5
    assert set(block.ids[start:end]) == {placeholder_of(of).id}
    assert block.positions == tuple(range(len(block.ids)))
    placed = schema.place(parse_prompt('<prompt schema="s"><a days="3"/></prompt>'))
    before, argument, after = placed.parts
    assert argument.positions == block.positions[start : start + len(argument.ids)]
    assert after.positions[0] == end > argument.positions[-1] + 1
    assert isinstance(before, CachedStretch)


def test_the_largest_complete_scaffold_is_used():
    schema = tokenized(
        '<schema name="s"><module name="a">One.</module><module name="b">Two.</module>'
        '<module name="c">Three.</module><scaffold modules="a b"/><scaffold modules="a b c"/></schema>'
    )

    def used(imports: str) -> list[str]:
        placed = schema.place(parse_prompt(f'<prompt schema="s">{imports}</prompt>'))
        return [part.block.name for part in placed.parts if isinstance(part, CachedStretch)]

    assert used("<a/><b/><c/>") == ["a + b + c"] * 3
    assert used("<b/><a/>") == ["a + b"] * 2
    assert used("<a/><c/>") == ["a", "c"]


def test_a_scaffold_is_used_although_one_of_its_modules_has_no_text_outside_of_nested_ones():
    schema = tokenized(
        '<schema name="s"><module name="a"><module name="in">One.</module></module>'
        '<module name="b">Two.</module><scaffold modules="a in b"/></schema>'
    )
    placed = schema.place(parse_prompt('<prompt schema="s"><a><in/></a><b/></prompt>'))
    assert [part.block.name for part in placed.parts] == ["a + in + b"] * 2


@pytest.mark.parametrize(
    ("unk", "note"),
    [("[UNK]", ""), ("<|start|>", "has <|start|> in place of <unk>"), (None, "has no <unk>")],
)
def test_a_placeholder_is_no_control_token(unk, note):
    made = tiny.tokenizer()
    if unk is not None:
        made.add_special_tokens({"unk_token": unk})
    of = Tokens(made)
    found = placeholder_of(of)
    assert note in found.note
    assert bool(found.note) == bool(note)
    assert of.decode([found.id]) == (" " if note else unk)
