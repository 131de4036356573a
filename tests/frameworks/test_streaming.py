"""Streamed answers come in pieces, and text that may become a tool call is held back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import scripted
import tiny
from blendrag.engine import Answer, BlendEngine, Options
from blendrag.frameworks.streaming import Piece, StreamedText, astream_pieces, stream_pieces
from blendrag.frameworks.tools import opening_for, parse
from scripted import LLAMA, MISTRAL, XML, tokens

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
    (only,) = stream(engine, Options(generate={"num_beams": 2}))  # beams are not streamed
    assert only.answer is not None
    assert only.text == only.answer.text == REPLY


@WAYS
def test_a_streamed_request_is_searched_and_computed_once(engine, stream):
    prompt = "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\nWhat?"
    resources = engine.resources
    engine.generate(prompt)
    with ExitStack() as spies:
        calls = {
            # once more with marks around the contents of messages
            "rendered": spies.enter_context(tiny.counted(resources.tokens, "render")),
            "searched": spies.enter_context(tiny.counted(resources.corpus.chunk_index, "find")),
            "computed": spies.enter_context(tiny.counted(engine.adapter.model, "generate")),
        }
        stream(engine, Options(), prompt)
        counts = {name: len(found) for name, found in calls.items()}
    assert counts == {"rendered": 2, "searched": 1, "computed": 1}


TEMPLATES = {"hermes": scripted.TEMPLATE, "llama": LLAMA, "mistral": MISTRAL, "xml": XML}
CALLS = {
    "hermes": '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "search", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "search", "arguments": {}}]',
    "xml": "<function=search>\n</function>",
}
PLAIN = "See [1] and [TOOL_BOX], {braces} and a < b.  Done"


def shown(text: StreamedText, answer: str) -> list[str]:
    """What each character of ``answer`` adds."""
    return [text.add(character) for character in answer]


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_shown_and_calls_are_held_back(name):
    made = tokens(TEMPLATES[name])
    plain, call = StreamedText(made), StreamedText(made)
    pieces = shown(plain, PLAIN)
    assert "".join(pieces) == PLAIN == plain.text
    assert max(map(len, pieces)) <= len(" [TOOL_B")
    assert plain.rest(PLAIN) == ""
    assert "".join(shown(call, CALLS[name])) == call.rest("") == ""
    forced = StreamedText(made, opening_for(made, "search", ()))
    assert "".join(shown(forced, ' {"q": "x"}} and so on')) == ""
    if name != "llama":  # whose calls are the whole answer
        text = StreamedText(made)
        assert "".join(shown(text, f"I will look. \n\n{CALLS[name]}")) == "I will look."


def test_no_text_is_shown_twice_if_an_answer_begins_with_white_space():
    """Text next to calls is stripped once they are parsed, after it was shown."""
    made = tokens(scripted.TEMPLATE)
    text, answer = StreamedText(made), f"\n\nI will look.\n{CALLS['hermes']}\nSoon."
    began = "".join(shown(text, answer))
    parsed = parse(answer, made)
    assert parsed.calls
    assert (began + text.rest(parsed.text)).strip() == parsed.text
    assert parsed.text.startswith("I will look.")


def test_control_tokens_are_not_shown_with_tools_and_everything_is_without():
    assert "".join(shown(StreamedText(tokens(scripted.TEMPLATE)), "Yes.<|end|>")) == "Yes."
    text, answer = StreamedText(), f"  {CALLS['hermes']}<|end|> "
    assert shown(text, answer) == list(answer)
    assert text.rest(answer) == ""


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("word", ["word ", " ", "<", "\n<tool", "["])
def test_each_piece_of_a_long_answer_is_looked_at_once(name, word, monkeypatch):
    """Not the whole answer for every piece."""

    def looked_at(pieces: int) -> int:
        text, seen = StreamedText(made), []
        real = text._certain
        monkeypatch.setattr(text, "_certain", lambda held: seen.append(len(held)) or real(held))
        for _ in range(pieces):
            text.add(word)
        return sum(seen)

    made = tokens(TEMPLATES[name])
    assert looked_at(2000) <= 10.5 * looked_at(200) + 200
