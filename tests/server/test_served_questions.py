"""``blendrag ask`` and ``chat`` over a store with a running server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import Result

from blendrag import __version__
from blendrag.cli import served as serving
from blendrag.cli.ask import print_answer
from blendrag.config import settings
from blendrag.engine import BlendEngine
from blendrag.engine.lazy_model import LazyModel
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.server.bodies import ChatBody
from blendrag.server.refusals import Refusal
from blendrag.store import server_record
from blendrag.store.server_record import ServerRecord, loopback, read, written
from cli.commands import invoke, save_model
from server.conftest import ANSWER, QUESTION
from server.live import Live


def record_of(**changes: Any) -> ServerRecord:
    about = {"host": "127.0.0.1", "port": 80, "model": "demo", "version": __version__}
    return ServerRecord(**{**about, "needs_key": False, **changes})


@contextmanager
def announced(server: Live, root: Path, **changes: Any) -> Iterator[ServerRecord]:
    """The store at ``root`` names ``server``."""
    record = record_of(**{"port": server.port, **changes})
    server.service.record = record
    try:
        with written(root, record):
            yield record
    finally:
        server.service.record = None


def asked(root: Path, **given: Any) -> serving.ServedPieces | None:
    context: Any = SimpleNamespace(params={"store": root, "question": QUESTION, **given})
    return serving.pieces(context, QUESTION)


@pytest.fixture
def opens_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine_for(*_: Any) -> None:
        raise AssertionError("the command opened a model")

    monkeypatch.setattr("blendrag.cli.options.engine_for", engine_for)


def test_a_question_is_answered_by_the_stores_server_and_imports_no_torch(
    served: Live, demo_engine: BlendEngine
) -> None:
    code = (
        "import sys\nfrom blendrag.cli.main import main\n"
        "try: main()\nexcept SystemExit as done: assert not done.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'sentence_transformers'} & set(sys.modules)\n"
        "print('heavy:', heavy)"
    )
    args = ["ask", QUESTION, "--store", str(demo_engine.root), "--ratio", "0.2"]
    with announced(served, demo_engine.root) as record:
        done = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert ANSWER in done.stdout
    assert done.stdout.endswith("heavy: set()\n")
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
        ({"version": "0.0.9"}, f"runs blendrag 0.0.9, not {__version__}"),
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
            served.service.record = record_of(port=served.port)
        assert asked(demo_engine.root) is None
    said = f"note: answered without the server of this store at {record.url}, which {why}\n"
    assert capsys.readouterr().err == said


def test_no_server_is_advised_where_one_runs_and_the_options_need_an_engine(
    served: Live, demo_engine: BlendEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendrag.cli.ask.LONG_IMPORT_S", 0.0)
    args = ["ask", QUESTION, "--store", demo_engine.root, "--max-new-tokens", "2"]
    args += ["--search", "lexical", "--explain", tmp_path / "a.html"]
    advice = "with blendrag serve running"
    assert advice in invoke(*args).stderr
    with announced(served, demo_engine.root):
        told = invoke(*args).stderr
    assert "importing torch" in told
    assert advice not in told


def test_a_question_over_a_limit_of_the_server_is_answered_without_it(
    served: Live, demo_engine: BlendEngine, capsys: Any
) -> None:
    with announced(served, demo_engine.root):
        assert asked(demo_engine.root, top_k=100_000) is None
    assert "which refused the question: blendrag.top_k is 100000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--policy", "nonsense"], "--policy 'nonsense' is not one of "),
        (["--stop", ""], "--stop holds an empty text"),
        (["--chat-template-kwargs", "messages=1"], "--chat-template-kwargs has 'messages'"),
        (["--where", "yaer"], "--where 'yaer' "),
        (
            ["--generate-kwargs", "repetition_penalty=200"],
            "--generate-kwargs repetition_penalty 200 must be a number above 0, at most 100",
        ),
    ],
)
@pytest.mark.parametrize("command", ["ask", "chat"])
def test_a_wrong_option_is_refused_once_by_its_name_on_the_command_line(
    served: Live,
    demo_engine: BlendEngine,
    opens_no_model: None,
    command: str,
    given: list[str],
    why: str,
) -> None:
    args = [*[QUESTION] * (command == "ask"), "--store", demo_engine.root, *given]
    with announced(served, demo_engine.root):
        told = invoke(command, *args, stdin=QUESTION).stderr.splitlines()
    assert [line.startswith(f"error: {why}") for line in told] == [*[False] * (len(told) - 1), True]
    assert not any("refused the question" in line for line in told)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"where": ["extensoin=.txt"]},
            "^filter names the field 'extensoin', which no document has; did you mean extension",
        ),
        ({"only": ["nothing/"]}, "leaves no passage"),
    ],
)
def test_a_filter_that_the_server_refuses_opens_no_model(
    served: Live, demo_engine: BlendEngine, given: dict[str, Any], why: str
) -> None:
    with announced(served, demo_engine.root), pytest.raises(InvalidInputError, match=why):
        asked(demo_engine.root, **given)


def test_a_wrong_variable_that_the_server_refuses_is_named(
    served: Live, demo_engine: BlendEngine, opens_no_model: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLENDRAG_POLICY", "nonsense")
    settings.cache_clear()
    with announced(served, demo_engine.root):
        told = invoke("ask", QUESTION, "--store", demo_engine.root)
    settings.cache_clear()
    assert told.stderr.startswith("error: BLENDRAG_POLICY 'nonsense'")


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_a_store_without_documents_is_refused_once(
    served: Live,
    opens_no_model: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    empty = "the corpus at kv/corpus holds no chunks; ingest first"

    def nothing_to_find(*_: Any, **__: Any) -> None:
        raise InvalidInputError(empty)

    monkeypatch.setattr(served.service.engine, "retrieve", nothing_to_find)
    with announced(served, tmp_path):
        told = invoke(
            command, *[QUESTION] * (command == "ask"), "--store", tmp_path, stdin=QUESTION
        )
    assert told.stderr.splitlines()[command == "chat" :] == [f"error: {empty}"]


@pytest.mark.parametrize(
    "given",
    [{"model": "another/model"}, {"dtype": "float32"}, {"lora": "x"}],
)
def test_options_that_need_another_engine_do_not_reach_the_server(
    served: Live, demo_engine: BlendEngine, capsys: Any, given: dict[str, Any]
) -> None:
    with announced(served, demo_engine.root, port=1):
        assert asked(demo_engine.root, **given) is None
    assert capsys.readouterr().err == ""


def test_filters_of_the_command_are_sent(served: Live, demo_engine: BlendEngine) -> None:
    given = {"only": ["anna-*"], "where": ["extension=.txt"]}
    with announced(served, demo_engine.root):
        found = asked(demo_engine.root, **given)
        assert found is not None
        assert [*found]
    assert {each.file_name for each in found.answer.sources} == {"anna-bell.txt"}


def test_variables_of_the_command_are_sent_or_need_its_own_engine(
    served: Live, demo_engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with announced(served, demo_engine.root) as record:
        monkeypatch.setenv("BLENDRAG_RATIO", "0.25")
        settings.cache_clear()
        body = serving.body_for({"temperature": 0.5}, record)
        assert body is not None
        assert (body["blendrag"], body["temperature"]) == ({"ratio": 0.25}, 0.5)
        monkeypatch.setenv("BLENDRAG_DTYPE", "float32")
        settings.cache_clear()
        assert serving.body_for({}, record) is None
    settings.cache_clear()


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (
            {"temperature": 0.5, "top_p": 0.9, "seed": 3},
            {"temperature": 0.5, "top_p": 0.9, "seed": 3},
        ),
        ({"presence_penalty": 1.0, "frequency_penalty": 0.0},) * 2,
        ({"generate_kwargs": [{"repetition_penalty": 1.1}]}, {"repetition_penalty": 1.1}),
        (
            {"temperature": 1.0, "generate_kwargs": [{"top_k": 40}, {"min_p": 0.1}], "top_k": 3},
            {"temperature": 1.0, "top_k": 40, "min_p": 0.1},
        ),
        ({"top_p": 0.9}, None),
        ({"generate_kwargs": [{"top_k": 40}]}, None),
        ({"generate_kwargs": [{"num_beams": 2}]}, None),
    ],
)
def test_sampling_options_reach_the_server_if_it_takes_them_as_the_engine_does(
    given: dict[str, Any], sent: dict[str, Any] | None
) -> None:
    body = serving.body_for(given, record_of())
    if sent is None:
        assert body is None
        return
    assert body is not None
    request = ChatBody.model_validate({**body, "messages": []})
    assert {name: getattr(request, name) for name in sent} == sent
    assert (request.blendrag.top_k if request.blendrag else None) == given.get("top_k")


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


def test_a_stuck_server_is_named_with_its_own_words(
    served: Live, demo_engine: BlendEngine, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(queues: object) -> None:
        raise Refusal(503, "nothing has moved for 130 s")

    monkeypatch.setattr(served.service, "check_moving", stuck)
    with announced(served, demo_engine.root):
        assert asked(demo_engine.root) is None
    assert "which does not work: nothing has moved for 130 s\n" in capsys.readouterr().err


def test_a_silent_server_is_waited_for_while_it_holds_the_connection(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, other = socket.socketpair()
    with server, serving._PatientSocket(fileno=other.detach()) as client:

        def pause(*_: Any) -> tuple[list[Any], ...]:
            server.sendall(b"at last\n")  # after the pause
            server.close()
            return [], [], []

        monkeypatch.setattr("blendrag.cli.served.select.select", pause)
        with client.makefile("rb") as read:
            assert read.readlines() == [b"at last\n"]
    said = capsys.readouterr().err
    assert said.startswith("note: the server has sent nothing for 60 s, but holds the connection")
    assert said.count("note: ") == 1


# -- conversations --------------------------------------------------------------------------------

TURNS = f"{QUESTION}\nWho is Hans Ellis?\n"


def chat(root: Path, stdin: str, *more: str) -> Result:
    return invoke(
        "chat", "--store", root, "--max-new-tokens", "12", "--no-sources", *more, stdin=stdin
    )


def test_a_conversation_is_answered_by_the_stores_server(
    served: Live, demo_engine: BlendEngine, opens_no_model: None
) -> None:
    first = demo_engine.ask(QUESTION)
    second = demo_engine.ask("Who is Hans Ellis?", history=[(QUESTION, first.text)])
    with announced(served, demo_engine.root) as record:
        result = chat(demo_engine.root, TURNS)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == f"{first.text}\n{second.text}\n"
        begun, *_ = result.stderr.splitlines()
        assert begun.startswith(f"note: answered by the server of this store at {record.url}; ")
        (json_line,) = chat(demo_engine.root, QUESTION, "--json").stdout.splitlines()
    assert json.loads(json_line)["answer"] == first.text


def test_a_wrong_filter_ends_a_conversation_at_its_beginning(
    served: Live, demo_engine: BlendEngine, opens_no_model: None
) -> None:
    with announced(served, demo_engine.root):
        assert chat(demo_engine.root, QUESTION, "--only", "anna-*").exit_code == 0
        wrong = chat(demo_engine.root, TURNS, "--where", "yaer=2024")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "names the field 'yaer'" in wrong.stderr


def test_a_conversation_goes_on_without_its_server(
    served: Live, demo_engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that is opened for it knows what was said."""
    turns = list[tuple[str, list[tuple[str, str]]]]()
    answered = demo_engine.ask_stream

    def note(question: str, *given: Any, history: list[tuple[str, str]], **more: Any) -> Any:
        turns.append((question, [*history]))
        return answered(question, *given, history=history, **more)

    with announced(served, demo_engine.root), monkeypatch.context() as patch:
        patch.setattr("blendrag.cli.options.engine_for", lambda *_: nullcontext(demo_engine))
        patch.setattr(demo_engine, "ask_stream", note)
        lines = iter([QUESTION, "Who is Hans Ellis?"])

        def read_question() -> str | None:
            question = next(lines, None)
            if question != QUESTION:
                served.service.record = None  # another process has its port
            return question

        patch.setattr("blendrag.cli.ask.read_question", read_question)
        result = chat(demo_engine.root, "")
    assert result.exit_code == 0, result.stderr
    assert "which is gone: something else listens there" in result.stderr
    ((question, history),) = turns
    assert question == "Who is Hans Ellis?"
    assert history == [(QUESTION, result.stdout.splitlines()[0].strip())]


def test_a_question_that_is_too_long_stays_with_the_server(
    served: Live, demo_engine: BlendEngine, opens_no_model: None
) -> None:
    with announced(served, demo_engine.root):
        result = chat(demo_engine.root, f"{'word ' * 3000}\n{QUESTION}\n")
    assert "error: this model's context is " in result.stderr
    assert ANSWER in result.stdout


def test_a_server_leaves_the_oldest_turns_of_a_full_context_out(
    served: Live, demo_engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the engine leaves out."""
    monkeypatch.setattr(LazyModel, "context_tokens", 700)
    history = [(f"Number {n}? {'word ' * 30}", f"It is {n}.") for n in range(12)]
    own = demo_engine.ask_stream(QUESTION, history=history, trim_history=True)
    answer = "".join(own)
    assert 0 < own.left_out < 12
    with announced(served, demo_engine.root) as record:
        body = serving.body_for({"max_new_tokens": 12}, record)
        assert body is not None
        pieces = serving.StoreServer(record, body).ask(QUESTION, history)
        assert "".join(pieces) == answer
    assert pieces.left_out == own.left_out


def test_only_a_private_record_of_a_loopback_address_is_read(tmp_path: Path) -> None:
    record = record_of()
    with written(tmp_path, record):
        assert read(tmp_path) == record
        (tmp_path / server_record.FILE_NAME).chmod(0o644)
        assert read(tmp_path) is None
    (tmp_path / server_record.FILE_NAME).unlink()
    with written(tmp_path, record_of(host="192.0.2.1")):
        assert read(tmp_path) is None
    (tmp_path / server_record.FILE_NAME).write_text("{")
    assert read(tmp_path) is None
    assert [loopback(each) for each in ("0.0.0.0", "::", "127.0.0.2", "192.0.2.1", "box")] == [
        "127.0.0.1", "::1", "127.0.0.2", "", "",
    ]  # fmt: skip


def test_a_server_leaves_the_record_of_a_later_one(tmp_path: Path) -> None:
    later = record_of(port=81)
    with written(tmp_path, record_of()):
        with written(tmp_path, later):
            pass
        assert read(tmp_path) is None
        first_again = record_of(port=82)
        server_record.regular_files.replace(
            tmp_path / server_record.FILE_NAME,
            f'{{"host": "127.0.0.1", "port": 82, "model": "demo", "needs_key": false, '
            f'"version": "{__version__}", '
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
    assert record.version == __version__
    assert (record.host, record.model) == ("127.0.0.1", str(tmp_path / "model"))
    assert not (store / server_record.FILE_NAME).exists()
