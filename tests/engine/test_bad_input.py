"""Bad input is refused in one clear sentence, and the next request works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import GenerationConfig

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.library import Entry
from blendrag.errors import (
    BlendragError,
    ContextOverflowError,
    InvalidInputError,
    ModelLoadError,
    StoreUnavailableError,
)
from blendrag.text.readers import Document

SURROGATE = "a \udcff b, as in a command line that is not UTF-8"
BLANKS = [
    {"role": "system", "content": " \n"},
    {"role": "user", "content": [{"type": "text", "text": ""}]},
]
IMAGE = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]


def generate(prompt: Any = "hi", **options: Any) -> Callable[[BlendEngine], Any]:
    return lambda engine: engine.generate(prompt, Options(**options))


BAD: dict[str, tuple[Callable[[BlendEngine], Any], str]] = {
    "empty prompt": (generate(""), "ask something"),
    "an unknown field of Options": (generate(generate={}), "not an option of a request"),
    "no messages": (generate([]), "at least one"),
    "an empty message": (generate([{"role": "user", "content": ""}]), "the message is empty"),
    "empty messages": (generate(BLANKS), "all 2 messages are empty"),
    "empty stop": (generate(stop=("x", "")), "holds an empty text"),
    "empty question": (lambda e: e.ask("  "), "ask something"),
    "an image": (generate(IMAGE), "expected text; describe it in words"),
    "policy": (generate(policy="best"), "one of"),
    "schedule": (generate(schedule="cubic"), "schedule"),
    "temperature that makes logits infinite": (generate(temperature=1e-45), "at least 1e-30"),
    "assisted": (generate(generate_kwargs={"prompt_lookup_num_tokens": 3}), "leave it out"),
    "a generation config": (
        generate(generate_kwargs={"generation_config": GenerationConfig()}),
        "leave it out",
    ),
    "no time": (generate(timeout_s=0), "timeout_s"),
    "nan time": (generate(timeout_s=float("nan")), "timeout_s"),
    "seed": (generate(seed=2**64), "64 bits"),
    "logprobs": (generate(logprobs=21), r"in \[0, 20\]"),
    "logprobs of beams": (generate(logprobs=0, generate_kwargs={"num_beams": 2}), "one sequence"),
    "a number as prompt": (generate(5), "a text or a list of messages"),
    "a number as message": (generate(["hi", 5]), "a text or a list"),
    "a number to ingest": (lambda e: e.ingest(5), "5 cannot be ingested, expected a path"),
    "numbers to ingest": (lambda e: e.dry_run([5]), "5 cannot be ingested, expected a path"),
    "a number as question": (lambda e: e.ask(3), "the question 3 is an int, expected"),  # type: ignore[arg-type]
    "no question": (lambda e: e.retrieve(None), "expected a text"),  # type: ignore[arg-type]
    "top p alone": (generate(top_p=0.9), "add a temperature"),
    "top k": (lambda e: e.ask("what?", top_k=0), "of at least 1"),
    "options as top k": (lambda e: e.ask("what?", Options()), "whole number"),  # type: ignore[arg-type]
    "an unknown option": (
        lambda e: e.ask("what?", max_tokens=2),  # type: ignore[call-arg]
        "max_tokens: not an option.*did you mean max_new_tokens",
    ),
    "an option of the engine": (
        lambda e: e.ask("what?", decode_weights="int8"),  # type: ignore[call-arg]
        r"^decode_weights: not an option of a request, but of the engine; give it to BlendEngine\(…\)$",
    ),
    "options of the engine": (
        generate(dtype="float32", remote="s3://x"),
        r"^dtype, remote: not an option of a request, but of the engine; give",
    ),
    "a misspelt argument": (
        lambda e: e.ask("what?", topk=2),  # type: ignore[call-arg]
        "topk: not an option.*did you mean top_k",
    ),
    "an answer object in the history": (
        lambda e: e.ask("what?", history=[("who?", Options())]),  # type: ignore[list-item]
        r"history\[0\].*Options.*expected a pair of texts",
    ),
    "a question alone in the history": (
        lambda e: e.ask("what?", history=["who?"]),  # type: ignore[list-item]
        r"history\[0\].*expected a pair of texts",
    ),
    "options as a dictionary": (
        lambda e: e.stream("hi", {"mode": "full"}),  # type: ignore[arg-type]
        "expected Options.*keywords",
    ),
    "remove": (lambda e: e.remove(["never/there.txt"]), "not in the corpus"),
    "too long": (generate("word " * 9000), "shorten"),
}
SURROGATES: dict[str, Callable[[BlendEngine], Any]] = {
    "prompt": generate(SURROGATE),
    "rendered prompt": generate(SURROGATE, apply_chat_template=False),
    "message": generate([{"role": "user", "content": SURROGATE}]),
    "role": generate([{"role": SURROGATE, "content": "Who?"}]),
    "opening": generate(opening=SURROGATE),
    "question": lambda e: e.ask(SURROGATE),
    "search": lambda e: e.retrieve(SURROGATE),
    "entry": lambda e: e.library.add([Entry("i", SURROGATE)]),
    "id": lambda e: e.library.add([Entry(SURROGATE, "x")]),
    "title": lambda e: e.library.add([Entry("i", "x", title=SURROGATE)]),
    "get": lambda e: e.library.get([SURROGATE]),
    "delete": lambda e: e.library.delete([SURROGATE]),
    "encode": lambda e: e.tokens.encode_text(SURROGATE),
}
BAD |= {f"surrogate in {name}": (call, "lone surrogate") for name, call in SURROGATES.items()}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(engine, name):
    call, says = BAD[name]
    with tiny.refuses(says):
        call(engine)


def test_after_an_error_inside_the_model_the_next_request_works(engine):
    def explode(*_: Any) -> None:
        raise ZeroDivisionError

    text = tiny.prompt(engine, 0)
    with engine.adapter.stack.layers[2].mlp.register_forward_hook(explode):
        with pytest.raises(ZeroDivisionError):
            engine.generate(text)
        with pytest.raises(ZeroDivisionError):
            list(engine.stream(text))
    assert engine.generate(text).metrics.reused_tokens > 0


def test_an_overflow_names_its_size_and_a_prompt_that_just_fits_is_answered(engine):
    full = Options(mode="full", apply_chat_template=False)
    one, two = (len(engine.segments(" word" * count, full).ids) for count in (1000, 1001))
    count = 1000 + (4096 - one) // (two - one)
    with pytest.raises(ContextOverflowError) as raised:
        engine.generate(" word" * count, full)
    error = raised.value
    assert error.over_tokens == error.prompt_tokens + 1 - 4096 == 1
    assert str(error.prompt_tokens) in str(error)
    assert "fewer new tokens" not in str(error)  # answers are cut to the room that there is
    fits = engine.generate(" word" * (count - 1), full)
    assert fits.metrics.new_tokens <= two - one


def test_a_checkpoint_that_asks_for_assisted_decoding_is_one_sentence(tmp_path):
    model = tiny.llama()
    model.generation_config.prompt_lookup_num_tokens = 3
    with tiny.engine(model, tmp_path / "s") as engine:
        for mode in ("blend", "full"):
            with tiny.refuses("to None"):
                engine.generate("hi", Options(mode=mode))  # type: ignore[arg-type]
        model.generation_config.prompt_lookup_num_tokens = None
        assert engine.generate("hi").metrics.new_tokens == 6


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"policy": "best"}, "one of"),
        ({"schedule": "cubic"}, "schedule"),
        ({"encode_prefix": False, "prefix_text": "Read:\n"}, "encode_prefix=False"),
    ],
)
def test_bad_settings_are_refused_when_the_engine_is_made(tmp_path, settings, error):
    with tiny.refuses(error):
        tiny.engine(tiny.shared_llama(), tmp_path / "s", **settings)


def test_an_unknown_model_is_one_sentence(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("no-such/model-anywhere", str(empty)):
        with tiny.engine(name, tmp_path / "s", tokenizer=None) as engine:
            with pytest.raises(ModelLoadError) as raised:
                engine.generate("hi")
            assert name in str(raised.value)
            assert "\n" not in str(raised.value)


def test_a_loaded_model_needs_its_tokenizer(tmp_path):
    engine = tiny.engine(tiny.llama(), tmp_path / "s", tokenizer=None)
    with engine, pytest.raises(InvalidInputError, match="needs its tokenizer"):
        engine.generate("hi")


def test_a_store_that_is_a_file_is_one_sentence(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a store")
    with (
        tiny.engine(tiny.shared_llama(), file) as engine,
        tiny.refuses("is a file, expected a directory", StoreUnavailableError),
    ):
        engine.ingest([tiny.document(0)])
    assert file.read_text() == "not a store"


def test_asking_without_a_corpus_or_an_empty_one_is_one_sentence(tmp_path):
    with tiny.engine(tiny.shared_llama(), tmp_path / "s") as engine:
        for _ in range(2):
            with tiny.refuses("ingest", BlendragError):
                engine.ask("what?")
            assert engine.generate("hi").metrics.new_tokens == 6
            report = engine.ingest([])
            assert report.documents == report.chunks == 0


def test_bad_documents_are_named_and_the_others_are_ingested(tmp_path):
    good = {"source": "good.txt", "title": "x", "text": tiny.sentence(9)}
    bad = [Document(**{**good, field: SURROGATE}) for field in good]
    empty = [Document("empty.txt", "", "e"), Document("blank.txt", " \n ", "b")]
    with tiny.engine(tiny.shared_llama(), tmp_path / "s") as engine:
        report = engine.ingest([*bad, *empty, Document(**good)])
        assert (report.failed, report.documents) == (5, 1)
    assert all("lone surrogate" in failure for failure in report.failures[:3])
    assert [f.partition(".")[0] for f in report.failures[3:]] == ["empty", "blank"]


def test_a_closed_engine_refuses_every_call(tmp_path):
    used, unused = (tiny.engine(tiny.shared_llama(), tmp_path / name) for name in ("s", "unused"))
    used.ingest([tiny.document(0, 1)])
    for engine in (used, unused):
        engine.close()
        engine.close()
        for use in (
            lambda e: e.generate("hi"),
            lambda e: e.retrieve("hi"),
            lambda e: e.ask("hi"),
            lambda e: e.ingest([tiny.document(1)]),
            lambda e: e.remove(["a.txt"]),
            lambda e: e.library.search("hi", 1),
            lambda e: e.library.ids(),
            lambda e: e.stats(),
        ):
            with pytest.raises(InvalidInputError) as raised:
                use(engine)
            assert str(raised.value) == "this engine is closed; make a new BlendEngine"
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('only user may speak') }}", "only user may speak"),
        (None, "no chat template"),
    ],
)
def test_messages_without_a_template_that_takes_them_are_refused(tmp_path, template, error):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    with tiny.engine(tiny.llama(), tmp_path / "s", tokenizer=tokenizer) as engine:
        with tiny.refuses(error):
            engine.generate([{"role": "user", "content": "hi"}])
        if template is None:  # texts are sent as they are
            assert engine.tokens.decode(engine.segments("hi there").ids) == "hi there"
            assert engine.generate("hi there").metrics.new_tokens == 6
