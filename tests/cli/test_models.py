"""``blendrag models``: what is on this machine, and downloads by the hub's own function, here a fake."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import DryRunFileInfo, errors

from cli.commands import invoke, printed, refused

WRITER = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
COMMIT = "a" * 40


def write_files(folder: Path, config: dict[str, Any], **files: int) -> Path:
    """A config, and other files of so many bytes; ``_`` in a name is a dot."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, size in files.items():
        (folder / name.replace("_", ".")).write_bytes(b"x" * size)
    return folder


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's local cache, which is empty."""
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    return hub


def in_cache(hub: Path, name: str) -> Path:
    """Where the snapshot of a model is."""
    place = hub / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    return place / "snapshots" / COMMIT


def names(use: str, *more: str | Path) -> list[str]:
    return [each["name"] for each in printed("models", *more)["models"] if each["use"] == use]


def test_the_shipped_models_are_listed_without_a_cache(hub: Path) -> None:
    found = printed("models")
    assert found["hub_cache"] == str(hub)
    demo, *_ = found["models"]
    assert (demo["name"], demo["kind"], demo["is_complete"]) == ("demo", "LlamaForCausalLM", True)
    assert demo["size_bytes"] > 1_000_000
    assert names("--embedder") == ["minilm-offline"]


def test_the_list_is_a_command_too_with_the_same_options() -> None:
    assert printed("models", "list") == printed("models")
    assert invoke("models", "list").stdout == invoke("models", "-v").stdout
    assert "\n  pull " in invoke("models", "-h").stdout
    assert "No such command 'show'" in invoke("models", "show").stderr


def test_models_in_the_hubs_cache_are_listed_by_what_they_are_for(hub: Path) -> None:
    write_files(in_cache(hub, "me/writer"), WRITER, model_safetensors=5000, small_gguf=10)
    write_files(in_cache(hub, "me/begun"), WRITER)
    write_files(in_cache(hub, "me/vectors"), {"architectures": ["BertModel"]}, modules_json=2,
                model_safetensors=9)  # fmt: skip
    ranker = {"architectures": ["BertForSequenceClassification"]}
    write_files(in_cache(hub, "me/ranker"), ranker, model_safetensors=9)
    write_files(in_cache(hub, "me/pictures"), {"architectures": ["ViTModel"]}, model_safetensors=9)
    assert names("--model")[-3:] == ["me/begun", "me/writer", "me/writer:small.gguf"]
    assert names("--embedder")[-1:] == ["me/vectors"]
    assert names("--reranker") == ["me/ranker"]
    shown = invoke("models").stdout
    assert "bytes; without weights: blendrag models pull me/begun\n" in shown
    assert "  me/writer: LlamaForCausalLM, 4.9 KiB\n" in shown


def test_models_of_a_directory_are_listed_by_their_paths(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    write_files(folder / "a", WRITER, model_safetensors=9)
    write_files(folder / "more" / "b", WRITER, model_safetensors=9)
    write_files(folder / ".hidden", WRITER, model_safetensors=9)
    (folder / "c.gguf").write_bytes(b"x")
    (folder / "config.json").write_text("[")
    expected = [str(folder / name) for name in ("c.gguf", "a", "more/b")]
    assert names("--model", "--folder", folder)[-3:] == expected
    (tmp_path / "texts").mkdir()
    assert (
        f"note: no model in --folder {tmp_path}/texts: "
        in invoke("models", "--folder", tmp_path / "texts").stderr
    )
    said = refused("models", "--folder", tmp_path / "none")
    assert said.endswith("/none is no directory, expected one that has models in it")


# -- pull -----------------------------------------------------------------------------------------

Pulled = list[list[str]]


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pulled]:
    """Makes a hub with one model of these files and sizes; what is pulled is added to the list."""

    def make(files: dict[str, int], here: tuple[str, ...] = ()) -> Pulled:
        pulled: Pulled = []

        def snapshot_download(
            name: str,
            allow_patterns: list[str],
            ignore_patterns: list[str] | None = None,
            dry_run: bool = False,
        ) -> Any:
            chosen = [
                file
                for file in files
                if any(fnmatch(file, each) for each in allow_patterns)
                and not any(fnmatch(file, each) for each in ignore_patterns or ())
            ]
            if dry_run:
                return [
                    DryRunFileInfo(COMMIT, files[file], file, file, file in here, file not in here)
                    for file in chosen
                ]
            pulled.append(chosen)
            return f"/hub/{name}"

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return pulled

    return make


SAFE = {"config.json": 500, "tokenizer.json": 1500, "model.safetensors": 8000}
OTHER = {
    "pytorch_model.bin": 8000, "onnx/model.onnx": 9, "onnx/config.json": 9, "README.md": 9, "tf_model.h5": 9,
    "m-Q4.gguf": 3000, "m-Q8.gguf": 6000,
}  # fmt: skip


def test_what_transformers_loads_is_pulled_and_its_size_said_before(
    holds: Callable[..., Pulled],
) -> None:
    pulled = holds(SAFE | OTHER, here=("config.json", "tokenizer.json"))
    result = invoke("models", "pull", "me/model")
    assert result.exit_code == 0, result.stderr
    assert pulled == [[*SAFE]]
    said = "note: pulling me/model: 3 files, 9.8 KiB, of which 2.0 KiB are here already\n"
    assert (result.stdout, result.stderr) == ("me/model is in /hub/me/model\n", said)
    assert printed("models", "pull", "me/model") == {
        "name": "me/model", "path": "/hub/me/model", "files": 3, "size_bytes": 10_000,
        "downloaded_bytes": 8000,
    }  # fmt: skip


def test_a_gguf_file_or_weights_in_pickles_are_pulled_if_there_is_nothing_else(
    holds: Callable[..., Pulled],
) -> None:
    pulled = holds(OTHER | {"config.json": 500})
    assert invoke("models", "pull", "me/model").exit_code == 0
    assert invoke("models", "pull", "me/model:m-Q4.gguf").exit_code == 0
    assert pulled == [["pytorch_model.bin", "config.json"], ["m-Q4.gguf"]]


def test_what_cannot_be_loaded_is_not_pulled(
    holds: Callable[..., Pulled], monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = holds({"m-Q4.gguf": 3000, "README.md": 9})
    said = refused("models", "pull", "me/model")
    assert said.endswith("as me/model:FILE: m-Q4.gguf (2.9 KiB)")
    assert "has no file 'x.gguf'" in refused("models", "pull", "me/model:x.gguf")
    holds(SAFE)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    result = invoke("models", "pull", "me/model")
    assert (result.exit_code, pulled) == (2, [])
    assert "me/model needs 9.8 KiB, but " in result.stderr


def test_a_model_that_is_here_without_the_hub_is_not_asked_for(
    holds: Callable[..., Pulled], tmp_path: Path
) -> None:
    pulled = holds(SAFE)
    here = {"demo": "--model demo", "minilm-offline": "--embedder minilm-offline"}
    for name, given in {**here, str(tmp_path): f"--model {tmp_path}"}.items():
        said = refused("models", "pull", name)
        assert (
            f"is on this machine already, expected a model of the hub; give it as {given}" in said
        )
    assert pulled == []


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        (
            errors.OfflineModeIsEnabled("x"),
            "as HF_HUB_OFFLINE keeps all programs from the hub; unset it",
        ),
        (errors.HFValidationError("x"), "'me/model' is no name on the hub; expected owner/name"),
        (OSError("no route"), "me/model cannot be pulled (no route); check the connection"),
        (
            errors.DryRunError("no access"),
            "me/model cannot be pulled (no access); check the connec",
        ),
    ],
)
def test_a_hub_that_cannot_be_asked_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, says: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise errors.DryRunError("the repository cannot be accessed") from cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    assert says in refused("models", "pull", "me/model")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (errors.RepositoryNotFoundError, "the hub has no public model me/model; check the name"),
        (errors.GatedRepoError, "me/model is gated; accept its terms"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], says: str
) -> None:
    error = kind.__new__(kind, "401")

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    assert says in refused("models", "pull", "me/model")
