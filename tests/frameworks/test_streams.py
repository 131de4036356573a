"""What both plugs listen with: pieces, then the whole answer; and nothing is done twice for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import scripted
import tiny
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.errors import RequestTimeout
from blendrag.frameworks.shared import Piece, agenerate, astream_pieces, stream_pieces

pytestmark = pytest.mark.timeout(60)
SAID = "It built ships in 1874."


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with scripted.engine([], tmp_path_factory.mktemp("streams") / "s", default=SAID) as made:
        made.ingest([tiny.document(0)])
        yield made


def prompt(engine: BlendEngine) -> str:
    return "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\nWhat?"


def listen(engine: BlendEngine, options: Options, prompt: str = "What?") -> list[Piece]:
    return list(stream_pieces(engine, prompt, options))


def alisten(engine: BlendEngine, options: Options, prompt: str = "What?") -> list[Piece]:
    async def gathered() -> list[Piece]:
        return [piece async for piece in astream_pieces(engine, prompt, options)]

    return asyncio.run(gathered())


WAYS = pytest.mark.parametrize("way", [listen, alisten])


@WAYS
def test_the_last_piece_brings_the_answer(
    engine: BlendEngine, way: Callable[..., list[Piece]]
) -> None:
    *pieces, last = way(engine, Options(logprobs=0))
    assert len(pieces) > 3
    assert all(piece.text and piece.answer is None for piece in pieces)
    assert isinstance(last.answer, Answer)
    assert last.answer.text == "".join(piece.text for piece in pieces) == SAID
    assert last.text == ""
    assert last.answer.logprobs is not None


@WAYS
def test_beams_come_as_one_piece(engine: BlendEngine, way: Callable[..., list[Piece]]) -> None:
    (only,) = way(engine, Options(generate={"num_beams": 2}))
    assert only.answer is not None
    assert only.text == only.answer.text == SAID


@WAYS
def test_a_timeout_is_raised_out_of_the_pieces(
    engine: BlendEngine, way: Callable[..., list[Piece]]
) -> None:
    engine.adapter.model.pause_s = 0.1
    try:
        with pytest.raises(RequestTimeout):
            way(engine, Options(timeout_s=0.35))
    finally:
        engine.adapter.model.pause_s = 0.0
    assert "".join(piece.text for piece in way(engine, Options())) == SAID


def once(engine: BlendEngine, ask: Callable[[], Any]) -> dict[str, int]:
    """How often a prompt was rendered, searched for chunks, cut and given to the model by ``ask``."""
    resources = engine.resources
    with ExitStack() as spies:
        calls = {
            "rendered": spies.enter_context(tiny.counted(resources.tokens, "render")),
            "searched": spies.enter_context(tiny.counted(resources.corpus.chunk_index, "find")),
            "planned": spies.enter_context(tiny.counted(engine, "segments")),
            "computed": spies.enter_context(tiny.counted(engine.adapter.model, "generate")),
        }
        ask()
        return {name: len(found) for name, found in calls.items()}


ASKING: dict[str, Callable[[BlendEngine, str], Any]] = {
    "generate": lambda e, p: e.generate(p),
    "stream": lambda e, p: list(e.stream(p)),
    "batch": lambda e, p: e.batch([p]),
    "agenerate": lambda e, p: asyncio.run(agenerate(e, p, Options())),
    "stream_pieces": lambda e, p: listen(e, Options(), p),
    "astream_pieces": lambda e, p: alisten(e, Options(), p),
}


@pytest.mark.parametrize("way", ASKING)
def test_a_request_is_searched_and_planned_once(engine: BlendEngine, way: str) -> None:
    """It is rendered twice: once with marks round the contents of messages."""
    text = prompt(engine)
    engine.generate(text)
    counts = once(engine, lambda: ASKING[way](engine, text))
    assert counts == {"rendered": 2, "searched": 1, "planned": 1, "computed": 1}
