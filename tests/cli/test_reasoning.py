"""``ask`` and ``chat`` with a model that thinks, and the arguments of its chat template."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

import scripted
import tiny
from blendrag.cli import ask as asking
from blendrag.cli import options
from blendrag.cli.output import write_thought
from blendrag.config import OPTIONS, settings
from blendrag.engine import BlendEngine, Document
from cli.commands import invoke, printed
from cli.test_terminal import Terminal, run

#: Thinks unless it is told not to, as Qwen3's does.
TEMPLATE = scripted.TEMPLATE + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
CLOSED = "<think>\n\n</think>\n\n"
THOUGHT, ANSWER = "It is about a windmill.\n\nSo I say when.", "In 1874."
QUESTION = "When was the windmill built?"


def reply(prompt: str) -> str:
    return ANSWER if prompt.endswith(CLOSED) else f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlendEngine]:
    with scripted.engine(reply, tmp_path / "store", max_new_tokens=100, top_k=1) as made:
        made.tokens.tokenizer.chat_template = TEMPLATE
        made.ingest([Document("a.txt", "The windmill is in the town. " * 8, "")]).whole()
        monkeypatch.setattr(asking.options, "engine_for", lambda *_, **__: nullcontext(made))
        yield made


def prompts(engine: BlendEngine) -> list[str]:
    said: list[str] = engine.adapter.model.prompts
    return said


def test_reasoning_is_dim_on_a_terminal_before_the_answer(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n"))
    for command in (["ask", QUESTION], ["chat"]):
        shown = run(*command)
        thought, _, rest = shown.partition(ANSWER)
        assert rest
        dim = "".join(part.partition("m")[2] for part in thought.split("\x1b[")[1:])
        assert THOUGHT.replace("\n", "") in dim.replace("\n", "")
        assert thought.count("\x1b[2m") > 1, "it is not shown as it comes"
        assert thought.rstrip().endswith("\x1b[0m"), "the answer is dim, too"
        assert "think>" not in shown


def test_reasoning_goes_to_the_one_stream_that_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stdout, stderr, shows in (
        (Terminal(), Terminal(), "stdout"),
        (io.StringIO(), Terminal(), "stderr"),
        (Terminal(), io.StringIO(), "stdout"),
        (io.StringIO(), io.StringIO(), ""),
    ):
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        write_thought("So.")
        assert ("So." in stdout.getvalue()) == (shows == "stdout")
        assert ("So." in stderr.getvalue()) == (shows == "stderr")


def test_a_program_gets_the_answer_without_the_reasoning(engine: BlendEngine) -> None:
    result = invoke("ask", QUESTION)
    assert result.stdout == f"{ANSWER}\n"
    assert "windmill." not in result.stderr.replace("the windmill", "")
    assert THOUGHT.split("\n")[0] not in result.stderr
    fields = printed("ask", QUESTION)
    assert (fields["answer"], fields["reasoning"]) == (ANSWER, THOUGHT)


def test_no_thinking_is_the_templates_own_switch(engine: BlendEngine) -> None:
    assert printed("ask", QUESTION)["reasoning"]
    assert printed("ask", QUESTION, "--no-thinking")["reasoning"] == ""
    assert (
        printed("ask", QUESTION, "--chat-template-kwargs", "enable_thinking=false")["reasoning"]
        == ""
    )
    assert [prompt.endswith(CLOSED) for prompt in prompts(engine)] == [False, True, True]
    assert "thinking was" not in invoke("ask", QUESTION, "--no-thinking").stderr


def test_a_template_without_a_switch_is_told_once(engine: BlendEngine) -> None:
    engine.tokens.tokenizer.chat_template = scripted.TEMPLATE
    result = invoke("chat", "--no-thinking", stdin=f"{QUESTION}\n" * 3)
    assert (
        result.stderr.count("note: thinking was not switched off: the chat template has no ") == 1
    )
    assert result.stderr.count("metrics: ") == 3


def test_the_history_of_a_chat_has_answers_without_reasoning(engine: BlendEngine) -> None:
    result = invoke("chat", stdin=f"{QUESTION}\nAnd by whom?\n")
    assert result.stdout == f"{ANSWER}\n" * 2
    _, second = prompts(engine)
    assert second.count(ANSWER) == 1
    assert THOUGHT.split("\n")[0] not in second


def test_ctrl_c_while_the_model_thinks_keeps_the_conversation(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts = iter([True])

    def press(text: str) -> None:
        if next(interrupts, False):
            raise KeyboardInterrupt

    monkeypatch.setattr(asking, "write_thought", press)
    result = invoke("chat", stdin=f"Who knows?\n{QUESTION}\n")
    assert result.exit_code == 0
    assert "note: the answer was ended" in result.stderr
    assert result.stdout == f"{ANSWER}\n"
    assert "Who knows?" not in prompts(engine)[-1]


def test_thoughts_that_were_cut_are_no_answer(engine: BlendEngine) -> None:
    result = invoke("ask", QUESTION, "--max-new-tokens", "8")
    assert result.stdout == ""
    assert result.stderr.count("the answer was cut") == 1
    assert (
        "at --max-new-tokens 8 while the model was still thinking; more let it go on"
        in result.stderr
    )
    assert "or --no-thinking makes it shorter" in result.stderr


def test_a_full_context_forgets_the_oldest_turns_and_says_so_once_per_trim(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine.adapter), "context_tokens", 700)
    questions = [f"What of number {i}? {'Tell me of the windmill. ' * 6}" for i in range(8)]
    result = invoke("chat", "--no-thinking", stdin="\n".join(questions))
    assert result.stdout == f"{ANSWER}\n" * 8
    assert "error: " not in result.stderr
    last = prompts(engine)[-1]
    kept = [i for i in range(8) if f"number {i}?" in last]
    assert 0 < kept[0] < 7
    assert kept == list(range(kept[0], 8)), "the newest are kept"
    told = [line for line in result.stderr.splitlines() if "context is full" in line]
    assert 0 < len(told) <= kept[0]
    assert told[0].startswith("note: the model's context is full: the oldest ")


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (["reasoning_effort=low"], {"reasoning_effort": "low"}),
        (["a=false", "b=True", "c=None"], {"a": False, "b": True, "c": None}),
        (['a=["x", 1]', "b=1=2", "c="], {"a": ["x", 1], "b": "1=2", "c": ""}),
        (['{"a": {"b": 1}}', "a=2"], {"a": 2}),
    ],
)
def test_template_arguments_are_json_or_texts(given: list[str], arguments: object) -> None:
    read = [OPTIONS["chat_template_kwargs"].read(text) for text in given]
    values = options.given({"chat_template_kwargs": read}, ["chat_template_kwargs"])
    assert values == {"chat_template_kwargs": arguments}


@pytest.mark.parametrize("given", ["", "low", "=low", "{", '["a"]', "{}}"])
def test_other_template_arguments_are_refused_in_one_sentence(given: str) -> None:
    with tiny.refuses("^chat_template_kwargs .* NAME=VALUE or a JSON object$"):
        OPTIONS["chat_template_kwargs"].read(given)


def test_an_argument_that_the_template_does_not_read_is_refused(engine: BlendEngine) -> None:
    result = invoke("ask", QUESTION, "--chat-template-kwargs", "enable_thoughts=false")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "'enable_thoughts', which this model's chat template does not read" in result.stderr


def test_an_environment_variable_has_template_arguments(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLENDRAG_CHAT_TEMPLATE_KWARGS", json.dumps({"enable_thinking": False}))
    monkeypatch.setenv("BLENDRAG_ENABLE_THINKING", "false")
    settings.cache_clear()
    assert settings().chat_template_kwargs == {"enable_thinking": False}
    assert settings().enable_thinking is False
    monkeypatch.setenv("BLENDRAG_CHAT_TEMPLATE_KWARGS", "low")
    result = invoke("ask", QUESTION, "--store", store)
    assert result.exit_code == 2
    wrong = "'low' must be a dictionary; as text NAME=VALUE or a JSON object"
    assert result.stderr == f"error: BLENDRAG_CHAT_TEMPLATE_KWARGS {wrong}\n"
