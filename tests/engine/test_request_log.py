"""One line per request says what was reused, and why something was not."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tiny
from blendrag.engine import BlendEngine, Options
from blendrag.engine.request_log import NAMED, wording
from blendrag.errors import RequestTimeout
from blendrag.metrics import ChunkReport, RequestMetrics


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    with tiny.engine(tiny.llama(), tmp_path_factory.mktemp("log") / "s") as made:
        made.ingest([tiny.document(0), tiny.document(1)])
        made.generate(prompt(made))
        made.drain()
        yield made


def prompt(engine: BlendEngine) -> str:
    return "\n\n".join(tiny.chunk_texts(engine, 0)) + "\n\nWhat?"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages at INFO of logger ``blendrag``, as they come."""
    caplog.set_level(logging.INFO, logger="blendrag")
    caplog.clear()
    return _Messages(caplog)  # type: ignore[return-value]


class _Messages:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __iter__(self) -> Iterator[str]:
        return (
            r.getMessage()
            for r in self._caplog.records
            if r.name.startswith("blendrag.") and r.levelno == logging.INFO
        )


def test_a_request_is_one_line_with_its_figures(engine: BlendEngine, lines: list[str]) -> None:
    m = engine.generate(prompt(engine), Options(ratio=0.3)).metrics
    (line,) = lines
    assert m.reused_tokens > 0
    assert f"{m.prompt_tokens} prompt tokens, {m.reused_tokens} reused" in line
    assert f"({m.recomputed_tokens} of them recomputed)" in line
    assert f"{m.fresh_tokens} fresh" in line
    assert f"first token after {m.ttft_s:.3f} s" in line
    assert "not reused" not in line
    assert "\n" not in line


def test_chunks_that_were_not_reused_are_named_with_the_reason(
    engine: BlendEngine, lines: list[str]
) -> None:
    metrics = engine.generate(prompt(engine), Options(mode="full")).metrics
    (line,) = lines
    chunks = metrics.chunks
    assert f"{len(chunks)} of {len(chunks)} chunks not reused: doc0.txt#" in line
    assert all(chunk.chunk_id[:12] in line for chunk in chunks)
    assert line.count("mode full computes every token") == 1


def test_a_prompt_in_which_nothing_was_recognised_says_so(
    engine: BlendEngine, lines: list[str]
) -> None:
    engine.generate("Nothing of this was ingested.")
    (line,) = lines
    assert "no known chunk was recognised" in line


async def test_streams_and_async_requests_say_it_once_too(
    engine: BlendEngine, lines: list[str]
) -> None:
    list(engine.stream(prompt(engine)))
    await engine.agenerate(prompt(engine))
    async for _ in engine.astream(prompt(engine)):
        pass
    engine.batch([prompt(engine)] * 2)
    assert len(list(lines)) == 5


def test_a_request_without_an_answer_is_a_line_too(engine: BlendEngine, lines: list[str]) -> None:
    hook = engine.adapter.stack.base.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    try:
        with pytest.raises(RequestTimeout):
            engine.generate(prompt(engine), Options(timeout_s=0.05, max_new_tokens=50))
        pieces = engine.stream("hello", Options(max_new_tokens=50))
        pieces.close()
        engine.drain()
    finally:
        hook.remove()
    late, gone = lines
    assert "stopped by its timeout of 0.05 s" in late
    assert "abandoned by its caller" in gone


def test_many_chunks_of_one_reason_are_counted() -> None:
    chunks = tuple(
        ChunkReport(f"{i:02d}" * 10, "", 5, "computed", 5, "it is new") for i in range(NAMED + 3)
    )
    line = wording(RequestMetrics("blend", 0.1, 0, 0.2, 9, 0, 0, 9, 1, 0, 0, chunks=chunks))
    assert "and 3 more (it is new)" in line
    assert line.count("it is new") == 1


@pytest.mark.slow
def test_nothing_is_printed_unless_logging_is_set_up() -> None:
    """A library that writes to stderr unasked is in the way of every command line over it."""
    code = (
        "import logging; logging.getLogger('torchao').setLevel(logging.ERROR)\n"  # it warns when imported
        "logging.getLogger('torch.utils._pytree').setLevel(logging.ERROR)\n"
        "from blendrag.engine.request_log import log_answer\n"
        "from blendrag.metrics import RequestMetrics\n"
        "log_answer(RequestMetrics('full', 0, 0, 0, 1, 0, 0, 1, 1, 1, 1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_the_wording_of_an_answer_shows_its_notes() -> None:
    given: Any = RequestMetrics("blend", 0.1, 0, 0.2, 9, 0, 0, 9, 1, 0, 0, notes=("Mind this",))
    assert wording(given).endswith("; Mind this")
