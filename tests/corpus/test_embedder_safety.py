"""A store never decides what code runs, neither by an embedder's name nor by a model's."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blendrag.corpus import embedder
from blendrag.corpus.embedder import (
    Embedder,
    _packaged_minilm,
    absolute_embedder,
    check_model_files,
    embedder_of,
)
from blendrag.corpus.manifest import check_recorded
from blendrag.errors import InvalidInputError, ModelLoadError
from corpus.corpus_fuzz import MANIFEST

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Own: pass\n"


@pytest.fixture
def minilm(tmp_path: Path) -> Path:
    """A copy of a sentence-transformers directory."""
    packaged = _packaged_minilm()
    assert packaged is not None
    return Path(shutil.copytree(packaged, tmp_path / "models" / "my-minilm"))


def with_modules(folder: Path, *types: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_part", "type": kind}
        for i, kind in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for i in range(len(types)):
        (folder / f"{i}_part").mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("recorded", [False, True])
def test_code_in_an_embedders_directory_is_not_run(tmp_path: Path, recorded: bool) -> None:
    folder = with_modules(tmp_path / "evil", "own_code.Own")
    (folder / "own_code.py").write_text(CODE)
    with pytest.raises(
        ModelLoadError, match=r"consists of 'own_code.Own', code that comes with it"
    ):
        Embedder(str(folder), recorded=recorded).embed(["x"])
    assert not (folder / "ran").exists()


def test_code_behind_a_router_is_not_run(tmp_path: Path) -> None:
    router = "sentence_transformers.base.modules.router.Router"
    folder = with_modules(tmp_path / "evil", router)
    (folder / "own_code.py").write_text(CODE)
    for name in ("config.json", "router_config.json"):
        types = {"query": router} if name == "router_config.json" else {"query": "own_code.Own"}
        (folder / "0_part" / name).write_text(json.dumps({"types": types}))
        (folder / "0_part" / "query").mkdir(exist_ok=True)
        inner = folder / "0_part" / "query" / "config.json"
        inner.write_text(json.dumps({"types": {"x": "own_code.Own"}}))
        with pytest.raises(ModelLoadError, match=r"own_code\.Own"):
            Embedder(str(folder)).embed(["x"])
    assert not (folder / "ran").exists()


def test_a_recorded_embedder_has_plain_modules_in_safetensors(minilm: Path) -> None:
    check_model_files(str(minilm), True, recorded=True)
    assert Embedder(str(minilm), recorded=True).embed(["x"]).shape == (1, 384)
    weights = next(minilm.rglob("model.safetensors"))
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        Embedder(str(minilm), recorded=True).embed(["x"])
    prefix = "sentence_transformers.models."
    words = with_modules(minilm.parent / "words", f"{prefix}WordEmbeddings")
    check_model_files(str(words), True, recorded=False)
    with pytest.raises(ModelLoadError, match="has a module 'WordEmbeddings', expected one of"):
        check_model_files(str(words), True, recorded=True)
    dense = with_modules(minilm.parent / "dense", f"{prefix}Dense")
    (dense / "0_part" / "model.safetensors").touch()
    config = dense / "0_part" / "config.json"
    config.write_text(json.dumps({"activation_function": "torch.nn.modules.activation.Tanh"}))
    check_model_files(str(dense), True, recorded=True)
    config.write_text(json.dumps({"activation_function": "torch.hub.load"}))
    with pytest.raises(ModelLoadError, match="activation outside"):
        check_model_files(str(dense), True, recorded=True)


class Pickled:
    """Makes a directory when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.mark),)


def with_pickle(folder: Path, mark: Path, recorded: bool) -> None:
    """Weights that run code: in a pickle, or in one named by an index of safetensors files."""
    (folder / "model.safetensors").unlink()
    file = "w.bin" if recorded else "pytorch_model.bin"
    torch.save({"embeddings.word_embeddings.weight": Pickled(mark)}, folder / file)
    if recorded:
        shards = {"embeddings.word_embeddings.weight": file}
        index = {"metadata": {"total_size": 1}, "weight_map": shards}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_options(folder: Path, group: str, options: object, file: str = "bert") -> None:
    (folder / "sentence_bert_config.json").unlink(missing_ok=True)
    config = {"max_seq_length": 64, group: options}
    (folder / f"sentence_{file}_config.json").write_text(json.dumps(config))


def opened(folder: Path, recorded: bool) -> Embedder:
    if not recorded:
        return Embedder(str(folder))
    manifest = replace(MANIFEST, embedder=str(folder))
    return embedder_of(manifest, folder.parent.parent / "store", None)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("group", "file"), [("model_args", "bert"), ("model_kwargs", "xlm-roberta"), (None, "bert")]
)
def test_a_pickle_of_an_embedder_is_not_run(
    minilm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: bool,
    group: str | None,
    file: str,
) -> None:
    mark = tmp_path / "ran"
    with_pickle(minilm, mark, recorded)
    with_options(minilm, group or "model_args", {"weights_only": False}, file)
    expected = "sets model_.*weights_only"
    if group is None:  # even if the options are not checked
        monkeypatch.setattr(embedder, "check_model_files", lambda *_: None)
        expected = "cannot be loaded"
    with pytest.raises(ModelLoadError, match=expected):
        opened(minilm, recorded).embed(["x"])
    assert not mark.exists()


def test_an_embedders_files_may_set_only_harmless_options(minilm: Path, tmp_path: Path) -> None:
    with_options(minilm, "tokenizer_args", {"model_max_length": 32})
    assert opened(minilm, recorded=True).embed(["x"]).shape == (1, 384)
    for harmless in ("model_args", {}), ("processing_kwargs", {"text": {"padding": True}}):
        with_options(minilm, *harmless)
        check_model_files(str(minilm), True, recorded=True)
    groups = "model_args model_kwargs config_args config_kwargs tokenizer_args processor_kwargs"
    for group in groups.split():
        for options in {"gguf_file": "x"}, {"dtype": {"weights_only": False}}, ["weights_only"]:
            with_options(minilm, group, options)
            with pytest.raises(ModelLoadError, match=f"sets {group}=.*expected only add_pooling"):
                check_model_files(str(minilm), True, recorded=False)
    (minilm / "modules.json").unlink()
    with pytest.raises(ModelLoadError, match="sets processor_kwargs="):
        check_model_files(str(minilm), True, recorded=False)
    router = with_modules(tmp_path / "router", "sentence_transformers.base.modules.router.Router")
    types = {"query": "sentence_transformers.models.Transformer"}
    (router / "0_part" / "router_config.json").write_text(json.dumps({"types": types}))
    (router / "0_part" / "query").mkdir()
    check_model_files(str(router), True, recorded=False)
    with_options(router / "0_part" / "query", "model_args", {"weights_only": False})
    with pytest.raises(ModelLoadError, match="sets model_args="):
        check_model_files(str(router), True, recorded=False)


@pytest.mark.parametrize("plain", [False, True])
def test_a_recorded_embedders_index_names_only_safetensors_in_its_folder(
    minilm: Path, plain: bool
) -> None:
    if plain:
        (minilm / "modules.json").unlink()
    index = minilm / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    check_model_files(str(minilm), True, recorded=True)
    for shards in {"a": "w.bin"}, {"a": "../w.safetensors"}, {"a": 1}, ["w.bin"]:
        index.write_text(json.dumps({"weight_map": shards}))
        check_model_files(str(minilm), True, recorded=False)
        with pytest.raises(ModelLoadError, match=r"names other files than \*\.safetensors"):
            check_model_files(str(minilm), True, recorded=True)
    index.rename(minilm / "own.safetensors.index.json")
    check_model_files(str(minilm), True, recorded=True)
    config = json.loads((minilm / "config.json").read_text())
    config["transformers_weights"] = "own.safetensors.index.json"
    (minilm / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"has a own\.safetensors\.index\.json"):
        check_model_files(str(minilm), True, recorded=True)
    (minilm / "own.safetensors.index.json").unlink()
    (minilm / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="is an adapter of another model"):
        check_model_files(str(minilm), True, recorded=True)


@pytest.mark.parametrize(
    "content", ["{}", "[1]", "[" * 100_000, '[{"type": "sentence_transformers.x", "path": "../y"}]']
)
def test_an_invalid_modules_json_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelLoadError, match=f"embedder '{tmp_path}' has a mod"):
        check_model_files(str(tmp_path), True, recorded=False)


def test_a_recorded_name_is_not_a_path_into_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    (root / "evil").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "link").symlink_to(root / "evil")
    for harmless in ("demo", "minilm-offline", "org/model-1.5B_x", str(tmp_path / "outside")):
        check_recorded(harmless, root, "--model")
    monkeypatch.chdir(tmp_path)
    hostile = [str(root / "evil"), str(root), str(tmp_path / "link"), "store/evil", "outside"]
    for name in [*hostile, "./outside", "../x", "a/b/c", "~/x", "", f"{tmp_path}/x/../store/evil"]:
        with pytest.raises(InvalidInputError, match="if you trust it, name it: --model"):
            check_recorded(name, root, "--model")


def test_an_embedder_inside_a_store_is_loaded_only_if_the_user_names_it(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "models"
    manifest = replace(MANIFEST, embedder=str(minilm))
    with pytest.raises(InvalidInputError, match="a directory inside the store"):
        embedder_of(manifest, root, None)
    with pytest.raises(InvalidInputError, match="a directory inside the store"):
        embedder_of(manifest, root, "other/model")
    monkeypatch.chdir(tmp_path)
    named = embedder_of(manifest, root, "models/my-minilm")
    assert named.embed_query("x").shape == (384,)
    assert absolute_embedder("models/my-minilm") == str(minilm)
