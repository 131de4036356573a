"""The GPU round: what becomes of its parts, its page, and the same round on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.commands import invoke_program
from lab.pages.gpu_round import (
    ROOT,
    TESTS,
    PartResult,
    RoundPart,
    main,
    round_page,
    round_parts,
    run_parts,
    work,
)

#: A worker: a part writes its result, unless its name says what becomes of it.
WORKER = """
import json, os, sys, time
folder, *names = sys.argv[1:]
for name in names:
    if name == "hangs":
        time.sleep(600)
    if name == "crashes":
        print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
        os.abort()
    outcome = {"command": name, "seconds": 1.0, "result": {"a": 1}}
    if name == "raises":
        outcome |= {"result": None, "failure": "ValueError: no"}
    with open(f"{folder}/{name}.part", "w") as file:
        json.dump(outcome, file)
    os.rename(f"{folder}/{name}.part", f"{folder}/{name}.json")
    if name == "raises":
        sys.exit(1)
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setattr("lab.pages.gpu_round.START_S", 0.0)
    return []


@pytest.fixture
def start(started: list[list[str]]) -> Callable[..., Any]:
    def start(parts: Sequence[RoundPart], folder: Path) -> Any:
        names = [part.name for part in parts]
        started.append(names)
        with (folder / "worker.log").open("ab") as log:
            command = [sys.executable, "-S", "-c", WORKER, str(folder), *names]
            return subprocess.Popen(command, stderr=log, start_new_session=True)

    return start


def parts_of(*names: str, limit_s: float = 60.0) -> list[RoundPart]:
    return [
        RoundPart(name, 0.5 if name == "hangs" else limit_s, "ttft", {"geometry": "tiny"})
        for name in names
    ]


def test_parts_run_whatever_becomes_of_those_before_them(tmp_path, start, started):
    told: list[str] = []
    parts = parts_of("one", "raises", "two", "crashes", "three", "hangs", "four")
    outcomes = run_parts(parts, tmp_path, 600, start, told.append)
    assert list(outcomes) == [part.name for part in parts]
    assert [name for name, one in outcomes.items() if not one.failure] == [
        "one",
        "two",
        "three",
        "four",
    ]
    assert outcomes["raises"].failure == "ValueError: no"
    assert (
        "its process ended with -6: CUDA error: an illegal memory access"
        in outcomes["crashes"].failure
    )
    assert "took longer than" in outcomes["hangs"].failure
    assert [names[0] for names in started] == ["one", "two", "three", "four"]
    assert len(told) == len(parts)


def test_what_there_is_no_time_for_is_not_begun(tmp_path, start, started):
    outcomes = run_parts(parts_of("one", "two"), tmp_path, 0.0, start, lambda text: None)
    assert {one.failure for one in outcomes.values()} == {"not begun: the time is up"}
    assert started == []


def test_a_page_of_results_and_failures(tmp_path):
    names = ("ttft-2x64-memory", "answer-2x64")
    parts = [part for part in round_parts(False, rounds=1) if part.name in names]
    parts.append(
        RoundPart("ttft-broken", 1.0, "ttft", {"geometry": "tiny", "tier": "nowhere", "chunks": 2})
    )
    work(parts, tmp_path)
    outcomes = {
        part.name: PartResult(**json.loads((tmp_path / f"{part.name}.json").read_bytes()))
        for part in parts
    }
    outcomes[TESTS] = PartResult("python -m pytest -m cuda tests", 1.0, {"passed": 2, "failed": 0})
    parts.append(RoundPart(TESTS, 1.0))
    page = round_page("One machine.", parts, outcomes)
    assert "## Failures" in page
    assert "--tier nowhere" in page
    assert "InvalidInputError: tier 'nowhere' is none of" in page
    assert "2 passed, 0 failed" in page
    assert "| 136 | 0 | memory |" in page
    assert "stock transformers" in page
    assert asdict(outcomes["answer-2x64"])["result"]["new_tokens"] == 3


def test_every_part_has_a_command_of_its_own():
    for on_gpu in (True, False):
        parts = round_parts(on_gpu)
        assert (
            len({part.name for part in parts})
            == len({part.command for part in parts})
            == len(parts)
        )
    commands = [part.command for part in round_parts(True)]
    assert (
        "blendrag bench ttft --geometry llama-8b --chunks 8 --chunk-tokens 4096 --question-tokens 32 "
        "--ratio 0.3 --tier disk --rounds 3" in commands
    )


@pytest.mark.timeout(1800)  # it runs pytest and a bench, each in a process
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_round_without_a_gpu(tmp_path, monkeypatch):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "lab"), str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr("lab.pages.gpu_round.START_S", 3000.0)  # a busy machine takes its time
    monkeypatch.setattr(RoundPart, "group", ("", ""))  # one worker imports torch for both
    given = "--rounds", "1", "--only", "tests,ttft-2x64-memory", "--seconds", "6000"
    done = invoke_program(main, "--out", tmp_path, *given)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "gpu-round.md").read_text(encoding="utf-8")
    assert "Without a GPU" in page
    assert " 0 failed" in page
    found = json.loads((tmp_path / "gpu-round.json").read_bytes())
    assert list(found["parts"]) == ["tests", "ttft-2x64-memory"]
    assert (tmp_path / "gpu-round.png").read_bytes().startswith(b"\x89PNG")
