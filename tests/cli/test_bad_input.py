"""User errors: one sentence, the right exit status, and an intact store."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
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
from blendrag.corpus.embedder import packaged_minilm
from cli.commands import (
    QUESTION,
    ingest_args,
    invoke,
    printed,
    refused,
    reused_tokens,
    said,
    write_documents,
)

# -- documents ------------------------------------------------------------------------------------


def test_missing_paths_and_an_empty_corpus_make_no_store(model_dir: Path, tmp_path: Path) -> None:
    docs, store = tmp_path / "docs", tmp_path / "store"
    docs.mkdir()
    (docs / "picture.png").write_bytes(b"\x89PNG" + bytes(9))
    sentence = refused(*ingest_args(docs, model_dir, store, "--json"))
    assert "there is no document in" in sentence
    assert "(1 skipped: binary)" in sentence
    assert "does not exist" in refused(*ingest_args(tmp_path / "nothing", model_dir, store))
    assert not store.exists()


def test_bad_files_are_named_skipped_and_counted(ingest: list[str], docs: Path) -> None:
    bad = {
        "empty.txt": b"", "spaces.md": b" \n\n ", "binary.txt": bytes(range(256)) * 8,
        "broken.jsonl": b'{"text": "Good."}\n{"text": ', "picture.png": b"\x89PNG" + bytes(9),
        "broken.docx": b"PK\x03\x04", "a.bin": bytes(9), "b.bin": bytes(9),
        "damaged.md": "Über die Brücke für Fußgänger".encode() + b"\xe9",
    }  # fmt: skip
    for name, content in bad.items():
        (docs / name).write_bytes(content)
    result = invoke(*ingest)
    assert result.exit_code == 1
    assert result.stdout.startswith("5 documents (0 unchanged), ")
    assert "; 2 failed; " in result.stdout
    failed = [line for line in result.stderr.splitlines() if line.startswith("failed: ")]
    assert all(f"{docs}/broken." in line for line in failed)
    assert len(failed) == 2
    where = "1 place, byte 34 (line 1)"
    assert f"warning: {docs / 'damaged.md'}: is not UTF-8 at {where}" in result.stderr
    # one line for each kind of skipped file
    assert f"skipped: 2 files, empty: {docs / 'empty.txt'}, {docs / 'spaces.md'}\n" in result.stderr
    assert re.search(r"skipped: 4 files, binary: (\S+, ){3}…\n", result.stderr)
    assert all(name in json.dumps(printed(*ingest, status=1)) for name in bad)


# -- questions, options, environment --------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("  \n", "error: the question "),
        ("\udc80", "error: the question "),
        ("word " * 1000, r"over the model's context of 1024; .* retrieve fewer chunks \(--top-k\)"),
    ],
    ids=["empty", "no Unicode", "too long"],
)
def test_an_empty_or_too_long_question_is_refused(
    ingested: Path, question: str, words: str
) -> None:
    assert re.search(words, refused("ask", question, "--store", ingested, "--json"))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("calibrate --ratio 1.5", "1.5 must be a number in [0, 1]\n"),
        ("ask q --min-ratio auto", "'auto' must be a number in [0, 1]\n"),
        ("ask q --min-ratio nan", "'nan' must be a number in [0, 1]"),
        ("ask q --top-k 1.5", "'1.5' must be a whole number of at least 1"),
        ("ask q --temperature inf", "'inf' must be 0, or a number of at least 1e-30"),
        ("ask q --policy magic", "policy 'magic' is not one of"),
        ("ask q --schedule steep", "steep"),
        ("ask q --dtype int3", "int3"),
        ("ask q --device abacus", "abacus"),
        ("ask q --lora /no/such/adapter", "/no/such/adapter"),
        *(
            (f"{command} --model /no/such", "there is no model '/no/such'; expected a directory")
            for command in ("ask q", "chat", "ingest .", "calibrate", "profile")
        ),
        ("ask q --model /no/such.gguf", "there is no file /no/such.gguf; expected a GGUF file"),
        ("ask q --no-such", "No such option"),
        ("ingest . --kv-encoding zip", "'zip' must be one of native, int8"),
    ],
)
def test_a_wrong_option_is_a_user_error(ingested: Path, command: str, words: str) -> None:
    result = invoke(*command.split(), "--store", ingested)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


def test_a_small_address_space_is_refused_before_large_imports(ingested: Path) -> None:
    # In a new process: under some limits importing scipy never ends.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))"
    command = f"{limit}; from blendrag.cli.main import main; main()"
    args = [sys.executable, "-c", command, "ask", QUESTION, "--store", ingested]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the address space is limited to 900.0 MiB (ulimit -v)")
    assert len(done.stderr.splitlines()) == 1


# -- models ---------------------------------------------------------------------------------------


def test_an_unknown_model_is_named(ingested: Path) -> None:
    name = "nobody/nothing-7b"
    assert f"model '{name}'" in refused("verify", name, "--json")
    assert f"model '{name}'" in refused("ask", "q", "--model", name, "--store", ingested)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory; use a smaller model"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory; use a"),
        (MemoryError(), "out of memory; use a"),
        (OSError(12, "Cannot allocate memory"), "out of memory; use a"),
        (OSError(28, "No space left on device", "/cache/model"), "no space left writing /cache/mo"),
    ],
)
def test_memory_or_disk_that_runs_out_while_a_model_loads_is_named(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    assert sentence in refused("verify", checkpoint, status=1)


def test_a_refused_model_exits_3_and_names_mode_full(
    refused_dir: Path, docs: Path, tmp_path: Path
) -> None:
    fields = printed("verify", refused_dir, status=3)
    assert fields["verdict"] == "refused"
    assert fields["reason"]
    plan = printed(*ingest_args(docs, refused_dir, tmp_path / "store", "--dry-run"), status=3)
    assert (plan["documents"], plan["bytes"]) == (3, 0)
    assert "use mode full" in plan["refused"]
    fed = refused(*ingest_args(docs, refused_dir, tmp_path / "store", "--json"), status=3)
    assert "use mode full" in fed


@pytest.mark.slow
def test_after_failed_first_ingests_another_one_works(
    model_dir: Path, docs: Path, tmp_path: Path
) -> None:
    store, bad = tmp_path / "store", tmp_path / "bad.txt"
    bad.write_bytes(b"\0")
    for args, status in (
        (ingest_args(docs, "nobody/nothing-7b", store), 2),
        (ingest_args(docs, model_dir, store, "--embedder", "nobody/nothing"), 2),
        (ingest_args(bad, model_dir, store), 1),
    ):
        assert invoke(*args).exit_code == status
        assert not store.exists()
    asked = refused("ask", "anything", "--store", store, "--model", str(model_dir))
    assert "there is no corpus at" in asked
    assert invoke(*ingest_args(docs, model_dir, store)).exit_code == 0
    assert reused_tokens(store) > 0


# -- stores ---------------------------------------------------------------------------------------


def test_a_store_of_another_model_says_which(
    other_model_dir: Path, model_dir: Path, docs: Path, ingested: Path
) -> None:
    asked = refused("ask", "q", "--model", str(other_model_dir), "--store", ingested, "--json")
    fed = refused(*ingest_args(docs, other_model_dir, ingested))
    for sentence in (asked, fed):
        assert f"was ingested with model '{model_dir}'" in sentence


def test_a_prefix_file_must_be_a_readable_regular_file(ingest: list[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "empty").touch()
    for name, reason in (
        ("missing", "No such file"),
        ("fifo", "not a regular file"),
        ("large", "larger than 1 MiB"),
        ("empty", "is empty"),
    ):
        sentence = refused(*ingest, "--prefix-file", str(tmp_path / name))
        assert sentence.startswith(f"error: --prefix-file {tmp_path / name} ")
        assert reason in sentence
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_full_store_stops_ingest_and_it_can_be_repeated(
    ingest: list[str], tmp_path: Path
) -> None:
    stopped = printed(*ingest, "--disk-bytes", "150kB", status=1)
    assert 0 < stopped["chunks_computed"] < 9
    assert "raise disk_bytes" in said(invoke(*ingest)), "the store remembers its limit"
    assert reused_tokens(tmp_path / "store") > 0
    rest = printed(*ingest, "--disk-bytes", "1GB")
    assert rest["documents"] == 3
    assert rest["chunks_computed"] + stopped["chunks_computed"] == 9


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Larger writes fail (EFBIG), also in SQLite."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kilobytes", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_failing_writes_end_ingest_in_a_sentence_and_it_can_be_repeated(
    kilobytes: int, model_dir: Path, store: Path, tmp_path: Path
) -> None:
    docs = write_documents(tmp_path / "docs", documents=2, paragraphs=8)
    args = ingest_args(docs, model_dir, store)
    with files_of_at_most(kilobytes * 1000):
        full = invoke(*args)
    assert full.exit_code in (1, 2)
    assert full.stderr.splitlines()[-1].startswith("error: ")
    assert reused_tokens(store) > 0
    assert printed(*args)["documents"] == 2


# -- stores made by others ------------------------------------------------------------------------


def with_manifest(store: Path, **changes: Any) -> None:
    """Change the manifest of a store, as its maker could have written it."""
    with Corpus.open(store) as corpus, corpus.file.writing():
        manifest = replace(corpus.manifest, **changes)
        corpus.file.set_meta("manifest", manifest.to_json())


def test_a_store_does_not_choose_which_code_is_run(store: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    modules = [{"idx": 0, "name": "0", "path": "", "type": "own_code.Own"}]
    (evil / "modules.json").write_text(json.dumps(modules))
    (evil / "own_code.py").write_text("open(__file__ + '.ran', 'w')")
    with_manifest(store, embedder=str(evil))
    for named in ((), ("--embedder", str(evil))):  # even if the user names it
        sentence = refused("ask", QUESTION, "--store", store, *named)
        assert "consists of 'own_code.Own'" in sentence
    assert not list(evil.glob("*.ran"))


def test_a_model_that_a_store_names_is_outside_it_and_not_pickled(
    store: Path, model_dir: Path, tmp_path: Path
) -> None:
    for folder, words in (
        (store / "inside", "a directory inside the store"),
        (tmp_path / "pickled", "which has no model.safetensors"),
    ):
        shutil.copytree(model_dir, folder)
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with_manifest(store, model=str(folder))
        assert words in refused("ask", QUESTION, "--store", store)


@pytest.mark.slow
def test_a_named_embedder_directory_is_remembered_in_full_and_used_again(
    ingest: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = packaged_minilm()
    assert packaged is not None
    (tmp_path / "my-minilm").symlink_to(packaged)
    monkeypatch.chdir(tmp_path)
    ingest[ingest.index("minilm-offline")] = "./my-minilm"
    assert invoke(*ingest).exit_code == 0
    monkeypatch.chdir("/")
    moved = shutil.move(tmp_path / "store", tmp_path / "moved")
    assert reused_tokens(moved) > 0
    asked = refused("ask", QUESTION, "--store", moved, "--embedder", "o/other")
    assert "was embedded with" in asked


def test_another_embedder_than_the_stores_is_refused_and_one_of_the_environment_is_said_to_be_ignored(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = "search", QUESTION, "--store", store
    assert "was embedded with 'minilm-offline', not 'o/x'" in refused(*search, "--embedder", "o/x")
    monkeypatch.setenv("BLENDRAG_EMBEDDER", "o/x")
    found = invoke(*search)
    assert found.exit_code == 0
    assert said(found) == (
        f"warning: embedder 'o/x' (BLENDRAG_EMBEDDER) ignored: store {store} was embedded with "
        "'minilm-offline'; ingest into another store to use it"
    )


def test_settings_of_a_new_corpus_that_an_ingest_ignores_are_named(
    store: Path, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = "ingest", ingested.parent / "docs", "--store", store
    monkeypatch.setenv("BLENDRAG_CHUNK_TOKENS", "64")
    assert "warning" not in invoke(*again).stderr
    monkeypatch.setenv("BLENDRAG_CHUNK_TOKENS", "128")
    monkeypatch.setenv("BLENDRAG_KV_ENCODING", "int8")
    told = [line for line in invoke(*again).stderr.splitlines() if line.startswith("warning: ")]
    assert [line.split(";")[0] for line in told] == [
        f"warning: BLENDRAG_CHUNK_TOKENS 128 ignored: store {store} has chunk_tokens 64",
        f"warning: BLENDRAG_KV_ENCODING int8 ignored: store {store} has kv_encoding native",
    ]


def test_a_lost_corpus_is_reported_and_can_be_ingested_again(
    store: Path, model_dir: Path, docs: Path
) -> None:
    database = store / "corpus" / "corpus.sqlite"
    for lose in (
        lambda: database.write_bytes(b""),
        database.unlink,
        lambda: shutil.rmtree(store / "corpus"),
    ):
        lose()
        asked = refused("ask", QUESTION, "--store", store, "--model", str(model_dir))
        assert re.search(r"holds the KV of \d+ chunks but no corpus; ingest", asked)
    result = invoke(*ingest_args(docs, model_dir, store))
    assert result.exit_code == 0, result.stderr
    assert "but no corpus: creating a new one" in said(result)
    assert reused_tokens(store) > 0


LONG = "9" * 5000


@pytest.mark.parametrize(
    "args",
    [
        ("store", "gc", "--max-bytes", f"{LONG}G"),
        ("store", "gc", "--max-bytes", f"{LONG}.5"),
        ("store", "gc", "--remote", "x", "--grace-hours", LONG),
        ("store", "gc", "--remote", LONG),
        ("serve", "--ray", "--replicas", LONG),
        ("ask", "x", "--top-k", LONG),
        ("ask", "x", "--ratio", LONG),
        ("ask", "x", "--max-new-tokens", LONG),
        ("ask", "x", "--mode", LONG),
    ],
)
def test_long_values_are_refused_and_cut(args: tuple[str, ...]) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert "9" * 100 not in result.stderr.replace("\n", "")
    assert "…" in result.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("TOP_K", LONG), ("CHUNK_TOKENS", "x" * 5000), ("REMOTE_TIMEOUT_S", "inf"), ("RATIO", LONG)],
)
def test_variables_that_no_clock_or_number_takes_are_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"BLENDRAG_{name}", value)
    sentence = refused("store", "stats")
    assert f"BLENDRAG_{name} " in sentence
    assert len(sentence) < 300


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            ["RATOI"],
            "BLENDRAG_RATOI ignored: no setting of that name; did you mean BLENDRAG_RATIO?",
        ),
        (["ENCODING"], "did you mean BLENDRAG_KV_ENCODING?"),
        (["PORT", "API"], "BLENDRAG_API, BLENDRAG_PORT ignored: "),
        (["PORT"], "no setting of that name; docs/options.md lists the variables"),
    ],
)
def test_variables_of_no_setting_are_named_in_a_warning(
    variables: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in variables:
        monkeypatch.setenv(f"BLENDRAG_{name}", "0.1")
    monkeypatch.setenv("BLENDRAG_NOTHING", "")
    warning, error = invoke("list", "--store", tmp_path / "none").stderr.splitlines()
    assert warning.startswith("warning: ")
    assert said in warning
    assert "NOTHING" not in warning
    assert error.startswith("error: ")


@pytest.mark.parametrize(
    ("given", "suggested"),
    [("ask --encoding", ""), ("ask --timeout", ""), ("ingest --encoding", "--kv-encoding"),
     ("ask --max-tokens", "--max-new-tokens"), ("store gc --grace-hour", "--grace-hours")],
)  # fmt: skip
def test_only_options_that_are_spelled_alike_are_suggested(given: str, suggested: str) -> None:
    command, option = given.rsplit(maxsplit=1)
    hint = f" (Possible options: {suggested})" * bool(suggested)
    error = invoke(*command.split(), option, "x").stderr.splitlines()[-1]
    assert error == f"Error: No such option: {option}{hint}"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("ingst", " Did you mean ingest?"),
        ("lst", " Did you mean list?"),
        ("store chek", " Did you mean check?"),
        ("stats", " Did you mean store stats?"),
        ("check", " Did you mean schema check or store check?"),
        ("delete", ""),
    ],
)
def test_only_commands_that_are_spelled_alike_are_suggested(given: str, hint: str) -> None:
    result = invoke(*given.split())
    said = f"Error: No such command '{given.split()[-1]}'.{hint}"
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, said)


@pytest.mark.parametrize(
    ("given", "corrected"),
    [
        ("cache --verbose clear --yes", "cache clear --verbose --yes"),
        ("models --json list", "models list --json"),
        ("schema --json check FILE", "schema check --json FILE"),
        ("store --store DIR check", "store check --store DIR"),
        ("bench --json store", "bench store --json"),
        ("--json store check DIR", "store check --json DIR"),
        ("--top-k 3 ask 'who is it?'", "ask --top-k 3 'who is it?'"),
        ("--policy list ask X", "ask --policy list X"),
        ("--store ask list", "list --store ask"),
        ("--store remove remove a.txt", "remove --store remove a.txt"),
        ("store --store list gc", "store gc --store list"),
        ("--store store store gc", "store gc --store store"),
        ("--stroe DIR ask X", "ask --stroe DIR X"),
    ],
)
def test_options_before_a_command_are_told_where_they_go(given: str, corrected: str) -> None:
    result = invoke(*shlex.split(given))
    told = f"error: options go after the command: blendrag {corrected}\n"
    assert (result.exit_code, result.stderr) == (2, told)


def test_a_value_that_is_called_like_a_command_is_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--folder list is no directory" in refused("models", "--folder", "list")


def test_a_store_whose_first_ingest_failed_has_no_model_yet(tmp_path: Path) -> None:
    with Corpus.open(tmp_path, create=True):
        pass
    assert invoke("list", "--store", tmp_path).stdout == "0 documents; no model yet\n"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["ask", "what", "is it?"], 'ask takes a question in quotes: blendrag ask "what is it?"'),
        (["search", "a", "mill"], 'search takes a question in quotes: blendrag search "a mill"'),
        (
            ["chat", "a", "mill"],
            'chat reads its questions from the terminal; for one alone: blendrag ask "a mill"',
        ),
    ],
)
def test_a_question_without_quotes_is_told_how_to_quote_it(args: list[str], told: str) -> None:
    result = invoke(*args)
    assert (result.exit_code, result.stderr) == (2, f"error: blendrag {told}\n")
