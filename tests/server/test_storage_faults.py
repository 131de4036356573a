"""A corpus that is full, locked or cannot be read: one sentence, and requests without it go on."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import tiny
from blendrag.corpus.database import CorpusFile
from server.live import CHAT, HELLO, Live, live

#: Long enough for further pages.
LONG = {"source": "long.txt", "text": " ".join(tiny.sentence(number) for number in range(40))}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    with tiny.engine(
        tiny.llama(num_hidden_layers=2), tmp_path / "s", prefix_text=tiny.BOS
    ) as engine:
        engine.ingest([tiny.document(0)])
        with live(engine, keys="editor write") as made:
            yield made


class Failing:
    """A connection whose statements fail, or only those that write."""

    def __init__(self, connection: sqlite3.Connection, code: int, writes_only: bool) -> None:
        self._connection, self._code, self._writes_only = connection, code, writes_only

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, statement: str, *more: Any) -> Any:
        if not self._writes_only or statement == "BEGIN IMMEDIATE":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = self._code
            raise error
        return self._connection.execute(statement, *more)


@contextmanager
def full(file: CorpusFile) -> Iterator[None]:
    pages = file.connection.execute("PRAGMA page_count").fetchone()[0]
    file.connection.execute(f"PRAGMA max_page_count = {pages}")
    yield
    file.connection.execute("PRAGMA max_page_count = 1000000")


@contextmanager
def locked(file: CorpusFile) -> Iterator[None]:
    file.connection.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(file.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
    file.connection.execute("PRAGMA busy_timeout = 30000")


def failing(code: int, writes_only: bool = True) -> Callable[[Any], AbstractContextManager[None]]:
    @contextmanager
    def fails(file: Any) -> Iterator[None]:
        real = file.connection
        file.connection = Failing(real, code, writes_only)
        yield
        file.connection = real

    return fails


def status_and_error(reply: Any) -> tuple[int, str]:
    return reply.status_code, reply.json().get("error", {}).get("message", "")


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        (full, 507, "no space left"),
        (failing(sqlite3.SQLITE_IOERR_WRITE), 507, "no space left"),
        (failing(sqlite3.SQLITE_IOERR_FSYNC), 507, "no space left"),
        (locked, 503, "is locked by another process"),
        (failing(sqlite3.SQLITE_IOERR), 503, "cannot be read or written"),
        (failing(sqlite3.SQLITE_CORRUPT), 503, "is damaged"),
        (failing(sqlite3.SQLITE_READONLY), 503, "cannot be written"),
    ],
)
def test_a_corpus_that_cannot_be_written_refuses_an_ingest_and_nothing_else(
    server: Live, fault: Callable[[Any], AbstractContextManager[None]], status: int, said: str
) -> None:
    file = server.engine.require_corpus().file
    before = file.rows("SELECT * FROM document")
    with server.client(headers={"Authorization": "Bearer editor"}) as client:
        with fault(file):
            reply = client.post("/v1/ingest", json={"documents": [LONG]})
            assert reply.status_code == status, reply.text
            assert said in status_and_error(reply)[1]
            assert "\n" not in status_and_error(reply)[1]
            assert client.post(CHAT, json={"messages": HELLO}).status_code == 200
            asked = {"messages": HELLO, "retrieve": True}
            assert client.post(CHAT, json=asked).status_code == 200
            assert len(client.get("/v1/documents").json()["data"]) == 1
            assert client.get("/health").status_code == 200
        assert file.rows("SELECT * FROM document") == before
        assert client.post("/v1/ingest", json={"documents": [LONG]}).status_code == 200
        assert len(client.get("/v1/documents").json()["data"]) == 2


@pytest.mark.parametrize(
    "code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CORRUPT]
)
def test_a_corpus_that_cannot_be_read_refuses_what_needs_it_and_nothing_else(
    server: Live, code: int
) -> None:
    file = server.engine.require_corpus().file
    asked = {"messages": HELLO, "retrieve": True}
    with server.client(headers={"Authorization": "Bearer editor"}) as client:
        with failing(code, writes_only=False)(file):
            assert client.post(CHAT, json={"messages": HELLO}).status_code == 200
            assert client.post(CHAT, json=asked).status_code == 503
            assert client.get("/v1/documents").status_code == 503
            assert client.get("/health").status_code == 200
            assert client.get("/metrics").status_code == 200
        assert client.post(CHAT, json=asked).status_code == 200
