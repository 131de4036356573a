"""Positions come from the schema; text of a prompt follows the parts before it."""

from __future__ import annotations

from collections import Counter

from blendrag.schema.checking import resolve
from blendrag.schema.layout import Extent, lay_out, own_parts
from blendrag.schema.markup import parse_prompt, parse_schema
from blendrag.schema.nodes import Text, Union, walk
from schema.travel import TRAVEL, words


def placed(schema: str, prompt: str) -> list[tuple[int, int]]:
    parsed = parse_schema(schema)
    parts = resolve(parsed, parse_prompt(prompt))
    return [(extent.start, extent.end) for extent in lay_out(parsed, words).place(parts, words)]


def test_parts_follow_each_other_and_members_of_a_union_begin_together():
    schema = parse_schema(TRAVEL)
    layout = lay_out(schema, words)
    found = {name: (layout[name].start, layout[name].end) for name in schema.modules}
    assert found == {
        "travel-plan": (5, 32),
        "domestic": (14, 23),
        "overseas": (14, 30),
        "tokyo": (20, 24),
        "rome": (20, 26),
        "budget": (32, 35),
    }
    unions = [layout[node] for node in walk(schema.children) if isinstance(node, Union)]
    assert unions == [Extent(14, 16), Extent(20, 6)]
    assert layout.tokens == 41


def test_a_layout_may_begin_behind_other_tokens():
    schema = parse_schema(TRAVEL)
    first, moved = lay_out(schema, words), lay_out(schema, words, first=7)
    assert moved.tokens == first.tokens + 7
    assert {
        name: moved[name].start - first[name].start for name in schema.modules
    } == dict.fromkeys(schema.modules, 7)
    parts = resolve(schema, parse_prompt('<prompt schema="travel">question</prompt>'))
    assert moved.place(parts, words)[-1] == Extent(first.tokens + 7, 1)


def test_own_parts_of_a_module_are_without_those_of_the_modules_in_it():
    module = parse_schema(TRAVEL).modules["overseas"]
    texts = [part.text for part in own_parts(module) if isinstance(part, Text)]
    assert texts == ["I want to see other countries.\n", "Tell me about visas.\n"]


THREE = (
    '<schema name="s"><module name="a">a a</module><module name="b">b b b</module>'
    '<module name="c">c c</module></schema>'
)


def test_text_of_a_prompt_takes_the_place_of_a_module_that_is_left_out():
    prompt = '<prompt schema="s"><a/>x x<c/>y</prompt>'
    assert placed(THREE, prompt) == [(0, 2), (2, 4), (5, 7), (7, 8)]


def test_text_longer_than_the_gap_overlaps_the_next_module_but_no_other_text():
    prompt = '<prompt schema="s"><a/>x x x x x x<c/>y</prompt>'
    assert placed(THREE, prompt) == [(0, 2), (2, 8), (5, 7), (8, 9)]


def test_positions_of_modules_do_not_depend_on_the_order_of_imports():
    orders = ["<a/><b/><c/>", "<c/><a/><b/>", "<b/><c/><a/>"]
    found = [placed(THREE, f'<prompt schema="s">{order}q</prompt>') for order in orders]
    assert {tuple(sorted(each)) for each in found} == {((0, 2), (2, 5), (5, 7), (7, 8))}


def test_every_text_of_a_large_schema_is_read_once():
    """10,000 modules: each text is counted once, so that loading takes linear time."""
    text = '<schema name="s">' + "".join(
        f'<module name="m{i}">text {i} <param name="p" len="3"/></module>' for i in range(10_000)
    )
    schema = parse_schema(text + "</schema>")
    counted: Counter[str] = Counter()

    def count(text: str) -> int:
        counted[text] += 1
        return len(text.split())

    assert lay_out(schema, count).tokens == 50_000
    assert set(counted.values()) == {1}
    assert len(counted) == 10_000
