"""How a case is worded, and for whom."""

from __future__ import annotations

import pytest

import tiny
from blendrag.engine import Options
from blendrag.engine.rendering import render
from blendrag.lab.evaluation.wording import DEMO, SHORT_ANSWER, SUMMARY, Wording, wording_for
from blendrag.lab.training.samples import NATIVE, Entry, template
from blendrag.model.loading import load_tokens
from blendrag.model.tokens import Tokens


def test_the_demo_model_reads_what_it_was_trained_on() -> None:
    tokens = load_tokens("demo")
    assert wording_for(tokens.tokenizer, "f1") == DEMO
    trained = template(tokens.tokenizer, NATIVE)
    segments = trained.context_segments([Entry("One."), Entry("Two.")])
    expected = "".join(text for text, _ in segments) + trained.question("Who?")
    assert render(DEMO.prompt(["One.", "Two."], "Who?"), tokens, Options()).text == expected


def test_other_models_are_told_what_is_wanted() -> None:
    tokenizer = tiny.tokenizer()
    assert wording_for(tokenizer, "accuracy") == SHORT_ANSWER
    assert wording_for(tokenizer, "rouge_l") == SUMMARY


@pytest.mark.parametrize("wording", [DEMO, SHORT_ANSWER, SUMMARY], ids=lambda w: w.name)
def test_chunks_stand_between_blank_lines_and_leave_no_trace_when_there_are_none(
    wording: Wording,
) -> None:
    prompt = wording.prompt([" One. ", "Two."], " Who? ")
    assert "\n\nOne.\n\nTwo.\n\n" in prompt
    assert "Who?" in prompt
    assert wording.prompt([], "Who?") == prompt.replace("One.\n\nTwo.\n\n", "")


def test_braces_and_holes_in_texts_stay_text() -> None:
    assert "{context} {question}" in SHORT_ANSWER.prompt(["{context} {question}"], "{question}")


def test_the_head_is_what_every_prompt_begins_with() -> None:
    tokens = Tokens(tiny.tokenizer())
    head = SHORT_ANSWER.head(tokens)
    assert render(SHORT_ANSWER.prompt(["One."], "Who?"), tokens, Options()).text.startswith(
        head + "One."
    )
