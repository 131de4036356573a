"""The examples run and print what they promise; the table of reuse counts what was loaded."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import example_scripts
import scripted
from blendrag import demo
from blendrag.config import settings
from blendrag.engine import BlendEngine
from embedding_once import each_text_is_embedded_once
from few_documents import few_documents
from langchain_blendrag import close_shared_engines

pytestmark = pytest.mark.slow

EXAMPLES = example_scripts.EXAMPLES


@pytest.fixture(scope="module", autouse=True)
def _few_documents_embedded_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with each_text_is_embedded_once(), few_documents(tmp_path_factory.mktemp("corpus")):
        yield


@pytest.fixture(scope="module")
def table() -> Any:
    return example_scripts.load("reuse_langchain.py")


@pytest.fixture(scope="module")
def corpus(table: Any) -> Iterator[BlendEngine]:
    """The embedded model over its corpus, which the examples share."""
    with table.demo_engine(64) as engine:
        yield engine


@pytest.mark.parametrize(
    ("name", "says"), [("langchain_rag.py", "skating"), ("langchain_lcel.py", "East Norwich")]
)
def test_a_chain_answers_and_reads_most_of_its_prompt(
    corpus: BlendEngine, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    example_scripts.run(name, store=corpus.root if name == "langchain_rag.py" else None)
    printed = capsys.readouterr().out
    assert says in printed
    tokens, read = (
        int(re.search(rf"'{key}': (\d+)", printed)[1])  # type: ignore[index]
        for key in ("input_tokens", "cache_read")
    )
    assert read > tokens / 2


def test_an_agent_searches_and_what_it_found_is_loaded(tmp_path: Path) -> None:
    question = "Which sport does Anna Bell enjoy?"

    def script(prompt: str) -> str:
        found = "<tool_response>" in prompt
        return "Skating." if found else scripted.call("search", query=question)

    with scripted.engine(script, tmp_path / "store") as engine:
        engine.ingest([demo.demo_corpus_path()])
        message = example_scripts.load("langchain_agent.py").ask(engine, question)
        assert message.content == "Skating."
        assert len(message.response_metadata["blendrag"]["chunks"]) == 4
        found = sum(
            len(engine.kv_namespace.model.text_ids(c.text)) for c in engine.retrieve(question, 4)
        )
        assert message.usage_metadata["input_token_details"]["cache_read"] >= found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("langchain_agent.py", r"python examples/langchain_agent.py Qwen/\S+ ./docs "),
        ("langchain_moving/after.py", "usage: .* FOLDER QUESTION"),
        ("reuse_langchain.py", "python examples/reuse_table.py"),
    ],
)
def test_an_example_without_its_arguments_says_what_it_needs(name, says):
    with pytest.raises(SystemExit, match=says):
        example_scripts.run(name)


@pytest.mark.usefixtures("corpus")
def test_a_moved_app_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(demo.demo_corpus_path(), tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", "demo")
    monkeypatch.setenv("BLENDRAG_EMBEDDER", "minilm-offline")
    monkeypatch.setenv("BLENDRAG_CHUNK_TOKENS", "64")
    settings.cache_clear()
    try:
        question = "In which town does Albert Lange live?"
        example_scripts.run("langchain_moving/after.py", "docs", question)
    finally:
        close_shared_engines()
        settings.cache_clear()
    assert "East Norwich" in capsys.readouterr().out


def test_the_page_shows_the_lines_of_moving_an_app() -> None:
    before, after = (
        (EXAMPLES / "langchain_moving" / name).read_text().splitlines()[1:]
        for name in ("before.py", "after.py")
    )
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    page = (EXAMPLES.parent / "docs" / "integrations.md").read_text()
    section = page.partition("### Moving an app\n")[2]
    shown = section.partition("```diff\n")[2].partition("```")[0].splitlines()
    assert sorted(line[0] + line[2:] for line in changes) == sorted(shown)
    assert len(shown) < 15


def test_the_table_counts_what_is_loaded_and_not_what_is_computed(
    table: Any, corpus: BlendEngine
) -> None:
    retriever = table.BlendRetriever(engine=corpus, k=2)

    def share(make: Any, **options: Any) -> float:
        llm = table.ChatBlend(engine=corpus, max_tokens=2, **options)
        return float(table.share(corpus, make(llm, retriever), table.QUESTIONS[:1])[0])

    for name in ("stuff", "lcel", "retrieval_chain", "document_prompt"):
        assert share(getattr(table, name)) >= 0.95, name
    assert share(table.stuff, mode="full") == 0


def test_the_notebook_prints_what_it_shows() -> None:
    printed = example_scripts.run_notebook("langchain.ipynb")
    assert "skating" in printed[1]
    assert "archery" in printed[3]
    assert int(re.findall(r"blend: (\d+) of", printed[2])[0]) > 200
