"""The examples run and print what they promise; stock engines reuse what the table says they do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.instrumentation import get_dispatcher

import example_scripts
from blendrag.engine import BlendEngine
from embedding_once import each_text_is_embedded_once
from few_documents import few_documents
from llama_index.llms.blendrag import BlendLLM, BlendRetriever

pytestmark = pytest.mark.slow

#: In these at least 95% of the retrieved tokens must be loaded.
REUSING = [
    "compact (the default)",
    "refine",
    "`CitationQueryEngine`",
    "`ContextChatEngine`",
    "`CondensePlusContextChatEngine`",
    "compact, repacked as it overflows",
]


@pytest.fixture(scope="module", autouse=True)
def _each_text_is_embedded_once() -> Iterator[None]:
    with each_text_is_embedded_once():
        yield


@pytest.fixture(scope="module")
def table() -> Any:
    return example_scripts.load("reuse_llama_index.py")


@pytest.fixture(scope="module")
def demo(table: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """The embedded model over some of its corpus; the examples share the model."""
    with (
        few_documents(tmp_path_factory.mktemp("corpus")) as documents,
        table.demo_engine(table.CHUNK_TOKENS, [documents]) as engine,
    ):
        yield engine


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that the examples fill."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def printed_by(
    demo: BlendEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    def run(name: str, store: Path | None = None) -> str:
        handlers = get_dispatcher().event_handlers
        before = list(handlers)
        try:
            with few_documents(tmp_path):
                example_scripts.run(name, store=store)
        finally:
            handlers[:] = before
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("name", "says", "reused", "least"),
    [
        ("llama_index_rag.py", "skating", r"(\d+) of \d+ prompt tokens reused", 200),
        ("llama_index_citation.py", "anna-bell.txt", r"(\d+)% of the prompt reused", 50),
    ],
)
def test_an_example_answers_and_reuses(
    printed_by: Callable[..., str], store: Path, name: str, says: str, reused: str, least: int
) -> None:
    printed = printed_by(name, store)
    assert says in printed
    assert int(re.findall(reused, printed)[0]) > least


def test_the_chat_engine_updates_its_index_and_reuses_every_turn(
    printed_by: Callable[..., str],
) -> None:
    """The embedded model does not read system messages, so its answers are not checked."""
    printed = printed_by("llama_index_chat.py")
    assert "0 nodes changed by running it again" in printed
    turns = re.findall(r"(\d+) of (\d+) tokens reused", printed)
    assert len(turns) == 2
    assert all(int(reused) > int(prompt) / 2 for reused, prompt in turns)


def measured(table: Any, demo: BlendEngine, path: str, **options: Any) -> tuple[float, str]:
    llm = BlendLLM(engine=demo, max_tokens=2, **options)
    retriever = BlendRetriever(engine=demo, similarity_top_k=4)
    found: tuple[float, str] = table.share(
        demo, table.PATHS[path](llm, retriever), table.QUESTIONS[:1]
    )
    return found


@pytest.mark.parametrize("path", REUSING)
def test_a_stock_engine_reuses_nearly_all_it_retrieves(
    table: Any, demo: BlendEngine, path: str
) -> None:
    assert measured(table, demo, path)[0] >= 0.95


def test_without_blending_nothing_is_counted_as_reused(table: Any, demo: BlendEngine) -> None:
    assert measured(table, demo, REUSING[0], mode="full")[0] == 0.0


def test_escaped_texts_are_reused_between_escapes_and_noted(table: Any, demo: BlendEngine) -> None:
    share, note = measured(table, demo, "simple_summarize")
    assert 0.8 < share < 1
    assert "escaped" in note


def test_the_notebook_prints_what_it_shows(tmp_path: Path) -> None:
    with few_documents(tmp_path):
        printed = example_scripts.run_notebook("llama_index.ipynb")
    assert "skating" in printed[1]
    assert "archery" in printed[3]
    assert int(re.findall(r"(\d+) of \d+ tokens loaded\nblend", printed[2])[0]) > 200
