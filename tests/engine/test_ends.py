"""Where answers end: at the template's end of turn, at their longest length, or where the context is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import scripted
import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import ContextOverflowError

pytestmark = pytest.mark.timeout(120)

_TURNS = "{% for m in messages %}"
_DONE = "{% endfor %}"
CHATML = (
    _TURNS + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + _DONE
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
LLAMA_3 = (
    "<|bos|>" + _TURNS + "<|header|>{{ m.role }}<|header_end|>\n\n{{ m.content }}<|eot_id|>" + _DONE
    + "{% if add_generation_prompt %}<|header|>assistant<|header_end|>\n\n{% endif %}"
)  # fmt: skip
GEMMA = (
    "<|bos|>" + _TURNS + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n" + _DONE
    + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)  # fmt: skip
MISTRAL = (
    "<|bos|>" + _TURNS + "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}" + _DONE
)  # fmt: skip
GLM = (
    "[gMASK]<sop>" + _TURNS + "<|{{ m.role }}|>\n{{ m.content }}" + _DONE
    + "{# <tool_call> <arg_key> #}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)  # fmt: skip
HARMONY = (
    _TURNS + "{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|fin|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|fin|>{% endif %}" + _DONE
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)  # fmt: skip
#: Template, control tokens, and an answer that goes on after its end.
KINDS = {
    "ChatML": (CHATML, ["<|im_start|>", "<|im_end|>"], "Fine.<|im_end|>\n<|im_start|>user\nAnd?"),
    "Llama 3": (LLAMA_3, ["<|eot_id|>", "<|header|>", "<|header_end|>"], "Fine.<|eot_id|>And?"),
    "Llama 3, after a call": (LLAMA_3, ["<|eot_id|>", "<|eom_id|>"], "Fine.<|eom_id|>And?"),
    "Gemma": (GEMMA, ["<start_of_turn>", "<end_of_turn>"], "Fine.<end_of_turn>\nuser\nAnd?"),
    "Mistral": (MISTRAL, ["[INST]", "[/INST]", "</s>"], "Fine.</s>[INST] And?[/INST]"),
    "GLM": (GLM, ["<|user|>", "<|assistant|>", "<|observation|>"], "Fine.<|user|>\nAnd?"),
    "GLM, after a call": (GLM, ["<|user|>", "<|observation|>"], "Fine.<|observation|>\nAnd?"),
    "Harmony": (
        HARMONY,
        ["<|channel|>", "<|message|>", "<|return|>", "<|call|>", "<|fin|>"],
        "<|channel|>final<|message|>Fine.<|return|><|start|>user<|message|>And?",
    ),
    "Harmony, after a call": (
        HARMONY,
        ["<|channel|>", "<|message|>", "<|return|>", "<|call|>", "<|fin|>"],
        "<|channel|>final<|message|>Fine.<|call|><|start|>user<|message|>And?",
    ),
}  # fmt: skip


def talking(kind: str, root: Path, is_marked: bool = True) -> BlendEngine:
    """A model that goes on after its turn, whose generation config names another end. Not ``is_marked``: the
    tokenizer says of none of its tokens that it is a control token, as those of some GGUF files."""
    template, special, reply = KINDS[kind]
    words = tiny.tokenizer()
    if is_marked:
        words.add_special_tokens({"extra_special_tokens": ["<|start|>", *special]})
    else:
        words.add_tokens(special)
    words.chat_template = template
    model = scripted.model(default=reply)
    model.words = words
    model.generation_config.eos_token_id = words.convert_tokens_to_ids("<|bos|>")
    return tiny.engine(model, root, tokenizer=words, max_new_tokens=None, mode="full")


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_turn_ends_answers_whatever_end_the_model_names(
    kind: str, tmp_path: Path
) -> None:
    with talking(kind, tmp_path) as made:
        whole = made.generate("How?")
        pieces = list(made.stream("How?"))
        together = made.batch(["How?", "And how?", "Why?"])
        assert whole.text == "".join(pieces) == "Fine."
        assert {answer.text for answer in together} == {"Fine."}
        assert {answer.finish_reason for answer in (whole, *together)} == {"stop"}


@pytest.mark.parametrize("kind", ["ChatML", "Llama 3", "Gemma", "Mistral"])
def test_ends_of_turns_end_answers_of_tokenizers_without_control_tokens(
    kind: str, tmp_path: Path
) -> None:
    with talking(kind, tmp_path, is_marked=False) as made:
        assert made.generate("How?").text == "".join(made.stream("How?")) == "Fine."


def test_the_end_of_harmonys_analysis_ends_no_answer(tmp_path: Path) -> None:
    with talking("Harmony", tmp_path) as made:
        made.adapter.model.default = (
            "<|channel|>analysis<|message|>Hm.<|fin|><|start|>assistant<|channel|>final<|message|>"
            "Fine.<|return|>And?"
        )
        assert made.generate("How?").text == "Fine."


QUIZ = "One.\nQuestion: Who built ships?\nTwo."


def test_a_question_in_an_answer_ends_no_answer_of_a_model_with_a_template(tmp_path: Path) -> None:
    with scripted.engine([], tmp_path, QUIZ, mode="full") as made:
        made.ingest([tiny.document(1)])
        assert made.ask("Write a quiz.").text == QUIZ
        assert "".join(made.ask_stream("Write a quiz.", history=[("A?", "B.")])) == QUIZ


# -- length -----------------------------------------------------------------------------------------


SENTENCE = "It built ships in the town. "
CONTEXT = 250


@pytest.fixture
def model() -> scripted.ScriptedLlama:
    """Answers in more than the 128 tokens that were the default once."""
    made = scripted.model(default=SENTENCE * 20)
    made.config.max_position_embeddings = CONTEXT
    return made


@pytest.fixture
def long(model: scripted.ScriptedLlama, tmp_path: Path) -> Iterator[BlendEngine]:
    given = {"tokenizer": scripted.tokenizer(), "max_new_tokens": None, "mode": "full"}
    with tiny.engine(model, tmp_path, **given) as made:
        yield made


def test_an_answer_without_a_limit_goes_on_to_its_end(long: BlendEngine) -> None:
    answer = long.generate("Tell me all.")
    assert answer.text == SENTENCE * 20
    assert (answer.finish_reason, answer.metrics.notes) == ("stop", ())
    assert answer.metrics.new_tokens > 128
    assert long.generate("Tell me all.", max_new_tokens=3).metrics.new_tokens == 3


def test_an_answer_without_a_limit_ends_with_the_context_and_says_so(
    model: scripted.ScriptedLlama, long: BlendEngine
) -> None:
    model.default = SENTENCE * 100
    answer = long.generate("Tell me all.")
    assert answer.finish_reason == "length"
    assert answer.metrics.prompt_tokens + answer.metrics.new_tokens == CONTEXT
    (note,) = answer.metrics.notes
    assert (
        note == f"the answer was cut after {answer.metrics.new_tokens} tokens: its context is full"
    )


@pytest.mark.parametrize("is_open", [True, False])
def test_a_longer_answer_than_there_is_room_for_is_cut_to_the_room(
    is_open: bool, model: scripted.ScriptedLlama, long: BlendEngine
) -> None:
    model.default = SENTENCE
    if is_open:
        long.open()
    answer = long.generate("Tell me all.", max_new_tokens=10**30)
    assert answer.finish_reason == "stop"
    (note,) = answer.metrics.notes
    room = CONTEXT - answer.metrics.prompt_tokens
    assert f"was cut to {room}: " in note
    exact = long.generate("Tell me all.", max_new_tokens=room)
    assert exact.metrics.notes == ()


def test_a_prompt_that_leaves_no_room_is_refused(long: BlendEngine) -> None:
    with tiny.refuses(f"over the model's context of {CONTEXT}", ContextOverflowError):
        long.generate("word " * CONTEXT)


@pytest.mark.parametrize("is_open", [True, False])
def test_an_answer_cut_in_its_thoughts_says_so(is_open: bool, tmp_path: Path) -> None:
    """Whether the model begins them or the prompt."""
    template = scripted.TEMPLATE + "{# </think> #}"
    if is_open:
        template = template.replace(
            "assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"
        )
    tokenizer = scripted.tokenizer()
    tokenizer.chat_template = template
    reply = f"{'' if is_open else '<think>'}{SENTENCE * 8}</think>Ships."
    with scripted.engine([], tmp_path, reply, tokenizer=tokenizer, mode="full") as made:
        cut = made.generate("What?", Options(max_new_tokens=40))
        assert (cut.text, cut.finish_reason) == ("", "length")
        assert cut.metrics.notes == (
            "the answer was cut after 40 tokens while the model was still thinking: raise max_new_tokens to "
            "let it go on",
        )
        late = made.generate("What?", Options(max_new_tokens=10_000))
        assert late.text == "Ships."
        assert "thinking" not in " ".join(late.metrics.notes)
        answering: Any = made.generate("What?", Options(max_new_tokens=late.metrics.new_tokens - 2))
        assert answering.finish_reason == "length"
        assert answering.metrics.notes == ()
