"""What documents, names of files, models and answers hold is shown on a terminal, never obeyed by it."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import typer

import scripted
from blendrag.cli import ask as asking
from blendrag.cli import interrupt
from blendrag.cli.app import app
from blendrag.cli.output import Guarded, console, echo, print_json, say
from blendrag.cli.progress import IngestProgress, StatusLine
from blendrag.config import settings
from blendrag.engine import Document, IngestReport
from blendrag.errors import InvalidInputError
from blendrag_lab.tables import ResultTable
from cli.commands import ingest_args, invoke, save_model

#: Title of the window, clear screen, bell, backspace, a C1 introducer, reversed text, invisible text.
ATTACK = "\x1b]0;owned\x07\x1b[2J\x08\x9b31m\u202etxt\u2066\u200b\x7f[bold]b[/bold][link=x]y[/link]"
#: None of it is sent. rich itself sends other sequences.
OBEYED = ("\x1b]", "\x1b[2J", "\x07", "\x08", "\x9b", "\u202e", "\u2066", "\u200b", "\x7f")
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x08\x9b31m\u202etxt\u2066\u200b\x7f[bold]b[/bold][link=x]y[/link]"
NAME = ATTACK.replace("/", "|")
QUESTION = "Where is the windmill?"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Both streams, as ``main`` makes them."""
    made = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "500")
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stdout", made)
        patch.setattr(sys, "stderr", Guarded(made))
        yield made


def run(*args: str | Path) -> str:
    """What a command prints on a terminal."""
    settings.cache_clear()
    try:
        with terminal() as made, pytest.raises(SystemExit):
            app([str(arg) for arg in args], prog_name="blendrag")
    finally:
        settings.cache_clear()
    return checked(made.getvalue())


def checked(text: str) -> str:
    assert not [each for each in OBEYED if each in text]
    return text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose model, documents, names of documents and texts are hostile."""
    root = tmp_path_factory.mktemp("hostile")
    model = save_model(root / f"model {NAME}")
    docs = root / "docs"
    docs.mkdir()
    (docs / f"{NAME}\nforged: 3 chunks.txt").write_text(
        f"The windmill {ATTACK} stands. " * 3, encoding="utf-8"
    )
    (docs / f"broken {NAME}.pdf").write_bytes(b"%PDF-1.4 nothing")
    result = invoke(*ingest_args(docs, model, root / "store"))
    assert result.exit_code == 1
    assert SHOWN.replace("/", "|") in checked(result.stderr)
    return root


def schema_of(root: Path) -> Path:
    file = root / f"{NAME}.xml"
    text = "".join(c for c in NAME if c not in "\x07\x08\x1b")  # not in XML
    file.write_text(
        f'<schema name="trip"><module name="plan">{text}</module></schema>', encoding="utf-8"
    )
    return file


COMMANDS: dict[str, list[str]] = {
    "list": ["list", "--store", "STORE"],
    "stats": ["store", "stats", "--store", "STORE"],
    "check": ["store", "check", "--store", "STORE"],
    "no store": ["list", "--store", f"/none/{NAME}"],
    "no model": ["verify", f"/none/{NAME}"],
    "ask": ["ask", QUESTION, "--store", "STORE", "--max-new-tokens", "2"],
    "ask of no model": ["ask", QUESTION, "--store", "STORE", "--model", f"/none/{NAME}"],
    "dry run": ["ingest", "DOCS", "--store", "STORE", "--dry-run"],
    "verify": ["verify", "MODEL"],
    "no file": ["ingest", f"/none/{NAME}", "--store", "STORE"],
    "remove": ["remove", f"/none/{NAME}", "--store", "STORE"],
    "export": ["store", "export", f"/none/{NAME}", "--store", "STORE"],
    "import": ["store", "import", f"/none/{NAME}", "--store", "STORE"],
    "unconfirmed": ["store", "clear", "--store", "STORE", "--namespace", ATTACK],
    "remote": ["store", "follow", "--store", "STORE", "--remote", f"file:///none/{NAME}"],
    "show": ["schema", "show", "SCHEMA"],
    "schema": ["schema", "check", "SCHEMA", f"<prompt schema='trip'><{ATTACK}/></prompt>"],
    "size": ["ingest", "DOCS", "--store", "STORE", "--ram-bytes", ATTACK],
    "ratio": ["ask", QUESTION, "--store", "STORE", "--ratio", ATTACK],
    "mode": ["ask", QUESTION, "--store", "STORE", "--mode", ATTACK],
    "policy": ["ask", QUESTION, "--store", "STORE", "--policy", ATTACK],
    "schedule": ["ask", QUESTION, "--store", "STORE", "--schedule", ATTACK],
    "unknown option": ["list", f"--{ATTACK}"],
    "unknown command": [ATTACK],
    "one argument too many": ["list", ATTACK],
    "keys": ["serve", "--store", "STORE", "--api-key-file", f"/none/{NAME}"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_sends_what_its_data_and_arguments_hold(hostile: Path, name: str) -> None:
    places = {"STORE": hostile / "store", "DOCS": hostile / "docs", "SCHEMA": schema_of(hostile),
              "MODEL": hostile / f"model {NAME}"}  # fmt: skip
    shown = run(*(places.get(word, word) for word in COMMANDS[name]))
    assert "Traceback" not in shown
    assert shown.count("\nforged: ") == 0


@pytest.mark.parametrize("name", ["list", "stats", "check", "show", "verify"])
def test_without_a_terminal_tables_and_sentences_are_the_same(hostile: Path, name: str) -> None:
    places = {"STORE": hostile / "store", "SCHEMA": schema_of(hostile),
              "MODEL": hostile / f"model {NAME}"}  # fmt: skip
    result = invoke(*(places.get(word, word) for word in COMMANDS[name]))
    assert result.exit_code == 0, result.stderr
    checked(result.stdout + result.stderr)


def test_json_has_escapes_and_the_same_values(hostile: Path) -> None:
    result = invoke("list", "--store", hostile / "store", "--json")
    (document,) = json.loads(checked(result.stdout))["documents"]
    assert f"{NAME}\nforged: 3 chunks.txt" in document["source"]


# -- answers --------------------------------------------------------------------------------------


@pytest.fixture
def scripted_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ask`` and ``chat`` are answered with :data:`ATTACK`, a token at a time."""
    engine = scripted.engine([], tmp_path / "store", ATTACK)
    engine.ingest([Document("a.txt", "The windmill is in the town. " * 8, "")])
    monkeypatch.setattr(asking.options, "engine_for", lambda *_, **__: nullcontext(engine))


def test_answers_are_shown_on_a_terminal_though_a_sequence_comes_in_pieces(
    scripted_answers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n"))
    for command in (["ask", QUESTION], ["chat"]):
        assert SHOWN in run(*command, "--max-new-tokens", "200")


def test_a_program_gets_the_answer_as_the_model_wrote_it(scripted_answers: None) -> None:
    result = invoke("ask", QUESTION, "--max-new-tokens", "200")
    assert result.stdout == f"{ATTACK}\n"
    checked(result.stderr)
    printed = invoke("ask", QUESTION, "--max-new-tokens", "200", "--json").stdout
    assert json.loads(checked(printed))["answer"] == ATTACK


# -- the parts ------------------------------------------------------------------------------------


def test_progress_and_its_failures_are_shown() -> None:
    with terminal() as made:
        with StatusLine(f"loading {ATTACK}") as line:
            line.show(f"checking {ATTACK}", 1, 2)
            say("note", ATTACK)
        with IngestProgress() as progress:
            progress.name_failures([f"{NAME}\nforged: good"])
    shown = checked(made.getvalue())
    assert f"loading {SHOWN}" in shown
    assert f"checking {SHOWN}" in shown
    assert "\nforged" not in shown


def test_progress_of_an_ingest_says_which_step_is_under_way_if_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = list[str]()
    monkeypatch.setattr(StatusLine, "show", lambda self, text, *of: shown.append(text))
    progress, counted = IngestProgress(), {"chunks": 2, "chunks_computed": 2, "tokens_per_s": 9.0}
    for report in (
        IngestReport(),
        IngestReport(step="reading a.md", total_bytes=2048, read_bytes=1024),
        IngestReport(step="encoding", work=4, work_done=1, **counted),
        IngestReport(work=4, work_done=1, **counted),
        IngestReport(documents=1),
        IngestReport(documents=1, step="measuring", measured=0.25),
    ):
        progress(report)
    assert shown == [
        "reading the documents",
        "reading a.md; 1.0 KiB of 2.0 KiB read",
        "encoding; 25% done, 2 chunks, 9 tokens/s",
        "25% done, 2 chunks, 9 tokens/s",
        "reading the documents",
        "measuring, which Ctrl-C puts off; 25% done",
    ]
    assert interrupt.sentence().startswith("every document is stored; decode weights are measured ")
    progress(IngestReport(documents=1, step="measuring", measured=1.0))
    assert shown[-1] == "measuring; 100% done"
    assert interrupt.sentence() == "every document is stored"


def test_tables_are_shown_and_their_cells_are_no_markup() -> None:
    with terminal() as made:
        ResultTable(["head", ATTACK], [[ATTACK, "x"]], ATTACK, [ATTACK]).print()
        console(err=True).print(ATTACK)
    assert checked(made.getvalue()).count(SHOWN) == 5


def test_a_line_of_output_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    echo("a\nb: 3 chunks\tc\u2028d")
    say("error", "a\nerror: b")
    printed = capsys.readouterr()
    assert printed.out == "a\\nb: 3 chunks\\tc\\u2028d\n"
    assert printed.err == "error: a error: b\n"


def test_letters_of_all_scripts_and_emoji_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    text = "é ñ 漢字 فارسی\u200cها नि\u200dष 👩\u200d💻 ❤\ufe0f"
    echo(text)
    print_json({"text": text})
    assert capsys.readouterr().out == f'{text}\n{{"text": "{text}"}}\n'


def test_tracebacks_and_logs_of_libraries_are_shown() -> None:
    with terminal() as made:
        sys.__excepthook__(ValueError, ValueError(ATTACK), None)
        typer.echo(ATTACK, err=True)
        sys.stderr.write("\r50%")  # a progress bar
    shown = checked(made.getvalue())
    assert shown.count(SHOWN) == 2
    assert shown.endswith("\r50%")


def test_the_console_script_guards_a_real_terminal(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom blendrag.cli import main, app\n"
        "def fail(**_): raise ValueError(sys.argv.pop())\n"
        "app.app = fail\nmain.main()"
    )
    here, there = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code, ATTACK], stderr=there, stdout=there)
    os.close(there)
    got = b""
    while True:
        try:
            piece = os.read(here, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not piece:
            break
        got += piece
    os.close(here)
    assert process.wait() == 1
    assert f"ValueError: {SHOWN}" in checked(got.decode())


def test_errors_of_the_package_are_raised_unchanged() -> None:
    """They are shown where they are printed; programs see the value."""
    assert str(InvalidInputError(ATTACK)) == ATTACK
