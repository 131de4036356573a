"""Fields of a wrapper and arguments of a call become options of the engine."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import tiny
import writers
from blendrag.engine import BlendEngine, Options
from blendrag.engine.library import Entry
from blendrag.errors import InvalidInputError
from blendrag.frameworks.engines import close_shared_engines, shared_engine
from blendrag.frameworks.fields import CONFIG, RequestFields

TOOL = {"type": "function", "function": {"name": "search"}}


class Wrapper(RequestFields):
    model_config = CONFIG


def wrapper(**fields: Any) -> Wrapper:
    return Wrapper(model="demo", **fields)


def test_fields_become_options_and_calls_override_them() -> None:
    assert wrapper().request_options() == Options()
    made = wrapper(
        timeout=30, seed=7, temperature=0.5, max_new_tokens=9, logprobs=True, stop=["END"]
    )
    expected = Options(
        timeout_s=30, seed=7, temperature=0.5, max_new_tokens=9, logprobs=0, stop=("END",)
    )
    assert made.request_options() == expected
    options = made.request_options(stop=["STOP"], timeout=5, seed=8, tools=[TOOL], top_logprobs=3)
    assert (options.stop, options.timeout_s, options.seed) == (("STOP",), 5, 8)
    assert options.tools == (TOOL,)
    assert options.logprobs == 3
    made = wrapper(ratio="auto", min_ratio=0.3)
    assert made.request_options() == Options(ratio="auto", min_ratio=0.3)
    assert made.request_options(min_ratio=0.0).min_ratio == 0.0


def test_the_frameworks_name_of_the_longest_answer_is_accepted() -> None:
    made = wrapper(max_tokens=9)
    assert made.max_new_tokens == made.max_tokens == made.request_options().max_new_tokens == 9
    assert made.request_options(max_tokens=3) == made.request_options(max_new_tokens=3)
    assert "max_tokens" not in made.model_dump()


def test_two_names_of_one_option_with_different_values_are_refused_in_one_sentence() -> None:
    says = "max_tokens 9 and max_new_tokens 4 are one option"
    with pytest.raises(ValidationError, match=says):
        wrapper(max_tokens=9, max_new_tokens=4)
    with pytest.raises(InvalidInputError, match=says) as raised:
        wrapper().request_options(max_tokens=9, max_new_tokens=4)
    assert tiny.one_sentence(str(raised.value))
    assert wrapper(timeout=3, timeout_s=3).timeout_s == 3
    assert wrapper(max_new_tokens=9).request_options(max_tokens=4).max_new_tokens == 4


def test_a_model_is_loaded_with_the_arguments_of_from_pretrained(
    checkpoint: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "model": checkpoint,
        "store": tmp_path / "s",
        "device_map": "cpu",
        "model_kwargs": {"attn_implementation": "eager", "torch_dtype": "bfloat16"},
    }
    with Wrapper(**given) as made:
        assert Wrapper(**given).engine is shared_engine(**given) is made.engine
        assert Wrapper(**{**given, "model_kwargs": {}}).engine is not made.engine
        config = made.engine.adapter.model.config
        assert (config._attn_implementation, str(config.dtype)) == ("eager", "torch.bfloat16")
        assert pickle.loads(pickle.dumps(made)).engine is made.engine
    close_shared_engines()


def test_wrappers_over_a_store_use_its_writer(checkpoint: str, tmp_path: Path) -> None:
    folder = writers.writer(tiny.llama(), tmp_path / "writer")
    given: dict[str, Any] = {"model": checkpoint, "store": tmp_path / "s", "writer": str(folder)}
    with Wrapper(**given) as made:
        made.engine.use_embedder(tiny.WordEmbedder())
        made.engine.ingest([tiny.document(0)])
        made.engine.open()
        namespace = made.engine.kv_namespace.validity.namespace
    with Wrapper(**given | {"writer": None}) as made:
        made.engine.open()
        assert made.engine.kv_namespace.validity.namespace == namespace
    close_shared_engines()


def test_a_loaded_model_is_used_and_not_copied_described_or_pickled(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": tiny.llama(), "tokenizer": tiny.tokenizer()}
    with Wrapper(**given, store=tmp_path / "s") as made:
        assert made.engine.adapter.model is given["model"]
        for same in (copy.deepcopy(made), Wrapper(**given, store=str(tmp_path / "s"))):
            assert same.engine is made.engine
        assert made.model_dump()["model"] == "LlamaForCausalLM"
        assert "LlamaForCausalLM" in repr(made)
        assert "Linear" not in repr(made)
        with pytest.raises(InvalidInputError, match="a loaded model cannot be pickled"):
            pickle.dumps(made)
        with pytest.raises(ValidationError, match="loaded tokenizer, which cannot be serialised"):
            Wrapper(**made.model_dump())


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"model": tiny.llama()}, "tokenizer is None, expected a name alone, or a loaded model"),
        ({"model": "demo", "tokenizer": tiny.tokenizer()}, "expected a name alone"),
        ({"model": 5}, "model is 'int'"),
        ({"model": "demo", "device": "cpu", "device_map": "auto"}, "were both given"),
        (
            {"model": "demo", "dtype": "float32", "model_kwargs": {"dtype": "float16"}},
            "were both given",
        ),
        (
            {"model": "demo", "model_kwargs": {"trust_remote_code": True}},
            "pass it as an option of its own",
        ),
    ],
)
def test_what_contradicts_a_model_is_refused(
    names: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match=says):
        Wrapper(**names, store=tmp_path / "s")


def test_logprobs_in_the_form_of_openai() -> None:
    def asked(**given: Any) -> int | None:
        return wrapper().request_options(**given).logprobs

    assert asked() is asked(logprobs=False) is asked(logprobs=False, top_logprobs=0) is None
    assert (asked(logprobs=True), asked(logprobs=4)) == (0, 4)
    assert asked(logprobs=True, top_logprobs=5) == 5


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"timeout": "1"}, "^timeout '1' .*number of seconds"),
        ({"stop": 5}, "a text or a list of texts"),
        ({"stop": ["x", ""]}, "stop holds an empty text"),
        ({"max_tokens": 0}, "^max_tokens 0 must be a whole number of at least 1"),
        ({"top_logprobs": 3}, "add logprobs=True"),
        ({"logprobs": 30}, "^logprobs 30 must be a whole number in"),
        ({"logprobs": True, "top_logprobs": 30}, "^top_logprobs 30 must be a whole number in"),
        ({"length_penalty": 1}, "length_penalty: not an option .* generate_kwargs"),
        (
            {"decode_weights": "int8"},
            "decode_weights: .*, but of the engine; give it to the construc",
        ),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_by_the_name_the_caller_used(
    option: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidInputError, match=expected) as raised:
        wrapper().request_options(**option)
    assert tiny.one_sentence(str(raised.value))


def test_the_default_embedder_does_not_contradict_a_corpus_with_another(tmp_path: Path) -> None:
    with BlendEngine("demo", tmp_path, embedder="another/embedder") as other:
        other.library.add([Entry(id="1", text="one")], embed=False, precompute=False)
    try:
        with wrapper(store=tmp_path) as made:
            made.engine.library.add([Entry(id="2", text="two")], embed=False, precompute=False)
            assert [entry.id for entry in made.engine.library.entries()] == ["1", "2"]
        with (
            wrapper(store=tmp_path, embedder="minilm-offline") as made,
            pytest.raises(InvalidInputError, match="another/embedder"),
        ):
            made.engine.library.add([Entry(id="3", text="three")], embed=False, precompute=False)
    finally:
        close_shared_engines()


def test_learning_can_be_turned_off_for_the_engine_of_a_wrapper(tmp_path):
    try:
        assert wrapper(store=tmp_path / "a").engine.settings.learn
        assert not wrapper(store=tmp_path / "a", learn=False).engine.settings.learn
    finally:
        close_shared_engines()
