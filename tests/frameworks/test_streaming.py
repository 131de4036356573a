"""Streamed answers come in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import scripted
import tiny
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.frameworks.streaming import Piece, astream_pieces, stream_pieces

pytestmark = pytest.mark.timeout(60)
REPLY = "It built ships in 1874."


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with scripted.engine([], tmp_path_factory.mktemp("streams") / "s", default=REPLY) as made:
        made.ingest([tiny.document(0, paragraphs=4)])
        yield made


def sync(engine: BlendEngine, options: Options, prompt: str = "What?") -> list[Piece]:
    return list(stream_pieces(engine, prompt, options))


def awaited(engine: BlendEngine, options: Options, prompt: str = "What?") -> list[Piece]:
    async def gathered() -> list[Piece]:
        return [piece async for piece in astream_pieces(engine, prompt, options)]

    return asyncio.run(gathered())


WAYS = pytest.mark.parametrize("stream", [sync, awaited])


@WAYS
def test_the_last_piece_has_the_answer_and_beams_come_as_one_piece(engine, stream):
    *pieces, last = stream(engine, Options(logprobs=0))
    assert len(pieces) > 3
    assert all(piece.text and piece.answer is None for piece in pieces)
    assert isinstance(last.answer, Answer)
    assert last.answer.text == "".join(piece.text for piece in pieces) == REPLY
    assert last.text == ""
    assert last.answer.logprobs is not None
    (only,) = stream(engine, Options(generate_kwargs={"num_beams": 2}))  # beams are not streamed
    assert only.answer is not None
    assert only.text == only.answer.text == REPLY


@WAYS
def test_a_streamed_request_is_searched_and_computed_once(engine, stream):
    prompt = "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\nWhat?"
    engine.generate(prompt)
    with ExitStack() as spies:
        calls = {
            # once more with marks around the contents of messages
            "rendered": spies.enter_context(tiny.counted(engine.tokens, "render")),
            "searched": spies.enter_context(tiny.counted(engine.corpus.chunk_index, "find")),
            "computed": spies.enter_context(tiny.counted(engine.adapter.model, "generate")),
        }
        stream(engine, Options(), prompt)
        counts = {name: len(found) for name, found in calls.items()}
    assert counts == {"rendered": 2, "searched": 1, "computed": 1}


@WAYS
def test_reasoning_comes_apart_from_the_text(tmp_path, stream):
    reply = f"<think>\nHm, ships.\n</think>\n\n{REPLY}"
    with scripted.engine([], tmp_path / "s", default=reply) as made:
        *pieces, last = stream(made, Options())
        assert "".join(piece.text for piece in pieces) == last.answer.text == REPLY
        assert "".join(piece.reasoning for piece in pieces).strip() == "Hm, ships."
        assert last.answer.reasoning == "Hm, ships."
        assert not any(piece.text and piece.reasoning for piece in pieces)
        (only,) = stream(made, Options(generate_kwargs={"num_beams": 2}))
        assert (only.text, only.reasoning) == (REPLY, "Hm, ships.")
