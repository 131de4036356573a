"""Answers have the form that was asked for, whatever the model would have said."""

from __future__ import annotations

import datetime
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

import scripted
import tiny
from blendrag.chat.grammar import answer_form
from blendrag.chat.lark import library, vocabulary
from blendrag.engine import BlendEngine, Options
from blendrag.errors import InvalidInputError, InvalidOptionError

YEAR = {
    "type": "object",
    "properties": {"year": {"type": "integer"}, "town": {"enum": ["Öre", "Ålen"]}},
    "required": ["year", "town"],
    "additionalProperties": False,
}
JSON_YEAR = {"type": "json_schema", "json_schema": {"name": "year", "schema": YEAR}}
WANTED = '{"year": 1874, "town": "Öre"}'


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    def reply(prompt: str) -> str:
        thought = '<think>They want JSON, e.g. {"year": 0}.</think>\n' if "Think" in prompt else ""
        return thought + (WANTED if "When" in prompt else "I do not know. " * 9)

    with scripted.engine(reply, tmp_path_factory.mktemp("forms") / "s") as made:
        made.ingest([tiny.document(0, paragraphs=4)])
        yield made


@pytest.mark.parametrize("question", ["When?", "Think! When?", "Why?", "Think! Why?"])
def test_an_answer_follows_its_schema_and_reasoning_is_free(engine, question):
    answer = engine.generate(question, response_format=JSON_YEAR, seed=1)
    found = json.loads(answer.text)
    assert sorted(found) == ["town", "year"]
    assert isinstance(found["year"], int)
    assert answer.finish_reason == "stop"
    if "When" in question:
        assert answer.text == WANTED
    thought = 'They want JSON, e.g. {"year": 0}.' if "Think" in question else ""
    assert answer.reasoning == thought
    streamed = engine.stream(question, response_format=JSON_YEAR, seed=1)
    assert "".join(streamed) == answer.text


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "json_object"}, r"\s*\{.*\}\s*"),
        ({"type": "regex", "regex": "[0-9]{2}/[0-9]{2}"}, r"\d\d/\d\d"),
        ({"type": "regex", "regex": r"[0-9]{2}\/[0-9]{2}"}, r"\d\d/\d\d"),
        ({"type": "choice", "choice": ["yes", 'say "no"']}, r'yes|say "no"'),
        (
            {"type": "grammar", "grammar": 'start: part ("," part)*\npart: "a" | "b"'},
            r"[ab](,[ab])*",
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_other_forms(engine, form, pattern, temperature):
    options = Options(response_format=form, temperature=temperature, seed=3, max_new_tokens=40)
    answer = engine.generate("Why?", options)
    assert answer.reasoning == ""  # which is not its likeliest beginning
    if answer.finish_reason == "stop":  # a hot answer may not end
        assert re.fullmatch(pattern, answer.text, re.DOTALL)
    raw = engine.generate("Why?", options, apply_chat_template=False)
    if raw.finish_reason == "stop":
        assert re.fullmatch(pattern, raw.text, re.DOTALL)


def test_requests_with_and_without_a_form_decode_together(engine):
    chunk = tiny.chunk_texts(engine, 0)[0]
    prompts = [f"{chunk}\n\nWhen{'?' * n}" for n in range(4)]
    formed = [Options(response_format=JSON_YEAR if n % 2 else None, logprobs=1) for n in range(4)]
    alone = [engine.generate(p, o) for p, o in zip(prompts, formed, strict=True)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(engine.generate, prompts, formed))
    assert [a.text for a in together] == [a.text for a in alone] == [WANTED] * 4
    assert all(len(answer.logprobs) > 5 for answer in together)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "xml"},
        {},
        {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}},
        {"type": "json_schema", "json_schema": {"schema": {"const": float("nan")}}},
        {"type": "regex", "regex": "[0-9"},
        {"type": "choice", "choice": []},
        {"type": "grammar", "grammar": "start: missing"},
        {"type": "grammar", "grammar": 'start: start "a"'},
        {"type": "grammar", "grammar": "start: A\nA: /a/ & /b/"},
        {"type": "regex", "regex": r"[^\s\S]"},
        {"type": "regex", "regex": "(?=a)b"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": "x"},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/missing"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://localhost/x"}}},
        {"type": "json_schema", "json_schema": {"schema": {"enum": []}}},
        {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "integer", "minimum": 2, "maximum": 1}},
        },
        {"type": "grammar", "grammar": "a" * 2_000_000},
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_before_anything_is_computed(engine, form):
    with pytest.raises(InvalidOptionError, match="response_format") as raised:
        engine.generate("When?", response_format=form)
    assert tiny.one_sentence(str(raised.value))
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        ({"properties": {"a": {"type": "integer"}}}, False),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, True),
        ({"properties": {"a": {"type": "integer"}}, "required": ["b"]}, True),
        (
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["b"]}]},
            True,
        ),
        ({"$defs": {"x": {"properties": {"a": {}}}}, "$ref": "#/$defs/x"}, False),
    ],
)
def test_objects_have_the_keys_that_their_schema_names(engine, schema, is_open):
    given = {"type": "json_schema", "json_schema": {"schema": {"type": "object", **schema}}}
    form = answer_form(given, engine.tokens)
    for text, fits in (('{"a":1', True), ('{"b":1', is_open)):
        matcher = library().LLMatcher(vocabulary(engine.tokens), form.lark)
        assert matcher.consume_tokens(engine.tokens.encode_text(text)) is fits


def test_formats_that_are_only_remarks_are_no_error(engine):
    class Settings(BaseModel):
        path: pathlib.Path
        key: SecretStr
        day: datetime.date
        other: list[Settings] = []

    form = {"type": "json_schema", "json_schema": {"schema": Settings.model_json_schema()}}
    made = answer_form(form, engine.tokens)
    days = {"2024-02-01": True, "2024-02-29": True, "2000-02-29": True, "1.2.2024": False}
    days |= dict.fromkeys(("2023-02-29", "1900-02-29", "0000-01-01", "2023-04-31"), False)
    for day, fits in days.items():
        text = json.dumps({"path": "/x", "key": "k", "day": day})
        matcher = library().LLMatcher(vocabulary(engine.tokens), made.lark)
        assert matcher.consume_tokens(engine.tokens.encode_text(text)) is fits


def test_what_a_schema_cannot_enforce_is_a_note_if_it_is_not_strict(engine):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    lenient = {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}
    answer = engine.generate("Why?", response_format=lenient)
    assert set(json.loads(answer.text)) <= {1, 2}
    assert any("only in part (at 1" in note for note in answer.metrics.notes), answer.metrics.notes
    for strict in ({"schema": schema}, {"schema": schema, "strict": True}):
        with pytest.raises(InvalidOptionError, match="uniqueItems"):
            engine.generate("Why?", response_format={"type": "json_schema", "json_schema": strict})


def test_an_answer_that_was_cut_says_so(engine):
    answer = engine.generate("Why?", response_format=JSON_YEAR, max_new_tokens=3)
    assert answer.finish_reason == "length"
    assert any("cut after 3 tokens, before its form" in note for note in answer.metrics.notes)


def test_the_form_has_the_last_word_over_other_ways_of_choosing(engine):
    given: list[dict[str, Any]] = [
        {"generate_kwargs": {"top_k": 1}, "temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.01},
        {"generate_kwargs": {"repetition_penalty": 1.5}},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "logprobs": 3},
        {"logit_bias": {7: 100.0}},
        {"stop": ("zzz",)},
    ]
    for options in given:
        answer = engine.generate("Why?", response_format=JSON_YEAR, seed=1, **options)
        assert answer.finish_reason == "length" or set(json.loads(answer.text)) == {"year", "town"}


def test_a_form_is_for_one_answer(engine):
    with pytest.raises(InvalidInputError, match="with 2 sequences"):
        engine.generate("When?", response_format=JSON_YEAR, generate_kwargs={"num_beams": 2})


def test_without_the_library_one_sentence_says_what_to_install(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidOptionError, match=r"blendrag\[grammar\]"):
        answer_form({"type": "json_object"}, engine.tokens)
    assert answer_form({"type": "text"}, engine.tokens) is None
    assert answer_form(None, engine.tokens) is None


def test_penalties_and_biases_change_which_token_is_chosen(tmp_path):
    with tiny.engine(tiny.shared_llama(), tmp_path / "s", mode="full", max_new_tokens=12) as engine:
        plain = engine.generate("It built ships.", logprobs=0)
        tokens = [each.id for each in plain.logprobs]
        without = engine.generate("It built ships.", logprobs=0, logit_bias={tokens[0]: -100})
        assert without.logprobs[0].id != tokens[0]
        forced = engine.generate("It built ships.", logprobs=0, logit_bias={7: 100})
        assert {each.id for each in forced.logprobs} == {7}
        varied: dict[str, Any] = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
        mixed = engine.generate(
            "It built ships.", logprobs=0, logit_bias={7: 3.0, 9: 2.9}, **varied
        )
        assert len({each.id for each in mixed.logprobs}) > len(set(tokens[:1]))
