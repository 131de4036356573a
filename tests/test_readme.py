"""The README's examples run, as printed.

Python blocks run in order in one directory, as a reader would paste them. Shell blocks run too, with a
model that can be had offline in place of the one named and the smallest geometry in place of the big
one; ``make`` and ``pip`` lines are what brought this test here.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.early
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "BLENDRAG_EMBEDDER": "minilm-offline"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=280
    )


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each Python example printed, run one after another in one directory."""
    directory = tmp_path_factory.mktemp("python")
    outputs = []
    for number, example in enumerate(blocks("python")):
        script = directory / f"example{number}.py"
        script.write_text(example, encoding="utf-8")
        done = run([sys.executable, str(script)], directory)
        assert done.returncode == 0, f"{example}\n{done.stderr[-2000:]}"
        outputs.append(done.stdout)
    return outputs


def test_python_examples_run_one_after_another(printed: list[str]) -> None:
    assert len(printed) >= 3
    for example, output in zip(blocks("python"), printed, strict=True):
        assert "skating" in output, example  # only a paragraph that says "she" has it


def test_python_example_reuses_tokens(printed: list[str]) -> None:
    reused = re.search(r"(\d+) tokens reused", printed[0])
    assert reused is not None, printed[0]
    assert int(reused[1]) > 0


def shell_commands() -> list[str]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    return [line[2:].split("  #")[0] for line in lines if line.startswith("$ blendrag")]


def test_readme_shows_shell_commands() -> None:
    assert len(shell_commands()) >= 5


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "warranty.md").write_text("# Warranty\n\nThe warranty covers parts for two years.\n")
    (docs / "old.md").write_text("# Old\n\nThis page is about to be removed from the corpus.\n")
    return tmp_path


def test_shell_examples_run_one_after_another(corpus: Path) -> None:
    for command in shell_commands():
        offline = command.replace("Qwen/Qwen2.5-0.5B-Instruct", "demo")
        offline = offline.replace("qwen2.5-0.5b", "tiny").replace(
            "--chunk-tokens 512", "--chunk-tokens 32"
        )
        arguments = [sys.executable, "-m", "blendrag.cli.main", *shlex.split(offline)[1:]]
        done = run(arguments, corpus)
        assert done.returncode == 0, f"{offline}\n{done.stderr[-2000:]}"
        assert done.stdout.strip() or "remove" in offline, offline
