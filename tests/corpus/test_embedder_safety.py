"""A store never decides what code runs, neither by an embedder's name nor by a model's."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blendrag.corpus.embedder import (
    Embedder,
    absolute_embedder,
    embedder_of,
    packaged_minilm,
)
from blendrag.corpus.embedder_files import ModelFiles
from blendrag.corpus.manifest import check_recorded
from blendrag.errors import InvalidInputError, ModelLoadError
from corpus.small_corpus import MANIFEST

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Own: pass\n"
ROUTER = "sentence_transformers.base.modules.router.Router"


@pytest.fixture
def minilm(tmp_path: Path) -> Path:
    """A copy of a sentence-transformers directory."""
    packaged = packaged_minilm()
    assert packaged is not None
    return Path(shutil.copytree(packaged, tmp_path / "models" / "my-minilm"))


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def with_module(folder: Path, kind: str) -> Path:
    """A model of one module, whose folder is ``part``; Python code is in the model's folder."""
    write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "part", "type": kind}])
    (folder / "part").mkdir()
    (folder / "own_code.py").write_text(CODE)
    return folder


def assert_refused(folder: Path, words: str, recorded: bool = False) -> None:
    with pytest.raises(ModelLoadError, match=words):
        ModelFiles(str(folder), True, recorded).check()


def assert_accepted(folder: Path, recorded: bool = True) -> None:
    ModelFiles(str(folder), True, recorded).check()


@pytest.mark.parametrize(("routers", "recorded"), [(0, True), (1, False), (2, False), (2, True)])
def test_code_in_an_embedders_directory_is_not_run(
    tmp_path: Path, routers: int, recorded: bool
) -> None:
    kinds = [*[ROUTER] * routers, "own_code.Own"]
    folder = with_module(tmp_path / "evil", kinds[0])
    part = folder / "part"
    for level, kind in enumerate(kinds[1:]):
        name = "config.json" if level else "router_config.json"
        write_json(part / name, {"types": {"query": kind}})
        part /= "query"
    with pytest.raises(ModelLoadError, match=r"'own_code\.Own', code that comes with it"):
        Embedder(str(folder), recorded=recorded).embed(["x"])
    assert not (folder / "ran").exists()


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
        write_json(folder / "model.safetensors.index.json", index)


def with_options(folder: Path, group: str, options: object, file: str = "bert") -> None:
    (folder / "sentence_bert_config.json").unlink(missing_ok=True)
    write_json(folder / f"sentence_{file}_config.json", {"max_seq_length": 64, group: options})


def opened(folder: Path, recorded: bool) -> Embedder:
    if not recorded:
        return Embedder(str(folder))
    manifest = replace(MANIFEST, embedder=str(folder))
    return embedder_of(manifest, folder.parent.parent / "store", None)


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize(("kind", "recorded"), [("bert", False), ("xlm-roberta", True)])
def test_a_pickle_is_not_read_and_options_that_would_are_refused(
    minilm: Path, kind: str, recorded: bool, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = r"sets model_args=.*weights_only"
    if not is_checked:
        monkeypatch.setattr(ModelFiles, "check", lambda _: None)
        words = "cannot be loaded"
    with_pickle(minilm, minilm.parent / "ran", recorded)
    with_options(minilm, "model_args", {"weights_only": False}, kind)
    with pytest.raises(ModelLoadError, match=words):
        opened(minilm, recorded).embed(["x"])
    assert not (minilm.parent / "ran").exists()


def test_a_recorded_embedder_has_plain_modules_in_safetensors(minilm: Path) -> None:
    assert opened(minilm, recorded=True).embed(["x"]).shape == (1, 384)
    weights = next(minilm.rglob("model.safetensors"))
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        opened(minilm, recorded=True).embed(["x"])
    words = with_module(minilm.parent / "words", "sentence_transformers.models.WordEmbeddings")
    assert_accepted(words, recorded=False)
    assert_refused(words, "has a module 'WordEmbeddings', expected one of", recorded=True)
    dense = with_module(minilm.parent / "dense", "sentence_transformers.models.Dense")
    (dense / "part" / "model.safetensors").touch()
    config = dense / "part" / "config.json"
    write_json(config, {"activation_function": "torch.nn.modules.activation.Tanh"})
    assert_accepted(dense)
    write_json(config, {"activation_function": "torch.hub.load"})
    assert_refused(dense, "activation outside", recorded=True)


GROUPS = [
    f"{part}_{end}"
    for part in ("model", "config", "tokenizer", "processor")
    for end in ("args", "kwargs")
]


def test_an_embedders_files_may_set_only_harmless_options(minilm: Path, tmp_path: Path) -> None:
    with_options(minilm, "tokenizer_args", {"model_max_length": 32})
    assert opened(minilm, recorded=True).embed(["x"]).shape == (1, 384)
    for harmless in ("model_args", {}), ("processing_kwargs", {"text": {"padding": True}}):
        with_options(minilm, *harmless)
        assert_accepted(minilm)
    for group in GROUPS:
        for options in {"gguf_file": "x"}, {"dtype": {"weights_only": False}}, ["weights_only"]:
            with_options(minilm, group, options)
            assert_refused(minilm, f"sets {group}=.*expected only add_pooling")
    (minilm / "modules.json").unlink()
    assert_refused(minilm, "sets processor_kwargs=")
    router = with_module(tmp_path / "router", ROUTER)
    types = {"query": "sentence_transformers.models.Transformer"}
    write_json(router / "part" / "router_config.json", {"types": types})
    assert_accepted(router, recorded=False)
    (router / "part" / "query").mkdir()
    with_options(router / "part" / "query", "model_args", {"weights_only": False})
    assert_refused(router, "sets model_args=")


@pytest.mark.parametrize("plain", [False, True])
def test_a_recorded_embedders_index_names_only_safetensors_in_its_folder(
    minilm: Path, plain: bool
) -> None:
    if plain:
        (minilm / "modules.json").unlink()
    index = minilm / "model.safetensors.index.json"
    write_json(index, {"weight_map": {"a": "model-1.safetensors"}})
    assert_accepted(minilm)
    for shards in {"a": "w.bin"}, {"a": "../w.safetensors"}, {"a": 1}, ["w.bin"]:
        write_json(index, {"weight_map": shards})
        assert_accepted(minilm, recorded=False)
        assert_refused(minilm, r"names other files than \*\.safetensors", recorded=True)
    index.rename(minilm / "own.safetensors.index.json")
    assert_accepted(minilm)
    config = json.loads((minilm / "config.json").read_text())
    config["transformers_weights"] = "own.safetensors.index.json"
    write_json(minilm / "config.json", config)
    assert_refused(minilm, r"has a own\.safetensors\.index\.json", recorded=True)
    (minilm / "own.safetensors.index.json").unlink()
    write_json(minilm / "adapter_config.json", {})
    assert_refused(minilm, "is an adapter of another model", recorded=True)


@pytest.mark.parametrize(
    "content", ["{}", "[1]", "[" * 100_000, '[{"type": "sentence_transformers.x", "path": "../y"}]']
)
def test_an_invalid_modules_json_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    assert_refused(tmp_path, f"embedder '{tmp_path}' has a mod")


def test_a_recorded_name_is_not_a_path_into_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    (root / "evil").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "link").symlink_to(root / "evil")
    for harmless in ("demo", "minilm-offline", "org/model-1.5B_x", str(tmp_path / "outside")):
        check_recorded(harmless, root, "model")
    monkeypatch.chdir(tmp_path)
    hostile = [str(root / "evil"), str(root), str(tmp_path / "link"), "store/evil", "outside"]
    for name in [*hostile, "./outside", "../x", "a/b/c", "~/x", "", f"{tmp_path}/x/../store/evil"]:
        with pytest.raises(InvalidInputError, match="if you trust it, name it as the model"):
            check_recorded(name, root, "model")


def test_an_embedder_inside_a_store_is_loaded_only_if_the_user_names_it(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "models"
    manifest = replace(MANIFEST, embedder=str(minilm))
    for named in (None, "other/model"):
        with pytest.raises(InvalidInputError, match="a directory inside the store"):
            embedder_of(manifest, root, named)
    monkeypatch.chdir(tmp_path)
    assert embedder_of(manifest, root, "models/my-minilm").embed_query("x").shape == (384,)
    assert absolute_embedder("models/my-minilm") == str(minilm)
