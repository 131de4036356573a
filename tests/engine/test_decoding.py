"""Decoding: streamed text, stop strings, sampling, seeds and log probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import scripted
import tiny
from blendrag.engine import BlendEngine, Options, TokenLogprob
from blendrag.engine.decoding import SeededDraws
from blendrag.engine.stream import AnswerStream, StopWhenDone, cut_at_stop

SAID = "It was built in 1874.\nObservation: none\nDas war früher 日本語 so."


@pytest.fixture(scope="module")
def says(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """An engine that answers everything with SAID."""
    with scripted.engine([], tmp_path_factory.mktemp("says") / "s", default=SAID) as made:
        yield made


# -- streamed text ------------------------------------------------------------------------------


def stream_over(text: str) -> tuple[AnswerStream, torch.Tensor]:
    tokenizer = tiny.tokenizer()
    return AnswerStream(tokenizer, (), 0.0), torch.tensor(tokenizer(text)["input_ids"])


def test_pieces_are_the_text_though_characters_span_tokens() -> None:
    stream, ids = stream_over("été 日本語 🙂")
    for token in ids:
        stream.put(token[None])
    stream.end()
    assert stream.text == "été 日本語 🙂"


def test_only_bytes_that_are_no_text_are_skipped_by_the_decoder() -> None:
    class Fails:
        def step(self, tokenizer: object, token: int) -> str | None:
            raise Exception(message)

    message = (
        "Invalid prefix encountered while decoding stream. Token ID: 7, Expected prefix: '\ufffd'"
    )
    stream, ids = stream_over("the town")
    stream._steps._decode = Fails()  # type: ignore[assignment]
    stream.put(ids)
    stream.end()
    assert stream.text == "the town"
    message = "something else"
    stream, ids = stream_over("the town")
    stream._steps._decode = Fails()  # type: ignore[assignment]
    with pytest.raises(Exception, match="something else"):
        stream.put(ids)


# -- stop strings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stop",
    [
        ("\nObservation:",), ("1874", "built"), ("本語",), ("It",), ("never", "so. And more"),
        ("\n", "\nObs"),
    ],
)  # fmt: skip
def test_an_answer_ends_before_its_first_stop_string(
    says: BlendEngine, stop: tuple[str, ...]
) -> None:
    expected = SAID[: min([SAID.find(s) for s in stop if s in SAID], default=None)]
    options = Options(stop=stop, logprobs=1)
    answer = says.generate("?", options)
    assert answer.text == expected
    assert answer.finish_reason == "stop"
    assert answer.logprobs is not None
    tokens = [entry.token for entry in answer.logprobs]
    assert "".join(tokens).startswith(expected)
    assert len("".join(tokens[:-1])) < len(expected) or not expected
    pieces = says.stream("?", options)
    heard = list(pieces)
    assert "".join(heard) == pieces.answer.text == expected
    assert all(heard)
    beams = says.generate("?", Options(stop=stop, generate_kwargs={"num_beams": 2}))
    assert (beams.text, beams.finish_reason) == (expected, "stop")


def test_a_stop_string_ends_generation_with_its_last_token(says: BlendEngine) -> None:
    model = says.adapter.model
    before = model.forwards
    answer = says.generate("?", Options(stop=("1874",)))
    tokens = says.tokens.encode_text(SAID[: SAID.index("1874") + 4])
    assert model.forwards - before == answer.metrics.new_tokens == len(tokens)


def streamed(text: str, stop: tuple[str, ...], cuts: list[int]) -> tuple[str, str]:
    """Pieces and text of a stream that gets ``text`` cut at these places."""
    stream = AnswerStream(tiny.tokenizer(), stop, 0.0)
    at = 0
    for cut in [*sorted(c for c in cuts if c < len(text)), len(text)]:
        if text[at:cut] and stream.stopped_by is None:
            stream._push(text[at:cut])
        at = cut
    stream.end()
    stream.finish()
    return "".join(iter(stream.take, None)), stream.text


TEXTS = st.text(alphabet="ab\n日", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n日", min_size=1, max_size=5), max_size=4)


@settings(max_examples=80, deadline=None)
@given(TEXTS, STOPS, st.lists(st.integers(0, 30)))
def test_stop_strings_do_not_depend_on_how_text_is_cut_into_tokens(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    expected = cut_at_stop(text, tuple(stop))
    assert streamed(text, tuple(stop), cuts) == (expected, expected)


def test_tokens_after_a_stop_string_are_not_part_of_the_answer() -> None:
    """transformers (seen in 5.23) does this on mps, where it does not wait for the device."""
    stream = AnswerStream(tiny.tokenizer(), ("b",), 0.0)
    asked = StopWhenDone(stream)
    ids = tiny.tokenizer()("a b c")["input_ids"]
    ends = [bool(asked(torch.tensor([ids[: i + 1]]), torch.empty(0))) for i in range(len(ids))]
    assert ends[-2:] == [True, True]
    assert stream.text == "a "
    assert len(stream.tokens) == ends.index(True) + 1
    whole = AnswerStream(tiny.tokenizer(), ("b",), 0.0)
    whole.put(torch.tensor(ids))
    whole.end()
    assert (whole.text, whole.stopped_by, whole.done) == ("a ", "b", True)


def test_the_first_token_does_not_wait_until_the_kv_of_the_prompt_is_kept() -> None:
    stream = AnswerStream(tiny.tokenizer(), (), 0.0)
    tokens_then: list[int] = []
    asked = StopWhenDone(stream, prefilled=lambda: tokens_then.append(len(stream.tokens)))
    ids = torch.tensor([tiny.tokenizer()("a b")["input_ids"]])
    for _ in range(2):
        asked(ids, torch.empty(0))
    assert tokens_then == [1]


# -- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "blend"])
def test_heads_that_share_kv_are_folded(
    mode: Any, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []
    stock = F.scaled_dot_product_attention

    def watched(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(query.shape[1:3])  # heads, rows
        return stock(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    engine.generate(tiny.prompt(engine, 0, 1), options=Options(mode=mode, max_new_tokens=4))
    assert (2, 2) in shapes
    assert (4, 1) not in shapes


# -- sampling and seeds -------------------------------------------------------------------------


def test_sampling_uses_the_defaults_of_the_checkpoint(tmp_path: Path) -> None:
    model = tiny.llama()
    with tiny.engine(model, tmp_path / "s", max_new_tokens=12) as engine:
        greedy = engine.generate("hello there").text
        torch.manual_seed(3)
        sampled = Options(generate_kwargs={"do_sample": True})
        assert engine.generate("hello there", sampled).text != greedy
        model.generation_config.top_k = 1  # always the likeliest token
        assert engine.generate("hello there", sampled).text == greedy
        assert engine.generate("hello there", Options(temperature=5.0)).text == greedy


def ask(engine: BlendEngine, seed: int | None, **changes: Any) -> tuple[str, ...]:
    given = {"temperature": 2.0, "mode": "full", "max_new_tokens": 12, **changes}
    return engine.generate(tiny.prompt(engine, 0), Options(seed=seed, **given)).texts


@pytest.mark.parametrize("generate", [{}, {"num_return_sequences": 3}, {"num_beams": 2}])
def test_a_seed_repeats_an_answer_and_leaves_torchs_generator_alone(
    engine: BlendEngine, generate: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = ask(engine, 7, generate_kwargs=generate)
    assert len(first) == generate.get("num_return_sequences", 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert ask(engine, 7, generate_kwargs=generate) == first
    assert ask(engine, 7, generate_kwargs=generate, mode="blend", ratio=1.0) == first
    assert ask(engine, 8, generate_kwargs=generate) != first


def test_without_a_seed_sampling_uses_torchs_generator(engine: BlendEngine) -> None:
    torch.manual_seed(3)
    first = ask(engine, None)
    assert ask(engine, None) != first
    torch.manual_seed(3)
    assert ask(engine, None) == first


def drawn() -> int:
    return int(torch.multinomial(torch.full((1000,), 0.001), 1))


def test_other_threads_are_not_seeded() -> None:
    with SeededDraws(0, torch.device("cpu")), ThreadPoolExecutor(1) as pool:
        here = drawn()
        torch.manual_seed(11)
        elsewhere = pool.submit(drawn).result()
    torch.manual_seed(11)
    assert elsewhere == drawn()
    with SeededDraws(0, torch.device("cpu")):
        assert here == drawn()


def test_operations_within_a_forward_are_not_intercepted(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the few operations that choose a token are intercepted."""
    looked: list[bool] = []
    inside: list[bool] = []
    real = SeededDraws.__torch_function__

    def look(self: SeededDraws, *args: Any, **kwargs: Any) -> Any:
        looked.append(bool(inside))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(SeededDraws, "__torch_function__", look)
    layer = engine.adapter.decoder_layers[0]
    enter = layer.register_forward_pre_hook(lambda *_: inside.append(True))
    with enter, layer.register_forward_hook(lambda *_: inside.clear()):
        ask(engine, 7, mode="blend")
    assert looked
    assert not any(looked)


def test_sampling_is_seeded_again_after_a_failed_forward() -> None:
    class Failing(torch.nn.Module):
        def forward(self) -> None:
            raise MemoryError

    model = Failing()
    found = []
    for _ in range(2):
        with SeededDraws(0, torch.device("cpu")).between_forwards(model):
            with suppress(MemoryError):
                model()
            found.append(drawn())
    assert found[0] == found[1]
    torch.manual_seed(1)
    first = drawn()
    torch.manual_seed(1)
    assert drawn() == first
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


# -- log probabilities --------------------------------------------------------------------------


def stock_logprobs(
    engine: BlendEngine, text: str, found: tuple[TokenLogprob, ...] | None
) -> torch.Tensor:
    """``[n, V]`` log probabilities of the unmodified model where ``found`` was chosen."""
    assert found
    ids = [*engine.segments(text).ids, *(t.id for t in found)]
    logits = tiny.stock(engine.adapter.model, torch.tensor([ids]))[0]
    return torch.log_softmax(logits[-len(found) - 1 : -1].float(), -1)


@pytest.mark.parametrize(
    ("logprobs", "options"),
    [
        (3, {"mode": "full"}),
        (3, {"mode": "blend", "ratio": 1.0}),
        (0, {"mode": "full", "temperature": 5.0, "top_p": 0.9, "seed": 3}),
    ],
)
def test_logprobs_are_those_of_a_stock_forward(
    engine: BlendEngine, logprobs: int, options: dict[str, Any]
) -> None:
    text = tiny.prompt(engine, 0)
    given = Options(logprobs=logprobs, max_new_tokens=16, **options)
    found = engine.generate(text, given).logprobs or ()
    assert len(found) > 8  # of 16: incomplete characters at the end are not in the text
    expected = stock_logprobs(engine, text, found)
    for place, entry in zip(expected, found, strict=True):
        assert entry.logprob == pytest.approx(float(place[entry.id]), abs=1e-3)
        likeliest = place.topk(logprobs).values.tolist()
        assert [p for _, p in entry.top] == pytest.approx(likeliest, abs=1e-3)
    is_greedy = [e.id == int(p.argmax()) for p, e in zip(expected, found, strict=True)]
    assert all(is_greedy) == ("seed" not in options)


def test_logprobs_cover_the_answer_without_its_end_token(says: BlendEngine) -> None:
    answer = says.generate("?", Options(logprobs=2))
    assert answer.text == SAID
    assert answer.logprobs is not None
    assert "".join(t.token for t in answer.logprobs) == SAID
    assert [t.id for t in answer.logprobs] == says.tokens.encode_text(SAID)
    assert answer.metrics.new_tokens == len(answer.logprobs) + 1
    built = next(t for t in answer.logprobs if t.token == " built")
    assert len(built.top) == 2
    assert built.top[0][0] == " built"


def test_the_first_token_is_timed_when_the_host_has_it(monkeypatch):
    """A GPU computes it while the host goes on; reading it waits."""
    now = [5.0]
    monkeypatch.setattr("blendrag.engine.stream.time.perf_counter", lambda: now[0])

    class Computing:
        def reshape(self, *shape: int) -> Computing:
            return self

        def tolist(self) -> list[int]:
            now[0] = 7.0
            return [5]

    stream = AnswerStream(tiny.tokenizer(), (), 5.0)
    stream.put(Computing())
    assert stream.ttft_s == 2.0
