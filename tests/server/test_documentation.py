"""The examples of docs/serving.md run as printed, but for the model, the address and the key."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from blendrag.engine import BlendEngine
from server.live import Live, live

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def open_to_all(demo_engine: BlendEngine):
    with live(demo_engine, keys="editor write\nnone\n") as server:
        yield server


def adapted(text: str, server: Live) -> str:
    return text.replace("http://127.0.0.1:8000", server.url).replace(
        "Qwen/Qwen2.5-0.5B-Instruct", "demo"
    )


def test_the_examples_in_python_run(open_to_all: Live, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        names: dict[str, Any] = {}
        exec(adapted(block, open_to_all), names)
        if llm := names.get("llm"):
            assert str((llm.invoke if hasattr(llm, "invoke") else llm.complete)("Hello"))
    assert ".txt" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_with_curl_run(open_to_all: Live, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("The mill was built of brick in the year 1874.")
    commands = re.findall(r"^\$ (curl (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        if "KEY" not in command:
            command += ' -H "Authorization: Bearer $KEY"'
        made = subprocess.run(
            ["sh", "-c", f"KEY=editor; {adapted(command, open_to_all)} --silent --fail-with-body"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert made.returncode == 0, made.stdout
        assert '"error"' not in made.stdout
