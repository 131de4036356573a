"""Streamed text: incremental decoding and stop strings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scripted
import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.stream import AnswerStream, StopWhenDone, cut_at_stop


class Fails:
    """A decode stream that refuses every token."""

    def __init__(self, message: str) -> None:
        self.message = message

    def step(self, tokenizer: object, token: int) -> str | None:
        raise Exception(self.message)


def stream_over(text: str) -> tuple[AnswerStream, torch.Tensor]:
    tokenizer = tiny.tokenizer()
    return AnswerStream(tokenizer, (), 0.0), torch.tensor(tokenizer(text)["input_ids"])


def test_pieces_are_the_text_though_characters_span_tokens() -> None:
    stream, ids = stream_over("été 日本語 🙂")
    for token in ids:
        stream.put(token[None])
    stream.end()
    assert stream.text == "été 日本語 🙂"


def test_bytes_that_are_no_text_do_not_end_the_answer() -> None:
    stream, ids = stream_over("the town")
    stream._decode = Fails(  # type: ignore[assignment]
        "Invalid prefix encountered while decoding stream. Token ID: 7, Expected prefix: '\ufffd'"
    )
    stream.put(ids)
    stream.end()
    assert stream.text == "the town"


def test_any_other_failure_to_decode_is_not_hidden() -> None:
    stream, ids = stream_over("the town")
    stream._decode = Fails("something else")  # type: ignore[assignment]
    with pytest.raises(Exception, match="something else"):
        stream.put(ids)


SAID = "It was built in 1874.\nObservation: none\nDas war früher 日本語 so."


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with scripted.engine([], tmp_path_factory.mktemp("stop") / "s", default=SAID) as made:
        yield made


@pytest.mark.parametrize(
    "stop",
    [
        ("\nObservation:",), ("1874", "built"), ("früh",), ("本語",), (".",), ("It",), ("never",),
        ("so. And more",), ("built in", "in 18"), ("\n", "\nObs"),
    ],
)  # fmt: skip
def test_an_answer_ends_before_its_first_stop_string(
    engine: BlendEngine, stop: tuple[str, ...]
) -> None:
    found = [SAID.find(s) for s in stop if s in SAID]
    expected = SAID[: min(found)] if found else SAID
    answer = engine.generate("?", Options(stop=stop))
    assert answer.text == expected
    assert answer.finish_reason == "stop"
    pieces = engine.stream("?", Options(stop=stop))
    heard = list(pieces)
    assert "".join(heard) == expected
    assert all(heard)
    assert pieces.answer.text == expected


def test_a_stop_string_ends_generation_with_its_last_token(engine: BlendEngine) -> None:
    model = engine.adapter.model
    before = model.forwards
    answer = engine.generate("?", Options(stop=("1874",)))
    tokens = engine.resources.tokens.encode_text(SAID[: SAID.index("1874") + 4])
    assert model.forwards - before == answer.metrics.new_tokens == len(tokens)


def test_beams_end_where_one_sequence_does(engine: BlendEngine) -> None:
    options = Options(stop=("built in", "in 18"), generate={"num_beams": 2})
    answer = engine.generate("?", options)
    assert answer.text == "It was "
    assert answer.finish_reason == "stop"


def streamed(text: str, stop: tuple[str, ...], cuts: list[int]) -> tuple[str, str]:
    """The text of a stream that was given ``text`` in other pieces than its tokenizer makes."""
    stream = AnswerStream(tiny.tokenizer(), stop, 0.0)
    at = 0
    for cut in [*sorted(c for c in cuts if c < len(text)), len(text)]:
        if text[at:cut] and stream.stopped_by is None:
            stream._push(text[at:cut])
        at = cut
    stream.end()
    stream.finish()
    return "".join(stream), stream.text


texts = st.text(alphabet="ab\n日", max_size=30)


@settings(max_examples=300, deadline=None)
@given(
    texts,
    st.lists(st.text(alphabet="ab\n日", max_size=5), max_size=4),
    st.lists(st.integers(0, 30)),
)
def test_how_text_is_cut_into_tokens_does_not_matter(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    expected, _ = cut_at_stop(text, tuple(stop))
    assert streamed(text, tuple(stop), cuts) == (expected, expected)


def test_a_loop_that_stops_one_forward_late_adds_nothing() -> None:
    """As transformers (seen in 5.23) does on mps, where it does not wait for the device."""
    stream = AnswerStream(tiny.tokenizer(), ("b",), 0.0)
    asked = StopWhenDone(stream)
    ids = tiny.tokenizer()("a b c")["input_ids"]
    ends = [bool(asked(torch.tensor([ids[: i + 1]]), torch.empty(0))) for i in range(len(ids))]
    assert ends[-2:] == [True, True]
    assert stream.text == "a "
    assert len(stream.tokens) == ends.index(True) + 1


def test_tokens_after_a_stop_string_are_not_part_of_the_answer() -> None:
    stream = AnswerStream(tiny.tokenizer(), ("b",), 0.0)
    ids = torch.tensor(tiny.tokenizer()("a b c")["input_ids"])
    stream.put(ids)
    stream.end()
    assert (stream.text, stream.stopped_by, stream.done) == ("a ", "b", True)
