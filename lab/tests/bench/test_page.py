"""docs/performance.md: regions are written from JSON, and nothing else changes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from blendrag.errors import InvalidInputError
from cli.commands import invoke, invoke_program
from lab.pages.bench_page import PAGE_BENCHES, main, write_page
from lab.tests.bench.small import COMMANDS, printed

ROOT = Path(__file__).resolve().parents[3]
#: Benches whose results are in docs/performance.md.
SHOWN = {"answer", "ttft", "overhead", "schema", "attention", "serve", "newcomer", "remote"}


def timing(median: float, low: float, high: float) -> dict[str, float]:
    return {"median": median, "low": low, "high": high}


TTFT: dict[str, Any] = {
    "command": "blendrag bench ttft --geometry huge",
    "machine": "bfloat16 on Abacus 9",
    "model": "huge", "prompt_tokens": 3104, "ratio": 0.15, "charged_ratio": 0.149,
    "ms": {
        "full": timing(1000.0, 900.0, 2100.0), "prefix_stock": timing(800.0, 1, 2),
        "prefix_fused": timing(500.0, 1, 2), "reuse": timing(12.34, 11, 13), "blend": timing(250.0, 240, 260),
    },
    "speedup": 4.0, "floor_speedup": 5.91, "kv_bytes": 37_700_000, "state_bytes": 0,
    "peak_bytes": {"full": 469_000_000, "prefix_stock": None, "prefix_fused": 1, "reuse": 1, "blend": 1},
    "policy": "query", "schedule": "constant", "rounds": 3, "tier": "disk", "encoding": "native",
}  # fmt: skip


def region(name: str, text: str = "Not measured yet.") -> str:
    return f"<!-- bench:{name} -->\n\n{text}\n\n<!-- /bench:{name} -->\n"


def page_of(folder: Path, *names: str) -> Path:
    """``docs`` with a page of these regions and prose around them."""
    docs = folder / "docs"
    docs.mkdir()
    parts = [f"About {name}.\n\n{region(name)}" for name in names]
    text = "\n".join(["# Performance\n", *parts, "The end.\n"])
    (docs / "performance.md").write_text(text, encoding="utf-8")
    return docs


def text_of(docs: Path, name: str) -> str:
    """The text of a region."""
    page = (docs / "performance.md").read_text(encoding="utf-8")
    return page.partition(f"<!-- bench:{name} -->")[2].partition(f"<!-- /bench:{name} -->")[0]


def write(folder: Path, name: str, fields: object) -> None:
    text = fields if isinstance(fields, str) else json.dumps(fields)
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of every bench, written from what the benches print."""
    folder = tmp_path_factory.mktemp("page")
    docs = page_of(folder, *COMMANDS)
    for name in COMMANDS:
        write(folder, name, printed(name))
    assert write_page(docs, folder) == list(COMMANDS)
    return docs


def test_a_region_has_the_command_the_table_and_the_machine(tmp_path):
    docs = page_of(tmp_path, "overhead", "ttft", "ttft-fast")
    before = (docs / "performance.md").read_text(encoding="utf-8")
    write(tmp_path, "ttft", TTFT)
    write(tmp_path, "ttft-fast", {**TTFT, "floor_speedup": 9.0})
    write(tmp_path, "overhead-of-another-kind", "no JSON")
    assert write_page(docs, tmp_path) == ["ttft", "ttft-fast"]
    text = text_of(docs, "ttft")
    for said in (
        "```console\n$ blendrag bench ttft --geometry huge\n```",
        "3,104 tokens, 37.7 MB of KV: huge, policy query at r = 0.15, schedule constant, native KV from disk",
        "3 rounds", "bfloat16 on Abacus 9.",
        "| full: stock prefill | 1,000 (900 to 2,100) | 1.00× | 469 |",
        "| prefix: first chunk cached, stock cache | 800 (1.00 to 2.00) | 1.25× | – |",
        "| blend, r = 0.15 (charged 0.149) | 250 (240 to 260) | 4.00× (floor 5.91×) | 0 |",
        "| reuse | 12.3 (11.0 to 13.0) | 81.04× | 0 |",
    ):  # fmt: skip
        assert said in text
    assert "4.00× (floor 9.00×)" in text_of(docs, "ttft-fast")
    after = (docs / "performance.md").read_text(encoding="utf-8")
    end = "<!-- /bench:ttft-fast -->"
    assert before.partition("<!-- bench:ttft -->")[0] == after.partition("<!-- bench:ttft -->")[0]
    assert before.partition(end)[2] == after.partition(end)[2]


def test_every_bench_prints_what_its_region_needs(whole):
    for name, command in COMMANDS.items():
        text = text_of(whole, name)
        assert f"$ blendrag bench {command[0]} " in text
        assert "\n| --- |" in text
        assert f" CPU cores; torch {torch.__version__}, transformers" in text


def test_the_numbers_of_a_bench_are_in_its_table(whole):
    for row in printed("overhead")["rows"]:
        cells = f"| {row['operators']:,} | {row['over_stock']:.2f}× |"
        assert cells in text_of(whole, "overhead")


def test_equal_files_give_an_equal_page(whole):
    before = {path.name: path.read_bytes() for path in whole.rglob("*.*")}
    write_page(whole, whole.parent)
    assert {path.name: path.read_bytes() for path in whole.rglob("*.*")} == before


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [("{broken", "Expecting property name"), ("[]", "list indices"), ({}, "'command'"),
     ({**TTFT, "command": "blendrag bench serve"}, "command 'blendrag bench serve'"),
     ({**TTFT, "speedup": "soon"}, "speedup"),
     ({k: v for k, v in TTFT.items() if k != "ms"}, "ms"),
     ({**TTFT, "machine": None}, "machine"),
     ({**TTFT, "ms": {**TTFT["ms"], "blend": timing(0, 0, 0)}}, "division by zero")],
)  # fmt: skip
def test_an_incomplete_result_is_refused_in_one_sentence_and_the_page_stays(
    fields, sentence, tmp_path
):
    docs = page_of(tmp_path, "ttft")
    before = (docs / "performance.md").read_bytes()
    write(tmp_path, "ttft", fields)
    ended = invoke_program(main, "--from", tmp_path, "--out", docs)
    assert ended.exit_code == 2
    said = ended.stderr
    assert said.startswith(f"error: {tmp_path / 'ttft'}.json is not a complete result (")
    assert sentence in said
    assert "expected what blendrag bench ttft --json prints" in said
    assert len(said.splitlines()) == 1
    assert (docs / "performance.md").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(region("speed"), "a name that starts with one of ttft, answer"),
     ("nothing", "has no result"),
     (None, "cannot be read")],
)  # fmt: skip
def test_a_page_with_bad_regions_is_refused_in_one_sentence(text, sentence, tmp_path):
    if text is not None:
        (tmp_path / "performance.md").write_text(text, encoding="utf-8")
    write(tmp_path, "ttft", TTFT)
    with pytest.raises(InvalidInputError, match=sentence):
        write_page(tmp_path, tmp_path)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_passes_further_arguments_to_every_bench():
    further = {
        "BENCH_ARGS": "--rounds 3 --ratio 0.2 --tier disk",
        "ANSWER_ARGS": "--new-tokens 8",
        "OVERHEAD_ARGS": "--rounds 3",
        "ATTENTION_ARGS": "--own-tokens 16",
        "SERVE_ARGS": "--requests 8",
        "NEWCOMER_ARGS": "--running 1",
        "REMOTE_ARGS": "--latency-ms 5",
    }
    planned = subprocess.run(
        [
            "make", "-n", "bench-all", "MODELS=models/one", "GGUFS=models",
            *(f"{name}={args}" for name, args in further.items()),
        ],
        cwd=ROOT, env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    commands = re.findall(r"/blendrag (bench .*?) --json >", planned.stdout.replace("\\\n", " "))
    assert {command.split()[1] for command in commands} == SHOWN
    for command in commands:
        named = f"{command.split()[1].upper()}_ARGS"
        named = named if named in further else "BENCH_ARGS"
        assert command.endswith(f" {further[named]}")
        typed = command.replace("$with", "")  # of the loop over models
        shown = invoke(*shlex.split(typed), "--help")
        assert shown.exit_code == 0, shown.stderr


def test_every_result_of_make_has_a_region_in_the_page():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    made = set(re.findall(r"\$\(call measure,([a-z]+)[,-]", makefile))
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    regions = set(re.findall(r"^<!-- bench:(\S+) -->$", page, re.MULTILINE))
    assert {name.partition("-")[0] for name in regions} == made == SHOWN
    assert set(PAGE_BENCHES) > SHOWN
