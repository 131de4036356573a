"""The performance page: regions written from JSON alone, everything else as it was."""

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

from blendrag.errors import InvalidInputError
from blendrag.lab.bench.page import SECTIONS, main, write_page
from blendrag.lab.bench.sweep import FACTORS
from cli.commands import invoke
from lab.bench.lab import SMALL, measured

ROOT = Path(__file__).resolve().parents[3]
MACHINE = {
    "processor": "Abacus 9", "cores": 8, "threads": 4, "dtype": "bfloat16", "torch": "2.99",
    "transformers": "5.99", "blendrag": "0",
}  # fmt: skip
TTFT = {
    "command": "blendrag bench ttft --geometry huge",
    "machine": MACHINE,
    "model": "huge", "dtype": "bfloat16", "device": "cpu", "prompt_tokens": 3104, "ratio": 0.15,
    "charged_ratio": 0.149, "full_ms": 1000.0, "prefix_ms": 500.0, "prefix_stock_ms": 800.0,
    "prefix_fused_ms": 500.0, "reuse_ms": 12.34, "blend_ms": 250.0, "speedup": 4.0,
    "reuse_speedup": 81.0, "prefix_speedup": 2.0, "floor_speedup": 5.91, "kv_bytes": 37_700_000,
    "peak_bytes": {"full": 469_000_000, "prefix_stock": None, "prefix_fused": 1, "reuse": 1, "blend": 1},
    "spread_ms": {
        "full": [900.0, 2100.0], "prefix_stock": [1, 2], "prefix_fused": [1, 2], "reuse": [11, 13],
        "blend": [240, 260],
    },
    "policy": "query", "schedule": "constant", "rounds": 3, "threads": 4, "tier": "disk",
    "encoding": "native",
}  # fmt: skip
COMMANDS = {
    "ttft": ("ttft", *SMALL),
    "sweep-tier": ("sweep", *SMALL, "--factor", "tier", "--values", "memory,disk"),
    "trace": ("trace", *SMALL),
    "throughput": ("throughput", *SMALL, "--batch-size", "1,2"),
    "load": (
        "load", "--geometry", "tiny", "--chunks", "2", "--chunk-tokens", "16", "--question-tokens", "4",
        "--requests", "3", "--warm-requests", "1", "--corpus-chunks", "5", "--store-chunks", "4",
    ),
    "auto": ("auto", *SMALL, "--tiers", "memory,disk", "--ratios", "0.5"),
}  # fmt: skip


def region(name: str, text: str = "Not measured yet.") -> str:
    return f"<!-- bench:{name} -->\n\n{text}\n\n<!-- /bench:{name} -->\n"


def page_of(folder: Path, *names: str) -> Path:
    """``docs`` with a page of these regions, and prose round them."""
    docs = folder / "docs"
    docs.mkdir()
    parts = [
        "# Performance\n",
        *(f"About {name}.\n\n{region(name)}" for name in names),
        "The end.\n",
    ]
    (docs / "performance.md").write_text("\n".join(parts), encoding="utf-8")
    return docs


def text_of(docs: Path, name: str) -> str:
    """What stands in a region."""
    page = (docs / "performance.md").read_text(encoding="utf-8")
    return page.partition(f"<!-- bench:{name} -->")[2].partition(f"<!-- /bench:{name} -->")[0]


def cells(text: str, first: str) -> list[str]:
    """Of the table row that begins so."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return next(row for row in rows if row[0].startswith(first))


def write(folder: Path, name: str, fields: object) -> Path:
    path = folder / f"{name}.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields), encoding="utf-8")
    return path


# -- what is written --------------------------------------------------------------------------------


def test_a_table_has_medians_with_their_spread_and_what_they_were_measured_on(
    tmp_path: Path,
) -> None:
    docs = page_of(tmp_path, "ttft")
    write(tmp_path, "ttft", TTFT)
    assert write_page(docs, tmp_path) == ["ttft"]
    text = text_of(docs, "ttft")
    assert "```console\n$ blendrag bench ttft --geometry huge\n```" in text
    assert cells(text, "full") == ["full: stock prefill", "1,000 (900 to 2,100)", "1.00×", "469"]
    assert cells(text, "prefix:")[1:] == ["800 (1.00 to 2.00)", "1.25×", "–"]
    assert cells(text, "blend") == [
        "blend, r = 0.15 (charged 0.149)", "250 (240 to 260)", "4.00× (floor 5.91×)", "0",
    ]  # fmt: skip
    assert cells(text, "reuse")[1:3] == ["12.3 (11.0 to 13.0)", "81.04×"]
    for said in (
        "3,104 tokens", "`query`", "37.7 MB", "3 rounds", "bfloat16 on Abacus 9", "4 of 8 CPU cores",
        "torch 2.99", "transformers 5.99",
    ):  # fmt: skip
        assert said in text
    assert "Not measured yet" not in text


def test_everything_outside_of_a_region_with_a_file_stays_as_it_was(tmp_path: Path) -> None:
    docs = page_of(tmp_path, "auto", "ttft", "sweep-chunks")
    before = (docs / "performance.md").read_text(encoding="utf-8")
    write(tmp_path, "ttft", TTFT)
    write(tmp_path, "load-of-another-kind", "no JSON")
    write_page(docs, tmp_path)
    after = (docs / "performance.md").read_text(encoding="utf-8")
    begin, end = "<!-- bench:ttft -->", "<!-- /bench:ttft -->"
    assert before.partition(begin)[0] == after.partition(begin)[0]
    assert before.partition(end)[2] == after.partition(end)[2]


def test_one_bench_may_have_several_regions(tmp_path: Path) -> None:
    docs = page_of(tmp_path, "ttft", "ttft-fast")
    write(tmp_path, "ttft", TTFT)
    write(tmp_path, "ttft-fast", {**TTFT, "full_ms": 2000.0})
    assert write_page(docs, tmp_path) == ["ttft", "ttft-fast"]
    assert cells(text_of(docs, "ttft"), "blend")[2].startswith("4.00×")
    assert cells(text_of(docs, "ttft-fast"), "blend")[2].startswith("8.00×")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of every bench, as it printed it."""
    folder = tmp_path_factory.mktemp("results")
    for name, command in COMMANDS.items():
        write(folder, name, measured(*command))
    return folder


def test_every_bench_prints_all_that_its_region_needs(results: Path, tmp_path: Path) -> None:
    docs = page_of(tmp_path, *COMMANDS)
    assert write_page(docs, results) == list(COMMANDS)
    for name, command in COMMANDS.items():
        text, fields = text_of(docs, name), json.loads((results / f"{name}.json").read_text())
        assert f"$ blendrag bench {command[0]} --geometry tiny " in text
        assert "\n| --- |" in text
        assert f"torch {fields['machine']['torch']}, transformers" in text
        assert f"{fields['machine']['dtype']} on {fields['machine']['processor']}" in text
        drawn = name.partition("-")[0] in ("sweep", "load", "trace")
        assert (f"](performance/{name}.png)" in text) == drawn
        picture = docs / "performance" / f"{name}.png"
        assert picture.is_file() == drawn
        assert not drawn or picture.read_bytes().startswith(b"\x89PNG")


def test_the_numbers_of_every_bench_are_in_its_table(results: Path, tmp_path: Path) -> None:
    docs = page_of(tmp_path, *COMMANDS)
    write_page(docs, results)
    made: dict[str, Any] = {
        name: json.loads((results / f"{name}.json").read_text()) for name in COMMANDS
    }
    sweep = text_of(docs, "sweep-tier")
    for row in made["sweep-tier"]["rows"]:
        assert f"{row['speedup']:.2f}×" in cells(sweep, row["value"])[4]
    for row in made["throughput"]["rows"]:
        shown = cells(text_of(docs, "throughput"), str(row["batch_size"]))
        assert any(f", {row['over_alone']:.2f}×" in cell for cell in shown)
    assert f"**{made['trace']['overlap']:.2f}**" in text_of(docs, "trace")
    for way in made["load"]["ways"]:
        assert cells(text_of(docs, "load"), way["way"])[2] == f"{way['reused']:.0%}"
    for tier in made["auto"]["tiers"]:
        assert cells(text_of(docs, "auto"), tier["tier"])[1] == f"{tier['relative']:.2f}"


def test_a_context_is_a_limit_beside_the_tokens_that_were_measured(
    results: Path, tmp_path: Path
) -> None:
    docs = page_of(tmp_path, "sweep-context")
    made = json.loads((results / "sweep-tier.json").read_text())
    (row, *_) = made["rows"]
    row |= {"factor": "context", "value": "1024", "prompt_tokens": 544}
    write(tmp_path, "sweep-context", {**made, "factor": "context", "rows": [row]})
    write_page(docs, tmp_path)
    text = text_of(docs, "sweep-context")
    assert cells(text, "context")[:2] == ["context", "tokens"]
    assert cells(text, "≤")[:2] == ["≤ 1024", "544"]


def test_a_load_says_throughput_beside_ttft_by_rate(results: Path, tmp_path: Path) -> None:
    docs = page_of(tmp_path, "load")
    write_page(docs, results)
    rows = json.loads((results / "load.json").read_text())["rows"]
    for row in rows:
        shown = cells(text_of(docs, "load"), f"{row['requests_per_s']:.3g}")[1:]
        assert any(cell.endswith(f", {row['throughput_per_s']:.3g}/s") for cell in shown)
    assert "first tokens per second" in text_of(docs, "load")


def test_a_trace_says_its_bound_and_how_near_the_request_is_to_it(tmp_path: Path) -> None:
    docs = page_of(tmp_path, "trace")
    made = measured(*COMMANDS["trace"])
    made |= {"wall_ms": 500.0, "load_ms": 400.0, "compute_ms": 300.0}
    older = {name: value for name, value in made.items() if not name.startswith("bound")}
    for fields in (made, older):
        write(tmp_path, "trace", fields)
        write_page(docs, tmp_path)
        assert cells(text_of(docs, "trace"), "bound")[1] == "400"
        assert "Bound over request **0.80**" in text_of(docs, "trace")


def test_equal_files_give_an_equal_page(results: Path, tmp_path: Path) -> None:
    docs = page_of(tmp_path, *COMMANDS)

    def made() -> dict[str, bytes]:
        write_page(docs, results)
        return {path.name: path.read_bytes() for path in docs.rglob("*.*")}

    assert made() == made()


def test_a_sweep_may_be_named_by_its_factor_alone(results: Path, tmp_path: Path) -> None:
    docs = page_of(tmp_path, "sweep-tier")
    write(tmp_path, "tier", (results / "sweep-tier.json").read_text())
    assert write_page(docs, tmp_path) == ["sweep-tier"]


# -- the command line in the JSON -------------------------------------------------------------------


def test_the_json_has_the_options_given_but_not_where_results_go(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    fields = measured(
        "trace", *SMALL, "--out", str(out), "--tier", "disk", "--policy", "boundary(4)"
    )
    expected = [*SMALL[:-2], "--policy", "boundary(4)", "--rounds", "1", "--tier", "disk"]
    assert fields["command"] == shlex.join(["blendrag", "bench", "trace", *expected])
    again = invoke(*shlex.split(fields["command"])[1:], "--json")
    assert again.exit_code == 0


# -- what cannot be written -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [("ttft", "{broken", "cannot be read (no JSON)"),
     ("ttft", "[]", "has the command None"),
     ("ttft", {}, "has the command None"),
     ("ttft", {**TTFT, "command": "blendrag bench load"}, "has the command 'blendrag bench load'"),
     ("ttft", {**TTFT, "full_ms": "soon"}, "is not complete (full_ms: "),
     ("ttft", {k: v for k, v in TTFT.items() if k != "blend_ms"}, "is not complete (blend_ms: "),
     ("ttft", {**TTFT, "machine": None}, "is not complete (machine: "),
     ("ttft", {**TTFT, "spread_ms": {}}, "is not complete (KeyError('full'))"),
     ("ttft", {**TTFT, "blend_ms": 0.0}, "is not complete (ZeroDivisionError"),
     ("trace", {"traceEvents": [], "otherData": {}}, "expected what blendrag bench trace --json prints")],
)  # fmt: skip
def test_a_file_that_is_no_whole_result_is_one_sentence_and_the_page_stays(
    name: str, fields: object, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = page_of(tmp_path, name)
    before = (docs / "performance.md").read_bytes()
    write(tmp_path, name, fields)
    with pytest.raises(SystemExit) as left:
        main(["--from", str(tmp_path), "--out", str(docs)])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / name}.json ")
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert (docs / "performance.md").read_bytes() == before


def test_a_sweep_over_another_factor_is_refused(results: Path, tmp_path: Path) -> None:
    docs = page_of(tmp_path, "sweep-ratio")
    write(tmp_path, "sweep-ratio", (results / "sweep-tier.json").read_text())
    with pytest.raises(InvalidInputError, match="is a sweep over tier, expected one over ratio"):
        write_page(docs, tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("<!-- bench:ttft -->\n", "does not close it"),
     (region("speed"), "a name that starts with one of ttft, sweep"),
     ("nothing", "has no result"),
     (None, "cannot be read")],
)  # fmt: skip
def test_a_page_without_its_regions_is_one_sentence(
    text: str | None, sentence: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "performance.md").write_text(text, encoding="utf-8")
    write(tmp_path, "ttft", TTFT)
    with pytest.raises(InvalidInputError, match=sentence):
        write_page(tmp_path, tmp_path)


# -- this repository --------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_what_make_measures_takes_the_further_arguments_it_is_given() -> None:
    further = {
        "BENCH_ARGS": "--rounds 3 --ratio 0.2 --tier disk",
        "LOAD_ARGS": "--requests 20",
        "AUTO_ARGS": "--rounds 3 --min-ratio 0.2",
        "OVERHEAD_ARGS": "--rounds 3",
    }
    planned = subprocess.run(
        ["make", "-n", "bench-all", *(f"{name}={args}" for name, args in further.items())],
        cwd=ROOT, env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    commands = re.findall(r"/blendrag (bench .*?) --json >", planned.stdout.replace("\\\n", " "))
    assert {command.split()[1] for command in commands} == set(SECTIONS)
    for command in commands:
        own = {"load": "LOAD_ARGS", "auto": "AUTO_ARGS", "overhead": "OVERHEAD_ARGS"}
        named = own.get(command.split()[1], "BENCH_ARGS")
        assert command.endswith(f" {further[named]}")
        typed = command.replace("$on", "").replace("$factor", "ratio")  # of the loop over factors
        shown = invoke(*shlex.split(typed), "--help")
        assert shown.exit_code == 0, shown.stderr


def test_make_times_a_compiled_prefill_of_its_own() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (compiled,) = re.findall(r"\$\(call measure,ttft-compiled,(.*)\)", makefile)
    assert "--compiled" in compiled


def test_what_make_measures_has_a_region_in_the_page() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    made = set(re.findall(r"\$\(call measure,([a-z-]+),", makefile))
    factors = re.search(r"^FACTORS +\?= (.*)$", makefile, re.MULTILINE)
    assert factors is not None
    assert set(factors[1].split()) == set(FACTORS)
    named = {name for name in made if not name.startswith("sweep-")} | {
        f"sweep-{f}" for f in FACTORS
    }
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    regions = set(re.findall(r"^<!-- bench:(\S+) -->$", page, re.MULTILINE))
    assert regions == named
    assert {name.partition("-")[0] for name in regions} == set(SECTIONS)
