"""The demo on the handbook: its texts and questions, which model answers, and what is printed."""

from __future__ import annotations

import importlib.util
import io
import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from semantic_text_splitter import TextSplitter
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import blendrag.demo.tour
import writers
from blendrag.demo import (
    demo_questions,
    demo_writer_path,
    handbook_path,
    handbook_questions,
    smollm2,
)
from blendrag.demo.tables import legend, table, totals
from blendrag.demo.tour import ALONE, ENCODE_AFTER, HANDBOOK_MODES, Stop, Tour, TourReply, take_tour
from blendrag.model.writer import CONFIG, Writer
from cli.commands import invoke

#: Fewer than SmolLM2's tokens, so that there are at least as many chunks as this counts.
WORDS_PER_CHUNK = 420
#: The shape of SmolLM2-135M.
SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
)  # fmt: skip


# -- the handbook ---------------------------------------------------------------------------------


def test_the_handbook_makes_more_than_thirty_chunks() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(handbook_path().iterdir())]
    assert 10 <= len(texts) <= 14
    assert 13_000 <= sum(len(text.split()) for text in texts) <= 15_000
    assert all(text.startswith("# ") for text in texts)
    splitter = TextSplitter.from_callback(lambda text: len(text.split()), WORDS_PER_CHUNK)
    assert sum(len(splitter.chunks(text)) for text in texts) >= 30


def test_every_answer_is_in_the_document_that_its_question_names() -> None:
    questions = handbook_questions()
    assert len(questions) == len({question.text for question in questions}) == 12
    for question in questions:
        text = (handbook_path() / f"{question.document_id}.md").read_text(encoding="utf-8")
        assert any(accepted in text for accepted in question.accepted), question.text
        assert all(len(accepted) <= 40 for accepted in question.accepted)
        assert not question.is_answered_by(question.text)


def test_an_answer_is_right_if_it_contains_an_accepted_one_else_if_it_is_equal() -> None:
    handbook, embedded = handbook_questions()[0], demo_questions()[0]
    assert handbook.is_answered_by(f"I think it is {handbook.accepted[0].upper()}, but ask.")
    assert not handbook.is_answered_by("I do not know.")
    assert embedded.is_answered_by(f" {embedded.answer.title()}.")
    assert not embedded.is_answered_by(f"I think it is {embedded.answer}")


# -- which model ----------------------------------------------------------------------------------


@pytest.fixture
def tours(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models whose tours were begun; no tour is taken."""
    taken: list[str] = []
    tour = Tour(1, 2, (stop(True, True),))

    def embedded(*args: Any, **kwargs: Any) -> Tour:
        taken.append("embedded")
        return tour

    def handbook(model: str, *args: Any) -> Tour:
        taken.append(model)
        return tour

    monkeypatch.setattr(blendrag.demo.tour, "take_tour", embedded)
    monkeypatch.setattr(blendrag.demo.tour, "take_handbook_tour", handbook)
    return taken


def install(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """Pretend that the package of SmolLM2 is in ``folder``, or that it is not installed."""
    find_spec = importlib.util.find_spec

    def found(name: str) -> ModuleSpec | None:
        if name != smollm2.PACKAGE:
            return find_spec(name)
        if folder is None:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    monkeypatch.setattr(smollm2.importlib.util, "find_spec", found)


def test_without_its_package_the_embedded_model_answers_and_a_line_says_so(
    tours: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, None)
    result = invoke("demo", "--json")
    assert result.exit_code == 0
    assert tours == ["embedded"]
    (line,) = result.stderr.splitlines()
    assert "embedded model" in line
    assert smollm2.INSTALL_MODEL in line


def test_with_its_package_smollm2_answers_unless_the_embedded_model_was_asked_for(
    tours: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path)
    (tmp_path / smollm2.FILE).touch()
    assert invoke("demo", "--json").exit_code == 0
    result = invoke("demo", "--model", "embedded", "--json")
    assert result.exit_code == 0
    assert "blendrag demo --model smollm2" in result.stderr
    assert tours == [str(tmp_path / smollm2.FILE), "embedded"]


def test_a_package_without_the_file_and_missing_readers_are_named(
    tours: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path)
    monkeypatch.setattr(smollm2, "READERS", ("no_such_reader",))
    result = invoke("demo", "--model", "smollm2")
    assert result.exit_code == 2
    assert smollm2.INSTALL_MODEL in result.stderr
    assert smollm2.INSTALL_READERS in result.stderr
    assert not tours


# -- the writer -----------------------------------------------------------------------------------


def test_the_demos_writer_names_its_model_and_no_path_of_a_machine() -> None:
    writer = Writer.load(demo_writer_path())
    assert writer.model_id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    config = json.loads((demo_writer_path() / CONFIG).read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == writer.model_id
    assert f"Rank {writer.rank} " in (demo_writer_path() / "README.md").read_text(encoding="utf-8")


def test_the_demos_writer_fits_a_model_of_the_shape_of_smollm2() -> None:
    writer = Writer.load(demo_writer_path())
    with torch.device("meta"):
        decoder = LlamaForCausalLM(SMOLLM2).model
    weights = {
        name: tuple(module.weight.shape)
        for name, module in decoder.named_modules(prefix="model")
        if isinstance(module, torch.nn.Linear)
    }
    assert weights == {
        name: (part.up.shape[0], part.down.shape[1]) for name, part in writer.parts.items()
    }


def test_with_a_writer_the_tour_asks_over_chunks_of_both_kinds_and_the_store_keeps_the_writer(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    made = writers.writer(AutoModelForCausalLM.from_pretrained(model_dir), tmp_path / "writer")
    tour = take_tour(
        tmp_path / "store", str(model_dir), docs, handbook_questions()[:2], HANDBOOK_MODES,
        writer=made, ratio=0.0, top_k=3, max_new_tokens=2,
    )  # fmt: skip
    assert tour.modes == (*HANDBOOK_MODES, ALONE)
    for each in tour.stops:
        for name in ("blend", ALONE):
            assert each.replies[name].reused_tokens > 0
            assert each.replies[name].recomputed_tokens == 0
    assert ALONE in legend(tour)
    assert f"{ALONE} 0/2" in totals(tour)
    corpus = json.loads(invoke("store", "stats", "--store", tmp_path / "store", "--json").stdout)[
        "corpus"
    ]
    assert (corpus["writer"], corpus["encode_after"]) == (
        Writer.load(made).fingerprint,
        ENCODE_AFTER,
    )


# -- the tour and what is printed -----------------------------------------------------------------


def stop(full: bool, blend: bool, number: int = 0) -> Stop:
    """A question whose answers in mode ``full`` and ``blend`` are right or not."""
    text = {True: "It is [red].", False: "It is blue."}
    replies = {
        "full": TourReply(text[full], full, 6.0, 3000, 0, 0),
        "blend": TourReply(text[blend], blend, 1.5 + number, 3000, 2900, 400),
    }
    return Stop(f"Question {number}?", "direct", "red", replies, ("05-battery.md", "11-codes.md"))


def test_the_table_shows_answers_sources_times_and_what_was_reused() -> None:
    tour = Tour(14, 44, tuple(stop(full, blend) for full, blend in [(True, True), (True, False)]))
    console = Console(file=io.StringIO(), width=140)
    console.print(table(tour))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert "14 documents, 44 chunks" in drawn
    for shown in ("It is [red].", "✗ It is blue.", "05-battery.md", "6,000", "1,500", "83%"):
        assert shown in drawn


def test_the_last_line_counts_equal_and_right_answers_and_the_median_speedup() -> None:
    outcomes = [(True, True), (True, False), (False, False)]
    tour = Tour(14, 44, tuple(stop(*of, number=n) for n, of in enumerate(outcomes)))
    line = totals(tour)
    assert "answered alike by full and blend: 2/3" in line
    assert "right: full 2/3, blend 1/3" in line
    assert "speed over full prefill: blend 2.4×" in line
    assert "\n" not in line
    assert json.loads(json.dumps(tour.as_dict()))["alike"] == 2


def test_a_tour_of_two_modes_names_the_sources_and_says_how_far_it_is(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    questions = handbook_questions()[:2]
    tour = take_tour(
        tmp_path / "store", str(model_dir), docs, questions, HANDBOOK_MODES, told.append,
        top_k=3, max_new_tokens=2,
    )  # fmt: skip
    assert tour.modes == HANDBOOK_MODES
    assert all(set(each.sources) <= {"d0.txt", "d1.txt", "d2.txt"} for each in tour.stops)
    assert all(each.sources for each in tour.stops)
    assert told[-1] == "question 2 of 2"
    assert any(text.startswith("ingesting: ") for text in told)
