"""Where the system starts no more threads, requests end with a sentence and the engine works again later."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.errors import NoThreadError
from blendrag.frameworks.streaming import to_thread

CALLER = "caller"
start = threading.Thread.start


@contextmanager
def no_threads() -> Iterator[None]:
    def refuse(thread: threading.Thread) -> None:
        if thread.name != CALLER:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("threads") / "store"
    with tiny.engine(tiny.llama(), root) as made:
        made.ingest([tiny.document(0)])
    return root


@pytest.fixture
def engine(store: Path) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), store) as made:
        yield made


def prompt(engine: BlendEngine) -> str:
    return "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\nWhat did the company build?"


def outcome(call: Callable[[], Any]) -> Any:
    """What ``call`` returns or raises where no thread starts, within seconds."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as exc:
            found.append(exc)

    caller = threading.Thread(target=run, name=CALLER, daemon=True)
    with no_threads():
        caller.start()
        caller.join(10)
    assert found, "no answer within 10 s"
    return found[0]


def test_an_engine_without_its_thread_refuses_and_answers_later(engine: BlendEngine) -> None:
    text = prompt(engine)
    for _ in range(2):
        refused = outcome(lambda: engine.generate(text))
        assert isinstance(refused, NoThreadError)
        assert tiny.one_sentence(str(refused))
    assert isinstance(outcome(lambda: list(engine.stream(text))), NoThreadError)
    assert engine.generate(text).metrics.reused_tokens > 0


@pytest.mark.parametrize("together", [False, True])
def test_a_request_without_its_loader_is_refused_and_the_next_one_answered(
    engine: BlendEngine, together: bool
) -> None:
    text = prompt(engine)
    expected = engine.generate(text)  # the worker's thread runs
    asked = [text, text] if together else [text]
    assert isinstance(outcome(lambda: engine.batch(asked)), NoThreadError)
    full = outcome(lambda: engine.generate(text, Options(mode="full")))
    assert full.metrics.new_tokens > 0  # which loads nothing
    assert engine.generate(text).text == expected.text
    assert not any(m._forward_pre_hooks for m in engine.adapter.model.modules())


def test_without_a_thread_to_promote_them_chunks_stay_on_disk(engine: BlendEngine) -> None:
    text = prompt(engine)
    expected = engine.generate(text, Options(mode="full"))  # the worker's thread runs

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "blendrag-promotion":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            answer = engine.generate(text)
            assert answer.metrics.reused_tokens > 0
    assert answer.metrics.prompt_tokens == expected.metrics.prompt_tokens
    engine.close()  # waits for no job that nobody does


def test_an_event_loop_without_threads_says_so_and_begins_nothing_later(
    engine: BlendEngine,
) -> None:
    text, called = prompt(engine), []

    async def ask() -> list[Any]:
        with no_threads():
            waited = [engine.agenerate(text), to_thread(called.append, 1)]
            refused = await asyncio.gather(*waited, return_exceptions=True)
        await to_thread(called.append, 2)
        return refused

    assert [type(error) for error in asyncio.run(ask())] == [NoThreadError, NoThreadError]
    assert called == [2]
