"""One clear sentence each, and the next request works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import (
    BlendragError,
    ContextOverflowError,
    InvalidInputError,
    ModelLoadError,
    StoreUnavailableError,
)
from blendrag.text.readers import Document


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("bad") / "store") as made:
        made.ingest([tiny.document(0)])
        yield made


BAD: dict[str, tuple[Callable[[BlendEngine], Any], str]] = {
    "empty prompt": (lambda e: e.generate(""), "ask something"),
    "blank prompt": (lambda e: e.generate(" \n\t"), "ask something"),
    "no messages": (lambda e: e.generate([]), "at least one"),
    "a message that says nothing": (
        lambda e: e.generate([{"role": "user", "content": ""}]),
        "the message is empty",
    ),
    "messages that say nothing": (
        lambda e: e.generate(
            [
                {"role": "system", "content": " \n"},
                {"role": "user", "content": [{"type": "text", "text": ""}]},
            ]
        ),
        "all 2 messages are empty",
    ),
    "empty stop": (lambda e: e.generate("hi", Options(stop=("",))), "holds an empty text"),
    "one empty stop": (lambda e: e.generate("hi", Options(stop=("x", ""))), "holds an empty text"),
    "empty question": (lambda e: e.ask("  "), "ask something"),
    "an image": (
        lambda e: e.generate([{"role": "user", "content": [{"type": "image", "url": "x"}]}]),
        "expected text; describe it in words",
    ),
    "ratio": (lambda e: e.generate("hi", Options(ratio=1.5)), r"in \[0, 1\]"),
    "nan ratio": (lambda e: e.generate("hi", Options(ratio=float("nan"))), r"in \[0, 1\]"),
    "mode": (lambda e: e.generate("hi", Options(mode="fast")), "one of"),  # type: ignore[arg-type]
    "policy": (lambda e: e.generate("hi", Options(policy="best")), "one of"),
    "schedule": (lambda e: e.generate("hi", Options(schedule="cubic")), "schedule"),
    "no new tokens": (lambda e: e.generate("hi", Options(max_new_tokens=0)), "1 or more"),
    "temperature": (lambda e: e.generate("hi", Options(temperature=-1.0)), "0 or more"),
    "assisted": (
        lambda e: e.generate("hi", Options(generate={"prompt_lookup_num_tokens": 3})),
        "leave it out",
    ),
    "a generation config": (
        lambda e: e.generate("hi", Options(generate={"generation_config": GenerationConfig()})),
        "leave it out",
    ),
    "a prompt that is none": (lambda e: e.generate(5), "a text or a list of messages"),  # type: ignore[arg-type]
    "a message that is none": (lambda e: e.generate(["hi", 5]), "a text or a list"),  # type: ignore[list-item]
    "a question that is none": (lambda e: e.retrieve(None), "expected a text"),  # type: ignore[arg-type]
    "top p alone": (lambda e: e.generate("hi", Options(top_p=0.9)), "add temperature"),
    "top k": (lambda e: e.ask("what?", top_k=0), "1 or more"),
    "remove": (lambda e: e.remove(["never/there.txt"]), "not in the corpus"),
    "too long": (lambda e: e.generate("word " * 9000), "shorten"),
    "too many new tokens": (
        lambda e: e.generate("hi", Options(max_new_tokens=5000)),
        "fewer new tokens",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_the_next_request_works(
    engine: BlendEngine, name: str
) -> None:
    call, says = BAD[name]
    with pytest.raises(InvalidInputError, match=says) as raised:
        call(engine)
    assert tiny.one_sentence(str(raised.value))
    text = "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\nWhat?"
    assert engine.generate(text).metrics.reused_tokens > 0


def test_a_schedule_vector_of_another_length_is_a_sentence_too(engine: BlendEngine) -> None:
    text = "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\nWhat?"
    with pytest.raises(InvalidInputError, match="this model needs 3"):
        engine.generate(text, Options(schedule="2,1"))
    assert engine.generate(text, Options(schedule="3,2,1")).metrics.reused_tokens > 0


def test_overflow_says_by_how_much(engine: BlendEngine) -> None:
    with pytest.raises(ContextOverflowError) as raised:
        engine.generate("hi", Options(max_new_tokens=5000))
    error = raised.value
    assert error.over_tokens == error.prompt_tokens + 5000 - 4096
    assert str(error.over_tokens) in str(error)


def test_a_checkpoint_that_asks_for_assisted_decoding_is_one_sentence(tmp_path: Path) -> None:
    model = tiny.llama()
    model.generation_config.prompt_lookup_num_tokens = 3
    with tiny.engine(model, tmp_path / "s") as engine:
        for mode in ("blend", "full"):
            with pytest.raises(InvalidInputError, match="to None") as raised:
                engine.generate("hi", Options(mode=mode))  # type: ignore[arg-type]
            assert tiny.one_sentence(str(raised.value))
        model.generation_config.prompt_lookup_num_tokens = None
        assert engine.generate("hi").metrics.new_tokens == 6


def test_a_prompt_that_just_fits_is_answered(engine: BlendEngine) -> None:
    used = len(engine.plan("hi").ids)
    answer = engine.generate("hi " * 20, Options(max_new_tokens=1))
    assert answer.metrics.new_tokens == 1
    with pytest.raises(ContextOverflowError):
        engine.generate("hi", Options(max_new_tokens=4096 - used + 1))


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 2.0}, {"mode": "fast"}, {"policy": "best"}, {"schedule": "cubic"},
        {"max_new_tokens": 0}, {"top_k": 0},
    ],
)  # fmt: skip
def test_bad_defaults_are_refused_when_the_engine_is_made(tmp_path: Path, settings: dict) -> None:
    with pytest.raises(InvalidInputError) as raised:
        tiny.engine(tiny.llama(), tmp_path / "s", **settings)
    assert tiny.one_sentence(str(raised.value))


def test_an_unknown_model_is_one_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("no-such/model-anywhere", str(empty)):
        with tiny.engine(name, tmp_path / "s", tokenizer=None) as engine:
            with pytest.raises(ModelLoadError) as raised:
                engine.generate("hi")
            assert name in str(raised.value)
            assert "\n" not in str(raised.value)


def test_a_loaded_model_without_its_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with (
        tiny.engine(tiny.llama(), tmp_path / "s", tokenizer=None) as engine,
        pytest.raises(InvalidInputError, match="needs its tokenizer"),
    ):
        engine.generate("hi")


def test_a_store_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a store")
    with (
        tiny.engine(tiny.llama(), file) as engine,
        pytest.raises(StoreUnavailableError) as raised,
    ):
        engine.ingest([tiny.document(0)])
    assert tiny.one_sentence(str(raised.value))
    assert file.read_text() == "not a store"


def test_asking_a_corpus_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "nothing") as engine:
        with pytest.raises(BlendragError, match="ingest") as raised:
            engine.ask("what?")
        assert tiny.one_sentence(str(raised.value))
        assert engine.generate("hi").metrics.new_tokens == 6


def test_asking_an_empty_corpus_is_one_sentence(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        report = engine.ingest([])
        assert report.documents == report.chunks == 0
        with pytest.raises(BlendragError, match="ingest first"):
            engine.ask("what?")


@pytest.mark.parametrize("text", ["", " \n "])
def test_a_document_without_text_is_named_and_the_others_are_ingested(
    tmp_path: Path, text: str
) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "s") as engine:
        report = engine.ingest([Document("void.txt", text, "void"), tiny.document(1)])
        assert report.documents == 1
        (failure,) = report.failures
        assert failure.startswith("void.txt")


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    engine = tiny.engine(tiny.llama(), tmp_path / "s")
    engine.ingest([tiny.document(0)])
    engine.close()
    engine.close()
    for use in (
        lambda: engine.generate("hi"),
        lambda: engine.retrieve("hi"),
        lambda: engine.ask("hi"),
        lambda: engine.ingest([tiny.document(1)]),
        lambda: engine.remove(["a.txt"]),
        lambda: engine.library.search("hi", 1),
        lambda: engine.library.ids(),
    ):
        with pytest.raises(InvalidInputError) as raised:
            use()
        assert str(raised.value) == "this engine is closed; make a new BlendEngine"


def test_an_engine_that_was_closed_before_its_first_use_opens_nothing(tmp_path: Path) -> None:
    engine = tiny.engine(tiny.llama(), tmp_path / "s")
    engine.close()
    for use in (lambda: engine.ingest([tiny.document(0)]), engine.stats):
        with pytest.raises(InvalidInputError, match="closed"):
            use()
    assert not (tmp_path / "s").exists()


def test_other_chunk_sizes_for_a_corpus_that_has_one_are_refused(tmp_path: Path) -> None:
    model = tiny.llama()
    with tiny.engine(model, tmp_path / "s") as engine:
        engine.ingest([tiny.document(0)])
    with (
        tiny.engine(model, tmp_path / "s", chunk_tokens=256) as engine,
        pytest.raises(InvalidInputError, match="another --store"),
    ):
        engine.ingest([tiny.document(1)])


def test_a_template_that_refuses_the_messages_is_one_sentence(tmp_path: Path) -> None:
    strict = tiny.tokenizer()
    strict.chat_template = "{{ raise_exception('only user may speak') }}"
    with tiny.engine(tiny.llama(), tmp_path / "s", tokenizer=strict) as engine:
        with pytest.raises(InvalidInputError, match="only user may speak") as raised:
            engine.generate("hi")
        assert tiny.one_sentence(str(raised.value))


def test_messages_without_a_template_are_refused_and_strings_sent_raw(tmp_path: Path) -> None:
    plain = tiny.tokenizer()
    plain.chat_template = None
    with tiny.engine(tiny.llama(), tmp_path / "s", tokenizer=plain) as engine:
        with pytest.raises(InvalidInputError, match="no chat template"):
            engine.generate([{"role": "user", "content": "hi"}])
        assert engine.resources.tokens.decode(engine.plan("hi there").ids) == "hi there"
        assert engine.generate("hi there").metrics.new_tokens == 6
