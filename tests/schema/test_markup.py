"""Markup is parsed, or refused with file, line and what was expected."""

from __future__ import annotations

from blendrag.schema.checking import resolve
from blendrag.schema.layout import lay_out
from blendrag.schema.markup import parse_prompt, parse_schema

TRAVEL = """\
<schema name="travel">
  <system>
    You are a travel planner.
  </system>
  <user>
    <module name="trip-plan">
      Plan a trip of <param name="duration" len="4"/>.
    </module>
    <union>
      <module name="miami">
        Miami has beaches.
      </module>
      <module name="maui">
        Maui has beaches and volcanoes.
      </module>
    </union>
  </user>
</schema>
"""
PROMPT = """\
<prompt schema="travel">
  <trip-plan duration="3 days"/>
  <miami/>
  Highlight the surf spots.
</prompt>
"""


def words(text: str) -> int:
    return len(text.split())


def test_example_of_the_paper():
    schema, prompt = parse_schema(TRAVEL, "travel.xml"), parse_prompt(PROMPT)
    assert list(schema.modules) == ["trip-plan", "miami", "maui"]
    layout = lay_out(schema, words)
    starts = {name: layout[name].start for name in schema.modules}
    assert starts == {"trip-plan": 5, "miami": 14, "maui": 14}
    parts = resolve(schema, prompt)
    placed = [
        (type(part).__name__, extent.start, extent.length)
        for part, extent in zip(parts, layout.place(parts, words), strict=True)
    ]
    assert placed == [
        ("CachedText", 0, 5),
        ("CachedText", 5, 4),
        ("FilledParameter", 9, 4),
        ("CachedText", 13, 1),
        ("CachedText", 14, 3),
        ("UncachedText", 17, 4),
    ]
