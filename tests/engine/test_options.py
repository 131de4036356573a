"""Options of a request are given as keywords of a call, or as one ``Options`` object."""

from __future__ import annotations

from typing import Any

import pytest

import blendrag
import tiny
from blendrag import BlendEngine, Options
from blendrag.errors import InvalidInputError

QUESTION = "What did the company of Place0 build?"


def test_a_question_takes_options_as_keywords(engine):
    answer = engine.ask(QUESTION, max_new_tokens=2, mode="full")
    assert (answer.metrics.mode, answer.metrics.new_tokens) == ("full", 2)
    pieces = engine.ask_stream(QUESTION, max_new_tokens=2, mode="full")
    assert "".join(pieces) == pieces.answer.text == answer.text


async def test_every_call_takes_keywords_that_replace_options(engine):
    text, options = tiny.prompt(engine, 0), Options(mode="full", max_new_tokens=5)
    given: dict[str, Any] = {"options": options, "max_new_tokens": 1}
    pieces, apieces = engine.stream(text, **given), engine.astream(text, **given)
    _ = list(pieces), [piece async for piece in apieces]
    answers = [
        engine.generate(text, **given),
        await engine.agenerate(text, **given),
        pieces.answer,
        apieces.answer,
        *engine.batch([text], **given),
        *await engine.abatch([text], **given),
    ]
    assert [(a.metrics.mode, a.metrics.new_tokens) for a in answers] == [("full", 1)] * 6


def test_what_the_package_exports_can_be_imported_from_it():
    assert {"Answer", "BlendEngine", "Document", "Options"} <= set(blendrag.__all__)
    for name in blendrag.__all__:
        assert getattr(blendrag, name) is not None


def test_an_engine_refuses_options_of_requests_in_one_sentence(tmp_path):
    said = r"^seed, temperature: not an option of an engine, but of a request; give it to ask\(…\)"
    with pytest.raises(InvalidInputError, match=said):
        BlendEngine("demo", tmp_path, temperature=0.5, seed=1)  # type: ignore[call-arg]
