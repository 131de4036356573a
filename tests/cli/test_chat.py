"""``blendrag chat``: one process, many questions; Ctrl-C ends an answer, the end of stdin ends it all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blendrag.corpus.corpus import Corpus
from cli.commands import QUESTION, ask, invoke, refused

MORE = ("--max-new-tokens", "4", "--top-k", "1")


def test_questions_are_answered_one_after_another_with_their_sources(store: Path) -> None:
    questions = f"{QUESTION}\n\n  \nAnd of document 1?\n"
    result = invoke("chat", "--store", store, *MORE, stdin=questions)
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert first == ask(store, *MORE)["answer"]
    assert second
    kinds = [line.split(": ")[0] for line in result.stderr.splitlines()]
    assert [kind for kind in kinds if kind != "progress"] == [
        "note", *("source", "metrics", "note") * 2
    ]  # fmt: skip
    assert "reused" in result.stderr
    assert "cut at --max-new-tokens 4; more let it go on" in result.stderr
    quiet = invoke("chat", "--store", store, *MORE, "--no-sources", stdin=questions)
    assert "source: " not in quiet.stderr


def test_a_chat_in_json_prints_one_object_a_line(store: Path) -> None:
    result = invoke("chat", "--store", store, *MORE, "--json", stdin=f"{QUESTION}\n{QUESTION}\n")
    first, _ = map(json.loads, result.stdout.splitlines())
    assert first.keys() == ask(store, *MORE).keys()
    assert "source: " not in result.stderr


def test_a_bad_question_does_not_end_the_conversation(store: Path) -> None:
    result = invoke("chat", "--store", store, *MORE, stdin=f"{'word ' * 1200}\n{QUESTION}\n")
    assert result.exit_code == 0
    assert "error: " in result.stderr
    assert "retrieve fewer chunks (--top-k)" in result.stderr
    assert result.stdout == f"{ask(store, *MORE)['answer']}\n"


def test_a_long_conversation_forgets_its_beginning(store: Path) -> None:
    """The model's context of 1024 tokens holds a few of these questions."""
    long = f"{'Tell me of the windmill. ' * 12}{QUESTION}\n"
    result = invoke("chat", "--store", store, *MORE, stdin=long * 8)
    assert "error: " not in result.stderr
    assert result.stderr.count("metrics: ") == 8


def test_a_chat_without_documents_is_refused_before_the_first_question(
    model_dir: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    assert "no corpus" in refused("chat", "--store", store, "--model", str(model_dir))
    assert not store.exists()


@pytest.mark.parametrize("command", [("ask", QUESTION), ("chat",), ("search", QUESTION)])
def test_a_store_whose_documents_were_removed_is_refused_before_the_engine_is_made(
    command: tuple[str, ...], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Corpus.open(store) as corpus:
        for source in corpus.sources():
            corpus.remove_source(source)
    monkeypatch.delattr("blendrag.cli.options.engine_for")
    assert "holds no chunks; ingest first" in refused(*command, "--store", store)


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_conversation(
    store: Path, ctrl_c_while_decoding: None
) -> None:
    args = ("--max-new-tokens", "60", "--top-k", "1", "--no-sources")
    result = invoke("chat", "--store", store, *args, stdin=f"{QUESTION}\n{QUESTION}\n")
    assert result.exit_code == 0
    _, ended = result.stderr.split("note: the answer was ended\n")
    assert ended.startswith("metrics: first token after ")
    assert len(result.stdout.splitlines()) >= 1


def test_answers_are_sampled_as_the_options_say(store: Path) -> None:
    greedy, hot = ask(store)["answer"], ("--temperature", "9")
    assert ask(store, *hot, "--generate-kwargs", "top_k=1")["answer"] == greedy
    drawn, again = (ask(store, *hot, "--seed", "4", "--top-p", "0.99")["answer"] for _ in range(2))
    assert drawn == again != greedy
