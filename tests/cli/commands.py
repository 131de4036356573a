"""Tiny models on disk, documents to ingest, and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import transformers
import typer
import typer.testing
from typer.testing import CliRunner, Result

import tiny
from blendrag.cli.app import app
from blendrag.config import settings

QUESTION = "What is the topic of document 2?"
transformers.utils.logging.disable_progress_bar()
# CliRunner would build all commands again for each call.
typer.testing._get_command = cache(typer.main.get_command)  # type: ignore[attr-defined]


def save_model(folder: Path, model: Any = None, *more_tokens: str) -> Path:
    """Save a tiny model, by default one that never stops by itself, and a tokenizer."""
    model = model or tiny.llama(num_hidden_layers=3, max_position_embeddings=1024, eos_token_id=639)
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(list(more_tokens))
    tokenizer.save_pretrained(folder)
    return folder


def write_documents(folder: Path, documents: int = 3, paragraphs: int = 3) -> Path:
    """Each paragraph is a chunk of at most 64 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        texts = [
            f"Paragraph {j} of document {i} is about topic number {i * 7 + j} in the town of "
            f"Place{i}x{j}, which is quite quiet and has a windmill."
            for j in range(paragraphs)
        ]
        (folder / f"d{i}.txt").write_text("\n\n".join(texts), encoding="utf-8")
    return folder


def ingest_args(path: Path, model: Path | str, store: Path, *more: str) -> list[str]:
    return [
        "ingest", str(path), "--model", str(model), "--store", str(store),
        "--chunk-tokens", "64", "--embedder", "minilm-offline", "--ram-bytes", "64MiB", *more,
    ]  # fmt: skip


def invoke_program(main: Callable[..., object], *args: str | Path) -> Result:
    """``main`` of a module that is run with ``python -m``."""
    program = typer.Typer()
    program.command()(main)
    return CliRunner().invoke(program, [str(arg) for arg in args])


def invoke(*args: str | Path, stdin: str = "") -> Result:
    """Run the command in this process; a traceback fails the test."""
    settings.cache_clear()
    try:
        result = CliRunner().invoke(app, list(map(str, args)), stdin, prog_name="blendrag")
    finally:
        settings.cache_clear()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def said(result: Result) -> str:
    """The one line on stderr, without progress, which a slow machine prints, and what a cut answer says."""
    other = "progress: ", "note: the answer was cut at --max-new-tokens "
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith(other)]
    assert len(lines) == 1, result.stderr
    return lines[0]


def refused(*args: str | Path, status: int = 2) -> str:
    """The one sentence of a command that is refused; it prints nothing on stdout."""
    result = invoke(*args)
    assert result.exit_code == status, (result.stdout, result.stderr)
    assert result.stdout == ""
    return said(result)


def printed(*args: str | Path, status: int = 0) -> dict[str, Any]:
    """The one JSON object that a command prints."""
    result = invoke(*args, "--json")
    assert result.exit_code == status, result.stderr
    assert len(result.stdout.splitlines()) == 1
    fields: dict[str, Any] = json.loads(result.stdout)
    return fields


def ask(store: Path, *more: str) -> dict[str, Any]:
    """The JSON of a short answer."""
    return printed("ask", QUESTION, "--store", store, "--max-new-tokens", "2", *more)


def reused_tokens(store: Path) -> int:
    return int(ask(store)["metrics"]["reused_tokens"])


def interrupted_sentence(stderr: str) -> str:
    """The one line that an interrupted command prints."""
    (line,) = stderr.strip().splitlines()
    assert line.startswith("interrupted: ")
    return line
