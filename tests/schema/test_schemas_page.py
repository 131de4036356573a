"""The examples of docs/schemas.md on whitespace and on programs are true."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from blendrag.schema.checking import resolve
from blendrag.schema.layout import own_parts
from blendrag.schema.markup import parse_prompt, parse_schema
from blendrag.schema.nodes import Text

PAGE = (Path(__file__).parents[2] / "docs/schemas.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_texts_that_the_page_names_are_those_of_its_example():
    [example] = blocks("xml")
    schema = parse_schema(example)
    named = re.search(r"The texts of `unit\.py` are (.*?); text after", PAGE, re.DOTALL)
    assert named is not None
    texts = [
        part.text
        for name in ("unit.py", "ask")
        for part in own_parts(schema.modules[name])
        if isinstance(part, Text)
    ]
    assert texts == [found.replace("\\n", "\n") for found in re.findall(r'`"(.*?)"`', named[1])]


def test_the_program_of_the_page_makes_a_schema_and_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    [source] = [block for block in blocks("python") if "@schema" in block]
    file = tmp_path / "trips.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("trips", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    markup, prompt = capsys.readouterr().out.split("</schema>\n")
    schema = parse_schema(markup + "</schema>")
    assert list(schema.modules) == ["city-rome", "rome", "city-tokyo", "passport"]
    assert len(resolve(schema, parse_prompt(prompt.strip()))) == 5
