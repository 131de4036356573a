"""The examples run and say what they promise; stock engines reuse what the table says they do."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendrag.engine import BlendEngine
from llama_index.llms.blendrag import BlendLLM, BlendRetriever

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.append(str(EXAMPLES))  # what the two halves of the table of reuse share
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
#: In these at least 95% of the retrieved tokens must be loaded.
REUSING = [
    "compact (the default)",
    "refine",
    "`CitationQueryEngine`",
    "`ContextChatEngine`",
    "`CondensePlusContextChatEngine`",
    "the same with `BlendSynthesizer`",
]


def run(name: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=directory,
        env=OFFLINE,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_query_engine_answers_and_reuses(tmp_path: Path) -> None:
    said = run("llama_index_rag.py", tmp_path)
    assert "skating" in said
    assert int(re.findall(r"'reused_tokens': (\d+)", said)[0]) > 200


def test_the_chat_engine_updates_its_index_and_reuses_every_turn(tmp_path: Path) -> None:
    # what the embedded model answers is not looked at: it has not learnt to read a system message
    said = run("llama_index_chat.py", tmp_path)
    assert "0 nodes changed by running it again" in said
    turns = re.findall(r"(\d+) of (\d+) tokens reused", said)
    assert len(turns) == 2
    assert all(int(reused) > int(prompt) / 2 for reused, prompt in turns)


def test_the_citation_engine_names_sources_and_reuses(tmp_path: Path) -> None:
    said = run("llama_index_citation.py", tmp_path)
    assert "anna-bell.txt" in said
    assert int(re.findall(r"(\d+)% of the prompt reused", said)[0]) > 50


# -- the table ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> Any:
    path = EXAMPLES / "reuse_llama_index.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def demo(table: Any) -> Iterator[BlendEngine]:
    with table.demo_engine(table.CHUNK_TOKENS) as engine:
        yield engine


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


def test_escaped_texts_are_noted(table: Any, demo: BlendEngine) -> None:
    share, note = measured(table, demo, "simple_summarize")
    assert share < 0.95
    assert "escaped" in note
