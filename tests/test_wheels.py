"""The wheels: every package builds, with its licence and nothing else's; blendrag has what the demo needs."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

from blendrag.chat.formats import ORDER
from blendrag.demo import demo_corpus_path, demo_questions, demo_writer_path, handbook_path

ROOT = Path(__file__).resolve().parents[1]
#: Projects → what their wheels install.
PROJECTS = {
    ROOT: "blendrag",
    ROOT / "lab": "blendrag_lab",
    ROOT / "integrations/blendrag-ray": "blendrag_ray",
    ROOT / "integrations/langchain-blendrag": "langchain_blendrag",
    ROOT / "integrations/llama-index-llms-blendrag": "llama_index",
}
LARGEST_WEIGHTS_BYTES = 8 * 10**6
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=PROJECTS, ids=lambda project: project.name)
def wheel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, zipfile.ZipFile]:
    """A project and its wheel, by the hook that ``make wheels`` calls."""
    target = tmp_path_factory.mktemp("wheel")
    with contextlib.chdir(request.param):
        name = build_wheel(str(target))
    return request.param, zipfile.ZipFile(target / name)


def test_wheels_have_their_licence_and_what_the_demo_needs(wheel):
    project, archive = wheel
    sizes = {info.filename: info.file_size for info in archive.infolist()}
    assert any(name.endswith("licenses/LICENSE") for name in sizes)
    assert any(name.endswith("py.typed") for name in sizes)
    (package,) = {name.split("/")[0] for name in sizes if ".dist-info/" not in name}
    assert package == PROJECTS[project]
    assert not any("__pycache__" in name for name in sizes)
    if project != ROOT:
        return
    documents = {f"blendrag/demo/corpus/{path.name}" for path in demo_corpus_path().glob("*.txt")}
    assert documents == {name for name in sizes if name.startswith("blendrag/demo/corpus/")}
    asked = {f"blendrag/demo/corpus/{question.document_id}.txt" for question in demo_questions()}
    assert asked <= documents
    for path in handbook_path().glob("*.md"):
        assert f"blendrag/demo/handbook/{path.name}" in sizes
    for path in demo_writer_path().iterdir():
        assert f"blendrag/demo/writer/{path.name}" in sizes
    for name in (
        "questions.json",
        "handbook_questions.json",
        "model/config.json",
        "model/tokenizer.json",
        "model/tokenizer_config.json",
    ):
        assert f"blendrag/demo/{name}" in sizes
    assert "blendrag/engine/explanation.html.j2" in sizes
    assert {f"blendrag/chat/formats/{name}.json" for name in ORDER} <= set(sizes)
    assert 10**6 < sizes["blendrag/demo/model/model.safetensors"] <= LARGEST_WEIGHTS_BYTES
