"""Text comes out as it is decoded, whatever the tokenizer makes of its bytes."""

from __future__ import annotations

import pytest
import torch

import tiny
from blendrag.engine.stream import AnswerStream


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
