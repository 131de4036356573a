"""The examples run, and say what their texts say they do."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import scripted
from blendrag.demo import demo_corpus_path

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
sys.path.append(str(EXAMPLES))  # what the two halves of the table of reuse share
OFFLINE = {
    **os.environ, "HF_HUB_OFFLINE": "1", "MODEL": "demo", "BLENDRAG_EMBEDDER": "minilm-offline",
    "BLENDRAG_CHUNK_TOKENS": "64", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def run(script: Path, directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=directory, env=OFFLINE, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("name", "answer"), [("langchain_rag.py", "skating"), ("langchain_lcel.py", "East Norwich")]
)
def test_a_chain_answers_and_reads_most_of_its_prompt(
    name: str, answer: str, tmp_path: Path
) -> None:
    out = run(EXAMPLES / name, tmp_path)
    assert answer in out
    tokens, read = (
        int(re.search(rf"'{key}': (\d+)", out)[1])  # type: ignore[index]
        for key in ("input_tokens", "cache_read")
    )
    assert read > tokens / 2


def test_an_agent_searches_and_what_it_found_is_loaded(tmp_path: Path) -> None:
    question = "Which sport does Anna Bell enjoy?"

    def script(prompt: str) -> str:
        return (
            "Skating." if "<tool_response>" in prompt else scripted.call("search", query=question)
        )

    with scripted.engine(script, tmp_path / "store") as engine:
        engine.ingest([demo_corpus_path()])
        message = module(EXAMPLES / "langchain_agent.py").ask(engine, question)
        assert message.content == "Skating."
        assert len(message.response_metadata["blendrag"]["chunks"]) == 4
        found = sum(len(engine.resources.text_ids(c.text)) for c in engine.retrieve(question, 4))
        assert message.usage_metadata["input_token_details"]["cache_read"] >= found


def test_a_moved_app_answers(tmp_path: Path) -> None:
    shutil.copytree(demo_corpus_path(), tmp_path / "docs")
    after = EXAMPLES / "langchain_moving" / "after.py"
    assert "East Norwich" in run(after, tmp_path, "docs", "In which town does Albert Lange live?")


def test_the_page_shows_the_lines_of_moving_an_app() -> None:
    before, after = (
        (EXAMPLES / "langchain_moving" / name).read_text().splitlines()[1:]
        for name in ("before.py", "after.py")
    )
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    page = (ROOT / "docs" / "integrations.md").read_text()
    shown = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    assert sorted(line[0] + line[2:] for line in changes) == sorted(shown)
    assert len(shown) < 15


def test_the_table_counts_what_is_loaded_and_not_what_is_computed() -> None:
    table = module(EXAMPLES / "reuse_langchain.py")
    with table.demo_engine(table.CHUNK_TOKENS) as engine:
        retriever = table.BlendRetriever(engine=engine, k=2)

        def share(make: Any, **options: Any) -> float:
            llm = table.ChatBlend(engine=engine, max_tokens=2, **options)
            return float(table.share(engine, make(llm, retriever), table.QUESTIONS[:1])[0])

        for name in ("stuff", "lcel", "retrieval_chain", "document_prompt"):
            assert share(getattr(table, name)) >= 0.95, name
        assert share(table.stuff, mode="full") == 0
