"""Chunks are exact substrings within the limit, whatever the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from semantic_text_splitter import TextSplitter

import tiny
from blendrag.errors import InvalidInputError
from blendrag.text.chunking import Chunker, chunk_id_of

TOKENIZER = tiny.tokenizer().backend_tokenizer
CHUNKER = Chunker(TOKENIZER, 64)


def assert_chunks_are_right(text: str, chunker: Chunker) -> None:
    position = 0
    for chunk in chunker.split(text):
        assert chunk.start >= position
        assert not text[position : chunk.start].strip(), "only white space between chunks"
        assert chunk.text == text[chunk.start : chunk.end] == chunk.text.strip() != ""
        assert chunk.tokens <= chunker.chunk_tokens
        assert chunk.tokens == len(TOKENIZER.encode(chunk.text, add_special_tokens=False).ids)
        assert chunk.chunk_id == chunk_id_of(chunk.text)
        position = chunk.end
    assert not text[position:].strip()


TEXTS = st.one_of(
    st.text(max_size=1000),
    st.text(alphabet=" \n\t\x1c\u00a0\u3000ab.世界é\U0001f600\u200d", max_size=1000),
    st.builds(lambda unit, n: unit * n, st.text(min_size=1, max_size=20), st.integers(1, 200)),
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(TEXTS)
def test_every_chunk_is_an_exact_substring_within_the_limit(text):
    assert_chunks_are_right(text, CHUNKER)


@pytest.mark.parametrize("unit", ["世", "One sentence. "])
def test_a_long_line_is_split_in_windows(unit, monkeypatch):
    """The splitter takes quadratic time, so it never sees more than a few windows' worth of text."""
    chunker, seen = Chunker(TOKENIZER, 64), []
    window_spans = chunker._window_spans
    monkeypatch.setattr(
        chunker,
        "_window_spans",
        lambda of, a, b, *rest: seen.append(b - a) or window_spans(of, a, b, *rest),
    )
    text = unit * (20_000 // len(unit))
    assert_chunks_are_right(text, chunker)
    assert max(seen) <= 64 * 64
    assert sum(seen) < 3 * len(text)


def test_windows_do_not_change_where_prose_is_cut():
    paragraph = "The lamp was lit at dusk. Nobody knew who had climbed the stairs that evening.\n\n"
    text = "".join(f"{i}: {paragraph}" for i in range(200))
    whole = TextSplitter.from_huggingface_tokenizer(TOKENIZER, 256).chunk_indices(text)
    assert [(c.start, c.text) for c in Chunker(TOKENIZER, 256).split(text)] == whole


def test_white_space_contains_no_chunk():
    assert CHUNKER.split(" " * 1_000_000) == []
    assert CHUNKER.split("") == []


def test_control_tokens_that_stay_text_are_counted_as_text():
    tokenizer = tiny.tokenizer().backend_tokenizer
    tokenizer.encode_special_tokens = True
    for chunk in Chunker(tokenizer, 64).split("<|end|> " * 200):
        assert len(tokenizer.encode(chunk.text, add_special_tokens=False).ids) <= 64


def test_a_truncating_tokenizer_hides_no_tokens_and_is_left_alone():
    tokenizer = tiny.tokenizer().backend_tokenizer
    tokenizer.enable_truncation(32)
    assert Chunker(tokenizer, 64).split("word " * 100) == CHUNKER.split("word " * 100)
    assert tokenizer.truncation is not None


@pytest.mark.parametrize("chunk_tokens", [0, 63, 4097])
def test_a_chunk_size_out_of_range_is_refused(chunk_tokens):
    with pytest.raises(InvalidInputError, match=r"64 to 4096"):
        Chunker(TOKENIZER, chunk_tokens)


@pytest.mark.parametrize(
    ("text", "words"),
    [("abc\ud800def", "character 3"), (b"abc", "a bytes, expected a str"), (None, "a NoneType")],
)
def test_what_is_no_text_is_refused(text, words):
    for refuses in (CHUNKER.split, CHUNKER.count):
        with pytest.raises(InvalidInputError, match=words):
            refuses(text)


def test_the_id_ignores_outer_white_space_only():
    assert chunk_id_of(" a b \n") == chunk_id_of("a b")
    assert chunk_id_of("a  b") != chunk_id_of("a b")
