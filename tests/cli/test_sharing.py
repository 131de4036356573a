"""``blendrag store publish``, ``follow`` and ``gc --remote``, and ``serve``, which follows."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from blendrag.corpus.corpus import Corpus
from cli.commands import ask, invoke, printed, refused

pytest.importorskip("obstore")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "bucket").mkdir()
    monkeypatch.setenv("BLENDRAG_REMOTE_KEY", "a secret of all machines")
    monkeypatch.setattr(  # the machine may be busy
        "blendrag.engine.planner.prefill_token_s", lambda adapter: 1.0
    )
    return f"file://{tmp_path}/bucket"


def test_a_corpus_is_published_followed_and_collected(
    store: Path, url: str, tmp_path: Path
) -> None:
    done = invoke("store", "publish", "--store", store, "--remote", url)
    assert done.exit_code == 0, done.stderr
    assert "snapshot 1 published: 3 documents, 9 chunks; " in done.stdout
    two = tmp_path / "two"
    followed = printed("store", "follow", "--store", two, "--remote", url)
    assert (followed["serial"], followed["added"]) == (1, 3)
    metrics = ask(two, "--remote", url)["metrics"]
    assert metrics["reused_tokens"] > 0
    gone = next(Path(source) for source in Corpus.open(store).sources())
    assert invoke("remove", gone, "--store", store).exit_code == 0
    assert printed("store", "publish", "--store", store, "--remote", url)["documents"] == 2
    kept = printed("store", "gc", "--remote", url)
    assert (kept["removed"], kept["young"]) == (0, 3)
    assert printed("store", "gc", "--remote", url, "--grace-hours", "0")["removed"] == 3
    shown = invoke("store", "follow", "--store", two, "--remote", url).stdout
    assert shown.startswith("snapshot 2: 2 documents, 6 chunks; 0 added or changed, 1 removed")


def test_what_cannot_be_shared_is_said_in_one_sentence(
    store: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = ("store", "follow", "--store", tmp_path / "two", "--remote")
    assert "no remote was named" in refused("store", "publish", "--store", store)
    assert "has no published corpus" in refused(*follow, url)
    assert "has no published corpus" in refused("store", "gc", "--remote", url)
    assert "there is no directory" in refused(*follow, f"{url}/elsewhere")
    assert "add --remote" in refused("store", "gc", "--grace-hours", "1")
    assert "leave it or --remote out" in refused(
        "store", "gc", "--remote", url, "--max-bytes", "1GB"
    )
    assert invoke("store", "publish", "--store", store, "--remote", url).exit_code == 0
    clear = ("store", "clear", "--remote", url)
    assert "expected the namespace to remove" in refused(*clear)
    assert "expected the namespace to remove" in refused(*clear, "--namespace", "")
    assert "0 namespaces in remote" in refused(*clear, "--namespace", "x", "--yes")
    monkeypatch.setenv("BLENDRAG_REMOTE_KEY", "another secret of all machines")
    assert "BLENDRAG_REMOTE_KEY gives another key" in refused(*follow, url)
    (tmp_path / "bucket" / "format").write_text("blendrag-remote 2 unsealed\n")
    assert "has layout version 2, expected 1" in refused(*follow, url)
    assert not (tmp_path / "two").exists()


def test_serve_follows_what_its_remote_publishes(
    store: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    from blendrag.engine import publishing

    invoke("store", "publish", "--store", store, "--remote", url)
    root, found = tmp_path / "two", []

    def serve(app: object, at: socket.socket, verbose: bool) -> None:
        with Corpus.open(store) as corpus:
            corpus.remove_source(corpus.sources()[0])
        assert invoke("store", "publish", "--store", store, "--remote", url).exit_code == 0
        with Corpus.open(root) as followed:
            for _ in range(6000):
                if len(followed.sources()) == 2:
                    break
                threading.Event().wait(0.02)
            found.extend(followed.sources())

    monkeypatch.setattr("blendrag.server.running.serve", serve)
    monkeypatch.setattr(publishing, "FOLLOW_EVERY_S", 0.05)
    started = invoke("serve", "--store", root, "--remote", url, "--port", "0")
    assert started.exit_code == 0, started.stderr
    assert len(found) == 2


def test_serve_goes_on_with_changes_that_were_not_published(
    store: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.setattr("blendrag.server.running.serve", lambda *given: None)
    two = tmp_path / "two"
    assert invoke("store", "publish", "--store", store, "--remote", url).exit_code == 0
    assert invoke("store", "follow", "--store", two, "--remote", url).exit_code == 0
    for root, number in ((store, 0), (two, 1)):
        with Corpus.open(root) as corpus:
            corpus.remove_source(corpus.sources()[number])
    assert invoke("store", "publish", "--store", store, "--remote", url).exit_code == 0
    started = invoke("serve", "--store", two, "--remote", url, "--port", "0")
    assert started.exit_code == 0, started.stderr
    assert "served as it is: store" in started.stderr
