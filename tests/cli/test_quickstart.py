"""Every command of the quick start works as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from blendrag.demo import demo_model_path
from cli.commands import invoke

ROOT = Path(__file__).resolve().parents[2]


def commands() -> list[list[str]]:
    """The ``blendrag`` commands of the page, in order."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    return [shlex.split(line)[1:] for line in re.findall(r"(?m)^\$ (blendrag .*)$", page)]


@pytest.mark.skipif(
    not (demo_model_path() / "config.json").is_file(), reason="the demo model is not trained here"
)
def test_every_command_of_the_quick_start_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").symlink_to(ROOT / "src")
    monkeypatch.chdir(tmp_path)
    assert len(commands()) >= 6
    for args in commands():
        result = invoke(*args)
        assert result.exit_code == 0, (args, result.stderr)
