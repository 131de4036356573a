"""Log probabilities are the model's own, one for each token of the text that was returned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import scripted
import tiny
from blendrag.engine import BlendEngine, Options, TokenLogprob
from blendrag.errors import InvalidInputError

SAID = "It was früher 日本語 built. END of it"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("logprobs") / "s") as made:
        made.ingest([tiny.document(0)])
        yield made


@pytest.fixture(scope="module")
def says(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with scripted.engine([], tmp_path_factory.mktemp("says") / "s", default=SAID) as made:
        yield made


def prompt(engine: BlendEngine) -> str:
    return "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\nWhat?"


def likely_by_a_stock_forward(
    engine: BlendEngine, text: str, found: tuple[TokenLogprob, ...]
) -> torch.Tensor:
    """``[n, V]`` log probabilities at the places of ``found``."""
    ids = [*engine.plan(text).ids, *(t.id for t in found)]
    logits = tiny.stock(engine.adapter.model, torch.tensor([ids]))[0]
    return torch.log_softmax(logits[-len(found) - 1 : -1].float(), -1)


@pytest.mark.parametrize("mode", ["full", "blend"])
def test_logprobs_are_those_of_a_stock_forward(engine: BlendEngine, mode: str) -> None:
    text = prompt(engine)
    options = Options(mode=mode, ratio=1.0, logprobs=3, max_new_tokens=16)  # type: ignore[arg-type]
    found = engine.generate(text, options).logprobs
    assert found is not None
    assert len(found) > 8  # of 16: bytes at the end that are no text yet are not in the text
    expected = likely_by_a_stock_forward(engine, text, found)
    for place, entry in zip(expected, found, strict=True):
        assert entry.logprob == pytest.approx(float(place[entry.id]), abs=1e-3)
        assert [p for _, p in entry.top] == pytest.approx(place.topk(3).values.tolist(), abs=1e-3)
        assert entry.logprob == entry.top[0][1]  # decoding is greedy


def test_logprobs_do_not_depend_on_sampling(engine: BlendEngine) -> None:
    text = prompt(engine)
    options = Options(mode="full", temperature=5.0, top_p=0.9, seed=3, logprobs=0)
    found = engine.generate(text, options).logprobs
    assert found is not None
    expected = likely_by_a_stock_forward(engine, text, found)
    for place, entry in zip(expected, found, strict=True):
        assert entry.logprob == pytest.approx(float(place[entry.id]), abs=1e-3)
        assert entry.top == ()
    assert any(e.id != int(p.argmax()) for p, e in zip(expected, found, strict=True))


def test_texts_of_logprobs_are_the_answer_without_the_end_token(says: BlendEngine) -> None:
    answer = says.generate("?", Options(logprobs=0))
    assert answer.text == SAID
    assert answer.logprobs is not None
    assert "".join(t.token for t in answer.logprobs) == SAID
    assert [t.id for t in answer.logprobs] == says.resources.tokens.encode_text(SAID)
    assert answer.metrics.new_tokens == len(answer.logprobs) + 1


@pytest.mark.parametrize("stop", ["END", "früh", "It", "語", "ilt. E"])
def test_logprobs_end_with_the_text_at_a_stop_string(says: BlendEngine, stop: str) -> None:
    answer = says.generate("?", Options(stop=(stop,), logprobs=1))
    assert answer.text == SAID[: SAID.index(stop)]
    assert answer.logprobs is not None
    joined = "".join(t.token for t in answer.logprobs)
    assert joined.startswith(answer.text)
    without_last = "".join(t.token for t in answer.logprobs[:-1])
    assert len(without_last) < len(answer.text) or not answer.text


def test_alternatives_have_the_text_they_would_have_added(says: BlendEngine) -> None:
    answer = says.generate("?", Options(logprobs=2))
    assert answer.logprobs is not None
    built = next(t for t in answer.logprobs if t.token == " built")
    assert built.top[0][0] == " built"
    assert len(built.top) == 2


@pytest.mark.parametrize(
    "generate", [{"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}]
)
def test_logprobs_of_several_sequences_are_refused(says: BlendEngine, generate: dict) -> None:
    with pytest.raises(InvalidInputError, match="one sequence") as raised:
        says.generate("?", Options(logprobs=0, generate=generate))
    assert tiny.one_sentence(str(raised.value))


@pytest.mark.parametrize("logprobs", [-1, 21])
def test_at_most_20_logprobs_can_be_requested(logprobs: int) -> None:
    with pytest.raises(InvalidInputError, match=r"in \[0, 20\]"):
        Options(logprobs=logprobs)
