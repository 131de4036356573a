"""The examples of README.md run as printed.

Python blocks run in order in one directory, as a reader would paste them. Shell commands run too, with an
offline model and the smallest geometry instead of the named ones; ``make`` and ``pip`` lines are left out.
"""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from blendrag.store.encodings import stored_chunk_bytes
from blendrag.store.kv import KVLayout, LayerShape
from cli.commands import invoke

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def shell_commands() -> list[list[str]]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    commands = [line[2:].split("  #")[0] for line in lines if line.startswith("$ blendrag")]
    offline = {
        "Qwen/Qwen2.5-0.5B-Instruct": "demo",
        "qwen2.5-0.5b": "tiny",
        "--chunk-tokens 512": "--chunk-tokens 32",
    }
    for name, other in offline.items():
        commands = [command.replace(name, other) for command in commands]
    return [shlex.split(command)[1:] for command in commands]


def test_python_examples_run_one_after_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    examples = blocks("python")
    assert len(examples) >= 3
    for number, example in enumerate(examples):
        script = tmp_path / f"example{number}.py"
        script.write_text(example, encoding="utf-8")
        runpy.run_path(str(script))
        printed = capsys.readouterr().out
        assert "skating" in printed, example  # only a paragraph that says "she" has it
        reused = re.search(r"(\d+) tokens reused", printed)
        assert reused is None or int(reused[1]) > 0
        assert reused or number > 0


def test_shell_examples_run_one_after_another(tmp_path, monkeypatch):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "warranty.md").write_text("# Warranty\n\nThe warranty covers parts for two years.\n")
    (docs / "old.md").write_text("# Old\n\nThis page is about to be removed from the corpus.\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BLENDRAG_EMBEDDER", "minilm-offline")
    assert len(shell_commands()) >= 4
    for command in shell_commands():
        result = invoke(*command)
        assert result.exit_code == 0, (command, result.stderr)
        assert result.stdout.strip(), command


def test_sizes_of_kv_are_those_that_a_store_takes():
    rows = re.findall(
        r"^\| .* \| (\d+) × (\d+) × (\d+) \| (\S+) KiB \| (\S+) KiB \| (\S+) GiB", README, re.M
    )
    assert len(rows) >= 5
    for layers, heads, width, *sizes in rows:
        shapes = (LayerShape(int(heads), int(width)),) * int(layers)
        native, int8 = (
            stored_chunk_bytes(KVLayout(shapes, "bfloat16", encoding), 512) / 512 / 1024
            for encoding in ("native", "int8")
        )
        expected = (native, int8, native * 200_000 / 1024**2)
        assert [float(size) for size in sizes] == pytest.approx(expected, rel=0.03)


def test_files_that_the_readme_names_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / link).exists(), link
