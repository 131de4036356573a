"""A store never decides what code runs: neither by the name of an embedder nor by that of a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from blendrag.errors import InvalidInputError, ModelLoadError
from blendrag.retriever import Embedder, Manifest
from blendrag.retriever.embedder import _packaged_minilm, absolute_embedder, embedder_of
from blendrag.retriever.manifest import check_recorded
from blendrag.retriever.module_types import check_module_types

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Own: pass\n"
MANIFEST = Manifest("m", "sig", "tok", "ns", 512, (1, 2), "<s>\n", "minilm-offline")


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
def test_code_of_an_embedders_directory_is_not_run(tmp_path: Path, recorded: bool) -> None:
    folder = with_modules(tmp_path / "evil", "own_code.Own")
    (folder / "own_code.py").write_text(CODE)
    with pytest.raises(ModelLoadError, match=r"consists of 'own_code.Own', code that it brings"):
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


def test_an_embedder_that_only_the_store_names_has_plain_modules_in_safetensors(
    minilm: Path,
) -> None:
    check_module_types(str(minilm), True, recorded=True)
    assert Embedder(str(minilm), recorded=True).embed(["x"]).shape == (1, 384)
    weights = next(minilm.rglob("model.safetensors"))
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        Embedder(str(minilm), recorded=True).embed(["x"])
    prefix = "sentence_transformers.models."
    words = with_modules(minilm.parent / "words", f"{prefix}WordEmbeddings")
    check_module_types(str(words), True, recorded=False)
    with pytest.raises(ModelLoadError, match="has a module 'WordEmbeddings', expected one of"):
        check_module_types(str(words), True, recorded=True)
    dense = with_modules(minilm.parent / "dense", f"{prefix}Dense")
    (dense / "0_part" / "model.safetensors").touch()
    config = dense / "0_part" / "config.json"
    config.write_text(json.dumps({"activation_function": "torch.nn.modules.activation.Tanh"}))
    check_module_types(str(dense), True, recorded=True)
    config.write_text(json.dumps({"activation_function": "torch.hub.load"}))
    with pytest.raises(ModelLoadError, match="activation outside"):
        check_module_types(str(dense), True, recorded=True)


@pytest.mark.parametrize(
    "content", ["{}", "[1]", "[" * 100_000, '[{"type": "sentence_transformers.x", "path": "../y"}]']
)
def test_a_modules_json_of_something_else_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelLoadError, match=f"embedder '{tmp_path}' has a mod"):
        check_module_types(str(tmp_path), True, recorded=False)


def test_a_name_in_a_store_is_no_path_into_it(
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


def test_an_embedder_inside_a_store_is_loaded_only_where_the_user_names_it(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "models"
    manifest = Manifest(**{**vars(MANIFEST), "embedder": str(minilm)})
    with pytest.raises(InvalidInputError, match="a directory inside the store"):
        embedder_of(manifest, root, None)
    with pytest.raises(InvalidInputError, match="a directory inside the store"):
        embedder_of(manifest, root, "other/model")
    monkeypatch.chdir(tmp_path)
    named = embedder_of(manifest, root, "models/my-minilm")
    assert named.embed_query("x").shape == (384,)
    assert absolute_embedder("models/my-minilm") == str(minilm)
