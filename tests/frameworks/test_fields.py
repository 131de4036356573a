"""Fields of a wrapper and arguments of a call become options of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.library import Entry
from blendrag.errors import InvalidInputError
from blendrag.frameworks.engines import close_shared_engines
from blendrag.frameworks.fields import CONFIG, RequestFields

TOOL = {"type": "function", "function": {"name": "search"}}


class Wrapper(RequestFields):
    model_config = CONFIG


def wrapper(**fields: Any) -> Wrapper:
    return Wrapper(model="demo", **fields)


def test_fields_become_options_and_calls_override_them() -> None:
    assert wrapper().request_options() == Options()
    made = wrapper(timeout=30, seed=7, temperature=0.5, max_tokens=9, logprobs=True, stop=["END"])
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


def test_logprobs_in_the_form_of_openai() -> None:
    def asked(**given: Any) -> int | None:
        return wrapper().request_options(**given).logprobs

    assert asked() is asked(logprobs=False) is asked(logprobs=False, top_logprobs=0) is None
    assert (asked(logprobs=True), asked(logprobs=4)) == (0, 4)
    assert asked(logprobs=True, top_logprobs=5) == 5


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"timeout": 0}, "timeout 0"),
        ({"min_ratio": 1.5}, r"min_ratio 1.5 must be a number in"),
        ({"seed": 2**64}, "seed"),
        ({"top_logprobs": 3}, "add logprobs=True"),
        ({"logprobs": True, "top_logprobs": 21}, r"in \[0, 20\]"),
    ],
)
def test_a_value_out_of_range_is_refused_in_fields_and_calls(
    fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        wrapper(**fields)
    with pytest.raises(InvalidInputError, match=says) as raised:
        wrapper().request_options(**fields)
    assert tiny.one_sentence(str(raised.value))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"max_tokens": "5"}, "max_tokens '5' \\(str\\), expected a whole number"),
        ({"timeout": "1"}, "^timeout '1' .*number of seconds"),
        ({"stop": 5}, "a text or a list of texts"),
        ({"stop": ["x", ""]}, "stop holds an empty text"),
        ({"generate_kwargs": 5}, "^generate_kwargs 5 .*a dictionary"),
        ({"template_kwargs": 5}, "^template_kwargs 5 .*a dictionary"),
        ({"max_tokens": 0}, "^max_tokens 0 is not 1 or more"),
        ({"max_new_tokens": 0}, "^max_new_tokens 0 is not 1 or more"),
        ({"logprobs": 30}, "^logprobs 30 must be a number"),
        ({"logprobs": True, "top_logprobs": 30}, "^top_logprobs 30 must be a number"),
        ({"presence_penalty": 1}, "presence_penalty: not an option .* timeout"),
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
