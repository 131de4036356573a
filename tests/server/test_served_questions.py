"""``blendrag ask`` over a store with a running server."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.cli import served as serving
from blendrag.cli.ask import print_answer
from blendrag.config import settings
from blendrag.engine import BlendEngine
from blendrag.errors import BlendragError
from blendrag.store import server_record
from blendrag.store.server_record import ServerRecord, loopback, read, written
from cli.commands import invoke, save_model
from server.conftest import ANSWER, QUESTION
from server.live import Live


@contextmanager
def announced(server: Live, root: Path, **changes: Any) -> Iterator[ServerRecord]:
    """The store at ``root`` names ``server``."""
    about = {"host": "127.0.0.1", "port": server.port, "model": "demo", "needs_key": False}
    record = ServerRecord(**(about | changes))
    server.service.record = record
    try:
        with written(root, record):
            yield record
    finally:
        server.service.record = None


def asked(root: Path, **given: Any) -> serving.ServedPieces | None:
    context: Any = SimpleNamespace(params={"store": root, "question": QUESTION, **given})
    return serving.pieces(context, QUESTION)


def test_a_question_is_answered_by_the_stores_server_and_imports_no_torch(
    served: Live, demo_engine: BlendEngine
) -> None:
    code = (
        "import sys\nfrom blendrag.cli.main import main\n"
        "try: main()\nexcept SystemExit as done: assert not done.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'sentence_transformers'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    args = ["ask", QUESTION, "--store", str(demo_engine.root), "--ratio", "0.2"]
    with announced(served, demo_engine.root) as record:
        done = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert ANSWER in done.stdout
    told = done.stderr.splitlines()
    assert told[0] == f"note: answered by the server of this store at {record.url}"
    assert any(line.startswith("source: ") and "anna-bell" in line for line in told)
    assert any(line.startswith("metrics: first token after ") for line in told)


def test_the_server_gives_the_answer_sources_and_metrics_of_the_engine(
    served: Live, demo_engine: BlendEngine
) -> None:
    own = demo_engine.ask(QUESTION, max_new_tokens=12)
    with announced(served, demo_engine.root):
        pieces = asked(demo_engine.root, max_new_tokens=12)
        assert pieces is not None
        text = "".join(pieces)
    found = pieces.answer
    assert (found.text, found.finish_reason) == (text, own.finish_reason) == (own.text, "stop")
    assert [each.chunk_id for each in found.sources] == [each.chunk_id for each in own.sources]
    assert found.metrics.prompt_tokens == own.metrics.prompt_tokens
    assert {each.chunk_id for each in found.metrics.chunks}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"needs_key": True}, "asks for an API key"),
        ({"secret": "that of another server"}, "is gone: something else listens there"),
        ({"port": 0}, "does not answer"),
    ],
)
def test_a_server_that_does_not_answer_is_named_in_a_note(
    served: Live, demo_engine: BlendEngine, capsys: Any, changes: dict[str, Any], why: str
) -> None:
    if "port" in changes:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            changes = {"port": gone.getsockname()[1]}
    with announced(served, demo_engine.root, **changes) as record:
        if "secret" in changes:
            served.service.record = ServerRecord("127.0.0.1", served.port, "demo", False)
        assert asked(demo_engine.root) is None
    said = f"note: answered without the server of this store at {record.url}, which {why}\n"
    assert capsys.readouterr().err == said


def test_a_refused_question_is_answered_without_the_server(
    served: Live, demo_engine: BlendEngine, capsys: Any
) -> None:
    with announced(served, demo_engine.root):
        assert asked(demo_engine.root, top_k=100_000) is None
    assert "which refused the question: top_k is 100000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [{"model": "another/model"}, {"dtype": "float32"}, {"where": ["year=2024"]}, {"lora": "x"}],
)
def test_options_that_need_another_engine_do_not_reach_the_server(
    served: Live, demo_engine: BlendEngine, capsys: Any, given: dict[str, Any]
) -> None:
    with announced(served, demo_engine.root, port=1):
        assert asked(demo_engine.root, **given) is None
    assert capsys.readouterr().err == ""


def test_variables_of_the_command_are_sent_or_need_its_own_engine(
    served: Live, demo_engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with announced(served, demo_engine.root) as record:
        monkeypatch.setenv("BLENDRAG_RATIO", "0.25")
        settings.cache_clear()
        body = serving.body_for({"temperature": 0.5}, QUESTION, record)
        assert body is not None
        assert (body["blendrag"], body["temperature"]) == ({"ratio": 0.25}, 0.5)
        monkeypatch.setenv("BLENDRAG_DTYPE", "float32")
        settings.cache_clear()
        assert serving.body_for({}, QUESTION, record) is None
    settings.cache_clear()


def test_ctrl_c_within_an_answer_closes_the_connection(
    served: Live, demo_engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(piece: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blendrag.cli.ask.write_piece", interrupt)
    with announced(served, demo_engine.root):
        pieces = asked(demo_engine.root)
        assert pieces is not None
        assert pieces.connection.sock is not None
        with pytest.raises(KeyboardInterrupt):
            print_answer(pieces)
    assert pieces.connection.sock is None


@pytest.mark.parametrize("end", [b"", b'data: {"choi'])
def test_an_answer_that_breaks_off_is_an_error(end: bytes) -> None:
    lines = iter([b": ping\n", b'data: {"choices": []}\n', end])
    events = serving.events_of(SimpleNamespace(readline=lambda limit: next(lines)))  # type: ignore[arg-type]
    assert next(events) == {"choices": []}
    with pytest.raises(BlendragError, match="stopped before the answer was complete"):
        next(events)


def test_only_a_private_record_of_a_loopback_address_is_read(tmp_path: Path) -> None:
    record = ServerRecord("127.0.0.1", 80, "demo", False)
    with written(tmp_path, record):
        assert read(tmp_path) == record
        (tmp_path / server_record.FILE_NAME).chmod(0o644)
        assert read(tmp_path) is None
    (tmp_path / server_record.FILE_NAME).unlink()
    with written(tmp_path, ServerRecord("192.0.2.1", 80, "demo", False)):
        assert read(tmp_path) is None
    (tmp_path / server_record.FILE_NAME).write_text("{")
    assert read(tmp_path) is None
    assert [loopback(each) for each in ("0.0.0.0", "::", "127.0.0.2", "192.0.2.1", "box")] == [
        "127.0.0.1", "::1", "127.0.0.2", "", "",
    ]  # fmt: skip


def test_a_server_leaves_the_record_of_a_later_one(tmp_path: Path) -> None:
    later = ServerRecord("127.0.0.1", 81, "demo", False)
    with written(tmp_path, ServerRecord("127.0.0.1", 80, "demo", False)):
        with written(tmp_path, later):
            pass
        assert read(tmp_path) is None
        first_again = ServerRecord("127.0.0.1", 82, "demo", False)
        server_record.regular_files.replace(
            tmp_path / server_record.FILE_NAME,
            f'{{"host": "127.0.0.1", "port": 82, "model": "demo", "needs_key": false, '
            f'"secret": "{first_again.secret}"}}'.encode(),
        )
    assert read(tmp_path) == first_again


def test_the_command_writes_its_record_while_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, found = tmp_path / "store", list[ServerRecord | None]()
    monkeypatch.setattr("blendrag.server.running.serve", lambda *_: found.append(read(store)))
    where = ("--model", save_model(tmp_path / "model"), "--store", store, "--mode", "full")
    assert invoke("serve", *where, "--port", "0").exit_code == 0
    (record,) = found
    assert record is not None
    assert (record.host, record.model) == ("127.0.0.1", str(tmp_path / "model"))
    assert not (store / server_record.FILE_NAME).exists()
