"""What is shipped: the wheel carries the demo's weights and corpus, and every package builds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from blendrag.demo import demo_corpus_path, demo_model_path, demo_questions

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [ROOT, *sorted(p.parent for p in ROOT.glob("integrations/*/pyproject.toml"))]
LARGEST_WEIGHTS_BYTES = 8 * 10**6


def build(project: Path, target: Path) -> zipfile.ZipFile:
    """The project's wheel, built as ``make wheels`` does."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target]
    done = subprocess.run(
        [*map(str, command), str(project)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_every_package_builds_with_its_licence(project: Path, tmp_path: Path) -> None:
    names = build(project, tmp_path).namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("__pycache__" in name or name.startswith("tests") for name in names)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_demo_corpus_and_its_questions(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert "blendrag/demo/questions.json" in names
    assert "blendrag/py.typed" in names
    documents = {question.document_id for question in demo_questions()}
    assert {f"blendrag/demo/corpus/{name}.txt" for name in documents} <= names
    assert len(list(demo_corpus_path().glob("*.txt"))) == sum(
        name.startswith("blendrag/demo/corpus/") and name.endswith(".txt") for name in names
    )


@pytest.mark.skipif(
    not (demo_model_path() / "config.json").is_file(), reason="the demo model is not trained here"
)
def test_the_wheel_has_the_demo_weights(wheel: zipfile.ZipFile) -> None:
    sizes = {info.filename: info.file_size for info in wheel.infolist()}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert f"blendrag/demo/model/{name}" in sizes
    weights = sizes["blendrag/demo/model/model.safetensors"]
    assert 10**6 < weights <= LARGEST_WEIGHTS_BYTES
