"""One file is one document, however its path is spelled; what is gone can be seen and removed."""

from __future__ import annotations

from pathlib import Path

from blendrag.corpus.corpus import Corpus
from blendrag.engine import BlendEngine, Document
from cli.commands import ingest_args, invoke, printed, refused


def listed(store: Path) -> dict[str, bool]:
    """Names of the documents, and whether their files are gone."""
    rows = printed("list", "--store", store)["documents"]
    return {Path(row["source"]).name: row["gone"] for row in rows}


def test_a_file_under_many_spellings_is_one_document_with_its_newest_text(
    model_dir, docs, tmp_path, monkeypatch
):
    store = tmp_path / "store"
    (tmp_path / "link").symlink_to(docs)
    (docs / "records.jsonl").write_text('{"id": "a//b", "text": "One."}\n{"text": "Two."}\n')
    assert invoke(*ingest_args(docs, model_dir, store)).exit_code == 0
    monkeypatch.chdir(docs)
    (docs / "d1.txt").write_text("The mill of the new text is called Quentin.")
    for spelling in ("d1.txt", "../docs/d1.txt", "./d0.txt", tmp_path / "link", "."):
        assert invoke(*ingest_args(Path(spelling), model_dir, store)).exit_code == 0
    assert printed("list", "--store", store)["documents"] == [
        {"source": f"{docs}/{name}", "title": title, "chunks": chunks, "gone": False} | row
        for name, title, chunks, row in (
            ("d0.txt", "d0", 3, {}), ("d1.txt", "d1", 1, {}), ("d2.txt", "d2", 3, {}),
            ("records.jsonl#2", "records", 1, {}), ("records.jsonl#a//b", "records", 1, {}),
        )
        for row in [{"tokens": tokens_of(store, f"{docs}/{name}")}]
    ]  # fmt: skip
    shown = invoke("list", "--store", store).stdout
    assert shown.startswith("d0.txt: 3 chunks, ")
    assert shown.endswith(f"5 documents; model {model_dir}\n")
    assert invoke("remove", "../link/d0.txt", "--store", store).exit_code == 0
    assert "expected a path that blendrag list shows" in refused(
        "remove", "../link/d0.txt", "--store", store
    )
    assert invoke("remove", tmp_path / "link", "--store", store).exit_code == 0
    assert listed(store) == {}


def tokens_of(store: Path, source: str) -> int:
    with Corpus.open(store, read_only=True) as corpus:
        return sum(chunk.tokens for chunk in corpus.chunks_of(source))


def test_prune_removes_what_is_gone_from_the_given_paths_only(model_dir, docs, tmp_path):
    store, other, records = tmp_path / "store", tmp_path / "other.txt", docs / "r.jsonl"
    other.write_text("Another folder's file.")
    records.write_text('{"id": "a", "text": "One."}\n{"id": "b", "text": "Two."}\n')
    for path in (docs, other):
        assert invoke(*ingest_args(path, model_dir, store)).exit_code == 0
    for path in (other, docs / "d0.txt"):
        path.unlink()
    records.write_text('{"id": "b", "text": "Two."}\n')
    (docs / "d1.txt").write_bytes(b"\0")  # no text any more, but it is there
    args = ingest_args(docs, model_dir, store)
    kept = invoke(*args)
    assert "note: not found any more: 2 documents, such as " in kept.stderr
    assert "add --prune" in kept.stderr
    present = {"d1.txt": False, "d2.txt": False, "r.jsonl#b": False, "other.txt": True}
    assert listed(store) == present | {"d0.txt": True, "r.jsonl#a": False}
    pruned = printed(*args, "--prune")
    assert pruned["pruned"] == 2
    assert {Path(source).name for source in pruned["gone"]} == {"d0.txt", "r.jsonl#a"}
    assert listed(store) == present


def test_prune_keeps_texts_whose_name_only_looks_like_a_path_of_the_folder(
    model_dir, docs, tmp_path, monkeypatch
):
    store = tmp_path / "store"
    monkeypatch.chdir(docs)
    with BlendEngine(model_dir, store, chunk_tokens=64, embedder="minilm-offline") as engine:
        engine.ingest([Document("notes/1", "The mill was built in 1874.", "Note")]).whole()
        report = engine.ingest(["."], prune=True).whole()
    assert (report.pruned, report.gone) == (0, [])
    assert listed(store)["1"] is False
