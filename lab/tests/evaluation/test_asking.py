"""Ways to answer, and the wording of questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import tiny
from blendrag.engine import Options
from blendrag.engine.rendering import build_rag_prompt, render
from blendrag.engine.request import RagPrompt
from blendrag.errors import InvalidInputError
from blendrag.fusor.selection import POLICIES
from blendrag.model.loading import load_tokens
from blendrag.model.tokens import Tokens
from blendrag.planning.calibrate import Calibration, calibrations
from blendrag_lab.evaluation.asking import (
    DEMO,
    SHORT_ANSWER,
    SUMMARY,
    Wording,
    ask,
    prompt_of,
    wording_for,
)
from blendrag_lab.evaluation.datasets import Case
from blendrag_lab.evaluation.ways import BASELINES, DEFAULT_POLICIES, Way, look_up, make_ways
from blendrag_lab.synthetic.samples import NATIVE, PromptChunk, template


def test_a_policy_is_combined_with_every_schedule_ratio_and_prefix():
    assert make_ways(["full", "none"], ["constant"], [0.1], [True]) == (Way("none"), Way("full"))
    named = {way.policy for way in make_ways(DEFAULT_POLICIES, ["constant"], [0.1], [True])}
    assert named == {*POLICIES, "none", "prefix"}
    made = make_ways(["query"], ["constant", "linear"], [0.1, 0.2], [True, False])
    assert len({way.key for way in made}) == len(made) == 2 + 8
    assert Way("query", "linear", 0.2, False) in made
    close = make_ways(["query"], ["constant"], [0.1234567, 0.1234568], [True])
    assert len({way.key for way in close}) == 4
    several = ["constant", "linear"]
    limited = make_ways(["reuse", "boundary(4)", "hkvd-once"], several, [0.1], [True])[2:]
    bare = (Way(policy, encode_prefix=True) for policy in ("reuse", "boundary(4)"))
    assert limited == (*bare, Way("hkvd-once", "constant", 0.1, True))


def test_every_way_becomes_a_request():
    for way in make_ways([*POLICIES, *BASELINES], ["linear"], [0.1], [True]):
        options = way.options(5)
        assert options.max_new_tokens == 5
        assert options.policy == (None if way.policy in BASELINES else way.policy)
        assert options.mode == "blend" or way.policy in BASELINES


def test_calibrated_means_the_policy_in_the_store(tmp_path):
    found = Calibration("blend", "query", "blend", 0.1, 8, 0.0, 1.0, 1.0, 1.0, 0.0)
    made = make_ways(["full", "calibrated", "query"], ["constant"], [0.1], [True])
    with pytest.raises(InvalidInputError, match="nothing is calibrated for this model"):
        look_up(made, tmp_path, "model")
    calibrations(tmp_path, "model").keep(found)
    *others, calibrated, query = look_up(made, tmp_path, "model")
    assert (*others, query) == (*made[:2], made[3])
    assert (calibrated.policy, calibrated.options(5).policy) == ("calibrated", "blend")
    assert calibrated.key != made[2].key  # another calibration is asked anew


@pytest.mark.parametrize(
    ("given", "sentence"),
    [((["magic"], ["constant"], [0.1]), "'magic' is not one of"),
     ((["query"], ["steep"], [0.1]), "'steep'"),
     ((["query"], ["constant"], [float("nan")]), "ratio nan must be a number")],
)  # fmt: skip
def test_an_unknown_way_is_one_sentence(given: tuple[Any, Any, Any], sentence):
    with pytest.raises(InvalidInputError, match=sentence):
        make_ways(*given, [True])


def test_the_demo_model_reads_what_it_was_trained_on():
    tokens = load_tokens("demo")
    assert wording_for(tokens.tokenizer, "f1") == DEMO
    trained = template(tokens.tokenizer, NATIVE)
    segments = trained.context_segments([PromptChunk("One."), PromptChunk("Two.")])
    asked = f"{trained.before_question}Who?{trained.after_question}"
    expected = "".join(text for text, _ in segments) + asked
    assert render(DEMO.prompt(["One.", "Two."], "Who?"), tokens, Options()).text == expected
    assert wording_for(tiny.tokenizer(), "accuracy") == SHORT_ANSWER
    assert wording_for(tiny.tokenizer(), "rouge_l") == SUMMARY
    assert "passages. Answer with the answer alone" in SHORT_ANSWER.template


def test_a_prompt_template_words_prompts_as_ask_does():
    own = "Passages:\n\n{context}\n\nAnswer {question} from them."
    asked = build_rag_prompt("Who?", ["One.", "Two."], template=own).text
    assert Wording.of(own).prompt(["One.", "Two."], "Who?") == asked


@pytest.mark.parametrize("wording", [DEMO, SHORT_ANSWER, SUMMARY], ids=("demo", "short", "summary"))
def test_chunks_are_between_blank_lines_and_leave_no_trace_if_there_are_none(wording):
    prompt = wording.prompt([" One. ", "Two."], " Who? ")
    assert "\n\nOne.\n\nTwo.\n\n" in prompt
    assert wording.prompt([], "Who?") == prompt.replace("One.\n\nTwo.\n\n", "")
    assert "{context}" in wording.prompt(["{context} {question}"], "Who?")
    tokens = Tokens(tiny.tokenizer())
    shown = render(prompt, tokens, Options()).text
    assert shown.startswith(wording.head(tokens) + "One.")


class Forced(LogitsProcessor):
    """Teacher forcing step by step."""

    def __init__(self, answer: Sequence[int]) -> None:
        self.answer, self.rows = answer, list[torch.Tensor]()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.answer[len(self.rows)]] = 0.0
        self.rows.append(scores[0].clone())  # [V]
        return forced  # type: ignore[return-value]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # with and without a window
@pytest.mark.parametrize("mode", ["full", "blend"])
def test_one_forward_over_an_answer_equals_teacher_forcing_step_by_step(tmp_path, family, mode):
    said = (5, 9, 7, 6, 8)
    with tiny.engine(tiny.family(family, initializer_range=0.2), tmp_path / "s") as engine:
        engine.ingest([tiny.document(1)]).whole()
        prompt, chunks = tiny.prompt(engine, 1), tiny.chunk_texts(engine, 1)
        options = Options(mode=mode, policy="query", ratio=0.3, max_new_tokens=len(said))
        reply = ask(engine, prompt, options, chunks, said)
        forced = Forced(said)
        watched = {"logits_processor": LogitsProcessorList([forced])}
        engine.generate(prompt, replace(options, generate_kwargs=watched))
        assert reply.text == engine.generate(prompt, options).text
    assert reply.logits is not None
    assert tiny.difference(reply.logits, torch.stack(forced.rows)) < 1e-4


def test_a_chat_is_messages_or_one_text_without_a_chat_template():
    chunks = tuple(tiny.sentence(i) for i in range(3))
    case = Case(
        "0", "0", "k", "And now?", ("x",), chunks, (("First?", "One."), ("Second?", "Two."))
    )
    tokens = Tokens(tiny.tokenizer())
    messages = prompt_of(case, chunks, SHORT_ANSWER, tokens)
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 + ["user"]  # type: ignore
    questions = ["First?", "Second?", "And now?"]
    asked = [SHORT_ANSWER.prompt([c], q) for c, q in zip(chunks, questions, strict=True)]
    said = [asked[0], "One.", asked[1], "Two.", asked[2]]
    assert [m["content"] for m in messages] == said  # type: ignore
    tokens.tokenizer.chat_template = None
    plain = prompt_of(case, chunks, SHORT_ANSWER, Tokens(tokens.tokenizer))
    assert isinstance(plain, RagPrompt)
    assert plain.text == "\n\n".join(said)
    assert plain.chunks is not None
    assert [plain.text[m.start : m.end] for m in plain.chunks] == [c.strip() for c in chunks]
