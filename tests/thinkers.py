"""Models that think, search and answer, each in the format of another family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import chat_forms
import scripted
import tiny
from blendrag.engine import BlendEngine

QUESTION, ANSWER = "Which sport does Anna Bell enjoy?", "Skating."
#: Stands in the documents, not in the question.
_FOUND = "skating"
_ARGUMENTS = json.dumps({"query": QUESTION})
_CALL = f'{{"name": "search", "arguments": {_ARGUMENTS}}}'
_DEEPSEEK = chat_forms.R1.replace("function<｜tool▁sep｜>", "").replace(
    "'\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>'",
    "'<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>'",
)
#: Without Harmony's <|end|>, which ends answers in tests.
#: Template, thought before a call, call, and thought and answer.
THINKERS: dict[str, tuple[str, str, str]] = {
    "hermes": (
        scripted.TEMPLATE,
        f"<think>\nI must look.\n</think>\n\n<tool_call>\n{_CALL}\n</tool_call>",
        f"<think>\nI know it.\n</think>\n\n{ANSWER}",
    ),
    "harmony": (
        chat_forms.HARMONY,
        "<|channel|>analysis<|message|>I must look.<|start|>assistant<|channel|>commentary "
        f"to=functions.search <|constrain|>json<|message|>{_ARGUMENTS}<|call|>",
        "<|channel|>analysis<|message|>I know it.<|start|>assistant<|channel|>final<|message|>"
        + ANSWER,
    ),
    "mistral": (
        scripted.MISTRAL,
        f"[THINK]I must look.[/THINK][TOOL_CALLS][{_CALL}]",
        f"[THINK]I know it.[/THINK]{ANSWER}",
    ),
    "deepseek": (
        _DEEPSEEK,
        "I must look.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>"
        f"{_ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"I know it.</think>{ANSWER}",
    ),
    "granite": (
        chat_forms.GRANITE + "{# <response> #}",
        f"<think>I must look.</think><|tool_call|>[{_CALL}]",
        f"<think>I know it.</think>\n<response>{ANSWER}</response>",
    ),
}


@contextmanager
def thinker(name: str, root: Any) -> Iterator[BlendEngine]:
    """An engine over a document whose model searches before it answers."""
    template, call, answer = THINKERS[name]
    words = scripted.tokens(template).tokenizer
    model = scripted.model(lambda prompt: answer if _FOUND in prompt.lower() else call)
    model.words = words
    with tiny.engine(model, root, tokenizer=words, max_new_tokens=200) as engine:
        text = "Which sport does Anna Bell enjoy? She goes skating on the lake. " * 3
        engine.ingest([replace(tiny.document(0), text=text)])
        yield engine
