"""``blendrag adapt``: what it writes and prints, how it goes on, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import tiny
from blendrag.cli.progress import StatusLine
from blendrag_lab.distillation.writer import public_name
from cli.commands import ingest_args, invoke, printed, refused, save_model, write_documents

FEW = ("--steps", "2", "--batch", "1", "--rank", "2", "--top-k", "3", "--chunk-tokens", "64")


@pytest.fixture(scope="module")
def many_docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("many"), documents=7, paragraphs=2)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that asks no question that could be used."""
    return save_model(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def written(
    plain_model: Path, many_docs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    """A writer of documents, in a directory with a plot, and what the command printed."""
    out = tmp_path_factory.mktemp("written") / "writer"
    given = ("--model", plain_model, "--documents", many_docs, "--out", out)
    return out, invoke("adapt", *given, *FEW, "--plot", out.parent / "run.png")


def test_writer_of_documents_is_saved_with_its_report(written: tuple[Path, Result]) -> None:
    out, result = written
    assert result.exit_code == 0, result.stderr
    assert "note: training takes about " in result.stderr
    assert "with the writer" in result.stdout
    assert f"--writer {out}" in result.stdout
    assert "DOCUMENTS --model MODEL --writer" in (out / "README.md").read_text()
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] == 2
    assert report["material"]["groups"] == 5  # the others are held out
    assert (out / "adapter_model.safetensors").exists()
    assert (out.parent / "run.png").read_bytes().startswith(b"\x89PNG")


def test_writer_of_a_store_learns_from_its_chunks(plain_model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    documents = write_documents(tmp_path / "docs")
    assert invoke(*ingest_args(documents, plain_model, store)).exit_code == 0
    questions = tmp_path / "asked.txt"
    questions.write_text("What is the topic of document 1?\nWhere is the windmill of Place2x1?\n")
    words = refused("adapt", "--store", store, "--out", tmp_path / "w", *FEW[:6])
    assert "too small to train a writer on: 3 groups" in words
    words = refused("adapt", "--store", store, "--chunk-tokens", "77", "--out", tmp_path / "w")
    assert "not 77; leave --chunk-tokens out" in words
    records = tmp_path / "records.jsonl"
    texts = [f"The harbour of town {n} was built in {1800 + n} by the company." for n in range(12)]
    lines = [
        {"question": f"When was harbour {n} built?", "ctxs": texts[2 * n : 2 * n + 2]}
        for n in range(6)
    ]
    records.write_text("\n".join(map(json.dumps, lines)))
    given = ("--questions", questions, "--questions", records)
    report = printed("adapt", "--store", store, *given, "--out", tmp_path / "w", *FEW[:6])
    assert report["material"]["groups"] == 7  # of three documents and six records, two are held out
    assert (report["steps"], report["encode_after"]) == (2, 0)


def test_writer_of_a_store_is_trained_on_chunks_encoded_as_the_store_encodes_them(
    plain_model: Path, tmp_path: Path
) -> None:
    store, out = tmp_path / "store", tmp_path / "w"
    documents = write_documents(tmp_path / "docs", documents=7)
    made = invoke(*ingest_args(documents, plain_model, store), "--encode-after", "1")
    assert made.exit_code == 0, made.stderr
    result = invoke("adapt", "--store", store, "--out", out, *FEW[:6])
    assert result.exit_code == 0, result.stderr
    assert f"--writer {out} --encode-after 1" in result.stdout
    assert json.loads((out / "report.json").read_text())["encode_after"] == 1
    assert "--writer DIRECTORY --encode-after 1" in (out / "README.md").read_text()
    alone = printed(
        "adapt", "--store", store, "--encode-after", "0", "--out", tmp_path / "alone", *FEW[:6]
    )
    assert alone["encode_after"] == 0


def test_interrupted_training_goes_on(
    plain_model: Path, many_docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StatusLine.show

    def impatient(self: StatusLine, text: str, *more: Any) -> None:
        if text.startswith("step 1 of 2"):
            raise KeyboardInterrupt
        real(self, text, *more)

    out = tmp_path / "writer"
    command = ("adapt", "--model", plain_model, "--documents", many_docs, "--out", out, *FEW)
    with monkeypatch.context() as patch:
        patch.setattr(StatusLine, "show", impatient)
        result = invoke(*command)
    assert result.exit_code == 130
    assert f"1 step kept in {out}; repeat the command" in result.stderr.splitlines()[-1]
    again = invoke(*command)
    assert again.exit_code == 0, again.stderr
    assert "note: going on after step 1 of 2" in again.stderr
    assert not list(out.glob("checkpoint*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--store", "kv", "--documents", "docs"), "--store kv with --documents"),
        (("--questions", "nowhere.txt", "--model", "MODEL"), "cannot be read"),
        (("--documents", "nowhere", "--model", "MODEL"), "nowhere does not exist"),
        (("--documents", "docs"), "no model is named"),
        (("--out", "file.txt"), "--out file.txt cannot be written"),
        (("--plot", "run.pdf"), "ends in .png"),
        (
            ("--questions", "alone.txt", "--model", "MODEL"),
            "no passages are given for 'Where is it?'",
        ),
        (("--questions", "broken.jsonl", "--model", "MODEL"), "is not JSON"),
        (
            ("--questions", "empty.jsonl", "--model", "MODEL"),
            "record 1 of empty.jsonl has no question",
        ),
        (
            ("--questions", "text.jsonl", "--model", "MODEL"),
            "has an empty chunk list, expected ctxs: [{title, text}",
        ),
        (("--questions", "number.jsonl", "--model", "MODEL"), "a passage without text"),
        (("--model", "MODEL", "--store", "none"), "ingest first"),
        (("--model", "MODEL", "--from", "none"), "there is no writer 'none'"),
    ],
)
def test_bad_input_is_one_sentence(
    plain_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "file.txt").write_text("a file")
    (tmp_path / "alone.txt").write_text("Where is it?\n")
    (tmp_path / "broken.jsonl").write_text('{"question": "Where is it?"\n')
    (tmp_path / "empty.jsonl").write_text('{"question": " ", "ctxs": ["a"]}\n')
    (tmp_path / "text.jsonl").write_text('{"question": "Where?", "ctxs": "a"}\n')
    (tmp_path / "number.jsonl").write_text('{"question": "Where?", "ctxs": [3]}\n')
    given = [str(plain_model) if each == "MODEL" else each for each in arguments]
    assert words in refused("adapt", *given)
    assert not (tmp_path / "blendrag-writer").exists()


def test_model_that_cannot_be_blended_is_refused(many_docs: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "gpt2", tiny.family("gpt2"))
    words = refused(
        "adapt", "--model", model, "--documents", many_docs, "--out", tmp_path / "w", *FEW, status=3
    )
    assert "use mode full" in words


def test_what_is_saved_names_no_path_of_this_machine(
    plain_model: Path, written: tuple[Path, Result]
) -> None:
    out, _ = written
    texts = [p.read_text() for p in out.iterdir() if p.suffix != ".safetensors"]
    assert not any(str(plain_model.parent) in text for text in texts)
    words = refused("adapt", "--model", plain_model, "--from", out, "--rank", "8")
    assert f"--from {out} is a writer of rank 2, not 8; leave --rank out" in words
    assert f"# A writer for {plain_model.name}" in (out / "README.md").read_text()
    assert public_name("someone/model") == "someone/model"
    cached = "/cache/hub/models--someone--model/snapshots/1a2b"
    assert public_name(cached) == "someone/model"


def test_a_wrong_number_is_told_what_is_expected() -> None:
    result = invoke("adapt", "--learning-rate", "0")
    assert "'--learning-rate': 0 must be a number in (0, 1]" in result.stderr
