"""``blendrag serve`` as a command."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from blendrag.cli import serve
from cli.commands import refused


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_without_the_extra_one_sentence_names_the_remedy(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert refused("serve", "--store", tmp_path) == (
        "error: blendrag serve needs fastapi, uvicorn; pip install 'blendrag[server]'"
    )


def test_a_port_in_use_is_one_sentence(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused("serve", "--store", tmp_path, "--port", str(port))
    assert said == (
        f"error: cannot listen on 127.0.0.1 port {port} (Address already in use); "
        "choose another --port or --host"
    )


def test_a_host_that_is_not_here_is_one_sentence(tmp_path) -> None:
    said = refused("serve", "--store", tmp_path, "--host", "192.0.2.1", "--port", "0")
    assert "cannot listen on 192.0.2.1 port 0" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty; expected one key a line"),
        ("# none\n", "holds no key; write one a line"),
        ("good\nbad key of four\n", "line 2 of --api-key-file"),
    ],
)
def test_a_wrong_key_file_is_one_sentence(key_file, text, expected) -> None:
    key_file.write_text(text)
    said = refused("serve", "--api-key-file", key_file)
    assert expected in said
    assert "bad" not in said


def test_a_missing_key_file_is_one_sentence(key_file) -> None:
    assert "cannot be read (No such file" in refused("serve", "--api-key-file", key_file)
