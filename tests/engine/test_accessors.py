"""What other rooms and distributions use of an engine."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path

from greenlet import getcurrent, greenlet

import tiny
from blendrag.corpus.corpus import Corpus
from blendrag.engine import BlendEngine

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "src" / "blendrag" / "engine"


def test_nobody_outside_the_engine_uses_its_insides() -> None:
    files = [
        path
        for folder in ("src", "integrations", "lab", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_relative_to(ENGINE) and "tests" not in path.relative_to(ROOT).parts
    ]
    assert len(files) > 200
    used = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        if "kv_namespace" in (text := path.read_text())  # parsing all takes a second
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "kv_namespace"
    ]
    assert not used


def test_a_request_asks_the_corpus_little(engine: BlendEngine) -> None:
    def ask() -> None:
        engine.ask("Who built the ships near the town?", max_new_tokens=1)

    asked: list[str] = []
    ask()
    corpus = engine.require_corpus()
    corpus.file.connection.set_trace_callback(asked.append)
    try:
        ask()
    finally:
        corpus.file.connection.set_trace_callback(None)
    own = [each for each in asked if not each.startswith("--")]  # others are FTS5's
    assert len(own) < 36, own
    assert not [each for each in own if "FROM meta" in each]


def test_a_request_goes_by_one_state_of_the_settings(tmp_path: Path) -> None:
    with tiny.engine(tiny.llama(), tmp_path / "store") as engine:
        engine.ingest([tiny.document(0)]).whole()
        corpus, manifest = engine.kv_namespace.corpus, engine.manifest
        with corpus.one_look():
            assert engine.manifest == manifest
            with Corpus.open(tmp_path / "store") as other:
                other.set_manifest(replace(manifest, encode_after=1))
            assert engine.manifest == manifest
            with ThreadPoolExecutor() as pool:
                assert pool.submit(lambda: engine.manifest.encode_after).result() == 1
        assert engine.manifest.encode_after == 1


def test_names_tokens_and_context_need_no_weights(tmp_path: Path) -> None:
    with BlendEngine("demo", tmp_path / "store") as engine:
        assert engine.model_name.endswith("demo")
        assert engine.tokens.has_template
        assert engine.context_tokens > 0
        assert engine.root == tmp_path / "store"
        assert engine.corpus is None
        rendered = engine.render("Where?")
        assert "Where?" in rendered.text
        assert engine.segments(rendered).ids == engine.segments("Where?").ids
        assert not engine.kv_namespace.model.is_loaded


def test_a_rendered_prompt_is_answered_as_the_prompt_itself(tmp_path: Path) -> None:
    with tiny.engine(tiny.shared_llama(), tmp_path / "store") as engine:
        engine.ingest([tiny.document(0)]).whole()
        prompt = tiny.prompt(engine, 0)
        answers = [
            engine.generate(asked, max_new_tokens=4) for asked in (prompt, engine.render(prompt))
        ]
        assert answers[0].text == answers[1].text
        assert answers[0].metrics.prompt_tokens == answers[1].metrics.prompt_tokens
        assert answers[1].metrics.chunks


def test_requests_that_take_turns_look_at_the_settings_each_for_itself(tmp_path: Path) -> None:
    """A short request between two tokens of a long one does not go by settings that were replaced since."""
    with tiny.engine(tiny.shared_llama(), tmp_path / "store") as engine:
        engine.ingest([tiny.document(0)]).whole()
        corpus, manifest = engine.kv_namespace.corpus, engine.manifest

        def long_request() -> None:
            with corpus.one_look():
                assert engine.manifest == manifest
                getcurrent().parent.switch()
                assert engine.manifest == manifest

        running = greenlet(long_request)
        running.gr_context = copy_context()
        running.switch()
        with Corpus.open(tmp_path / "store") as other:
            other.set_manifest(replace(manifest, encode_after=1))
        with corpus.one_look():
            assert engine.manifest.encode_after == 1
        running.switch()
        assert running.dead
