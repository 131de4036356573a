"""Tests and benches on one GPU, as a page and JSON: ``python -m lab.pages.gpu_round`` (make gpu-round).

Parts with the same model run one after another in a worker process. A part that raises fails alone. If a part
outlasts its limit, or its process ends, as after an invalid access on a GPU, the parts after it run in a new
worker. Without a GPU the same parts run on the CPU, with a tiny model.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter

from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import echo
from blendrag_lab.bench import load_bench
from blendrag_lab.bench.rounds import silent
from blendrag_lab.bench.scratch import scratch
from blendrag_lab.plots import COLOURS, GREY, STYLE, write_png
from blendrag_lab.tables import ResultTable, figure, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from blendrag_lab.bench.answer import AnswerResult
    from blendrag_lab.bench.ttft import TtftResult

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests"
#: What workers print, in their folder.
LOG = "worker.log"
#: Names of the page, the JSON and the figure.
NAME = "gpu-round"
#: What the engine may hold in host memory, and KV of running requests: the defaults are for smaller models.
LIMITS = {"BLENDRAG_RAM_BYTES": "16GiB", "BLENDRAG_BATCH_BYTES": "16GiB"}
#: Seconds between two looks at a worker.
POLL_S = 0.1
#: Seconds that a worker's first part may take in addition: for imports, and to make the model.
START_S = 60.0


@dataclass(frozen=True)
class RoundPart:
    """One bench with its options, or the tests that are marked ``cuda``."""

    name: str
    limit_s: float
    bench: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """What to type for this part alone."""
        if not self.bench:
            return "python -m pytest -m cuda tests"
        words = ["blendrag", "bench", self.bench]
        for name, value in self.options.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join(words)

    @property
    def group(self) -> tuple[str, str]:
        """Parts of one group share a worker and its model."""
        return ("", TESTS) if not self.bench else (self.options.get("geometry", ""), "")


@dataclass
class PartResult:
    command: str
    seconds: float
    result: dict[str, Any] | None = None
    failure: str = ""
    """The last line of what went wrong; empty if nothing did."""


def round_parts(on_gpu: bool, rounds: int = 3) -> list[RoundPart]:
    """The parts, the most important first."""
    if on_gpu:
        model, shapes, question = "llama-8b", ((6, 512), (20, 512), (8, 4096)), 32
        many = {"requests": 8, "new_tokens": 32, "corpus_chunks": 20}
        new_tokens, limit_s = 64, 90.0
    else:
        model, shapes, question = "tiny", ((2, 64), (3, 64), (2, 128)), 8
        many = {"requests": 2, "new_tokens": 3, "corpus_chunks": 3}
        new_tokens, limit_s = 3, 60.0

    def ttft(chunks: int, tokens: int, tier: str) -> RoundPart:
        given = {
            "geometry": model, "chunks": chunks, "chunk_tokens": tokens, "question_tokens": question,
            "ratio": 0.3, "tier": tier, "rounds": rounds,
        }  # fmt: skip
        return RoundPart(f"ttft-{chunks}x{tokens}-{tier}", limit_s, "ttft", given)

    def answer(chunks: int, tokens: int) -> RoundPart:
        given = {
            "geometry": model, "chunks": chunks, "chunk_tokens": tokens, "new_tokens": new_tokens,
            "tier": "memory", "rounds": min(rounds, 2),
        }  # fmt: skip
        return RoundPart(f"answer-{chunks}x{tokens}", limit_s, "answer", given)

    small = {} if on_gpu else {"chunks": 2, "chunk_tokens": 64}
    serve = RoundPart("serve", 2 * limit_s, "serve", {"geometry": model, **many, **small})
    tiny = {} if on_gpu else {"chunks": "2", "chunk_tokens": 8, "policies": "reuse,query"}
    overhead = RoundPart(
        "overhead", limit_s, "overhead", {"geometry": "deep", "rounds": rounds, **tiny}
    )
    prompts = [ttft(*shape, tier) for shape in shapes for tier in ("memory", "disk")]
    short, middle, long = (answer(*shape) for shape in shapes)
    return [RoundPart(TESTS, 2 * limit_s), *prompts, short, serve, middle, long, overhead]


# -- the worker -------------------------------------------------------------------------------------


def work(parts: Sequence[RoundPart], folder: Path) -> None:
    """Run ``parts`` one after another; each leaves ``NAME.json`` in ``folder``."""
    timed: Any = None
    for part in parts:
        began = time.perf_counter()
        outcome = PartResult(part.command, 0.0)
        try:
            if not part.bench:
                outcome.result = run_tests()
            else:
                from blendrag_lab.bench.geometry import TimedModel

                made_by, given = load_bench(part.bench), dict(part.options)
                if "timed" in made_by.groups:
                    timed = timed or TimedModel(given["geometry"])
                    given["timed"] = timed
                    del given["geometry"]
                outcome.result = asdict(made_by.call(**given, tick=silent))
        except BaseException as exc:
            outcome.failure = last_line(exc)
            ends_worker = not isinstance(exc, Exception) or "CUDA error" in str(exc)
        else:
            ends_worker = False
        outcome.seconds = time.perf_counter() - began
        _write(folder / f"{part.name}.json", asdict(outcome))
        if ends_worker:  # what runs next on this device would fail, too
            sys.exit(1)
        _free_memory()


def run_tests() -> dict[str, Any]:
    """Run the tests that are marked ``cuda``; raises ``AssertionError`` if one fails."""
    import pytest

    class Counts:
        def __init__(self) -> None:
            self.by_outcome = {"passed": 0, "failed": 0, "skipped": 0}
            self.failures: list[str] = []

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or (report.when == "setup" and not report.passed):
                self.by_outcome[report.outcome] += 1
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                why = str(crash.message if crash else report.longrepr).strip().splitlines()
                self.failures.append(f"{report.nodeid}: {why[0] if why else report.outcome}")

    counts = Counts()
    marked = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.cuda" in path.read_text(encoding="utf-8")
    ]
    given = ["-q", "-m", "cuda", "-p", "no:cacheprovider", "-W", "ignore", f"--rootdir={ROOT}"]
    status = pytest.main([*given, *marked], plugins=[counts])
    assert not counts.failures, f"{len(counts.failures)} failed: {'; '.join(counts.failures)}"
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), f"{status!r}"
    return counts.by_outcome


def last_line(exc: BaseException) -> str:
    """The last line of a traceback, and where it was raised."""
    lines = [line for line in str(exc).splitlines() if line.strip()]
    at = exc.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = f" ({Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno})" if at else ""
    return f"{type(exc).__name__}: {lines[-1] if lines else ''}{where}"


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write(path: Path, what: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(what, indent=1), encoding="utf-8")
    part.replace(path)


# -- the driver -------------------------------------------------------------------------------------

Start = Callable[[Sequence[RoundPart], Path], "subprocess.Popen[Any]"]


def start_worker(parts: Sequence[RoundPart], folder: Path) -> subprocess.Popen[Any]:
    """A process that runs :func:`work`; what it prints goes to :data:`LOG`."""
    given = json.dumps([asdict(part) for part in parts])
    command = [sys.executable, "-m", "lab.pages.gpu_round", "--out", str(folder), "--worker", given]
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**LIMITS, **os.environ},
            start_new_session=True,
        )


def run_parts(
    parts: Sequence[RoundPart],
    folder: Path,
    seconds: float,
    start: Start,
    tell: Callable[[str], None],
) -> dict[str, PartResult]:
    """Run all ``parts`` within ``seconds``; whatever becomes of one, the others run."""
    began = time.monotonic()
    outcomes: dict[str, PartResult] = {}
    for _, each in groupby(parts, key=lambda part: part.group):
        left = list(each)
        while left:
            left_s = seconds - (time.monotonic() - began)
            if left_s <= 0:
                for part in left:
                    outcomes[part.name] = PartResult(
                        part.command, 0.0, failure="not begun: the time is up"
                    )
                break
            for part, outcome in _watched(left, folder, left_s, start):
                outcomes[part.name] = outcome
                left = left[1:]
                state = outcome.failure or "ok"
                tell(
                    f"{time.monotonic() - began:6.1f} s  {part.name}: {state}, {outcome.seconds:.1f} s"
                )
    return outcomes


def _watched(
    parts: Sequence[RoundPart], folder: Path, left_s: float, start: Start
) -> Iterator[tuple[RoundPart, PartResult]]:
    """The outcomes of one worker, until it ends or is killed; at least one."""
    worker, until = start(parts, folder), time.monotonic() + left_s
    try:
        for number, part in enumerate(parts):
            began = time.monotonic()
            limit_s = part.limit_s + (START_S if number == 0 else 0)
            ends = min(until, began + limit_s)
            path = folder / f"{part.name}.json"
            while not path.exists() and worker.poll() is None and time.monotonic() < ends:
                time.sleep(POLL_S)
            if path.exists():
                yield part, PartResult(**json.loads(path.read_bytes()))
                continue
            took = time.monotonic() - began
            failure = f"took longer than {took:.0f} s"
            if worker.poll() is not None:
                if number and worker.returncode == 1:
                    return  # after a failure that was reported; these parts get a new worker
                failure = f"its process ended with {worker.returncode}: {_log_end(folder)}"
            yield part, PartResult(part.command, took, failure=failure)
            return
    finally:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def _log_end(folder: Path) -> str:
    with suppress(OSError):
        lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


# -- the page ---------------------------------------------------------------------------------------


def round_page(about: str, parts: Sequence[RoundPart], outcomes: dict[str, PartResult]) -> str:
    """The round in Markdown: failures, then a table of each kind."""
    results = {name: _result(name, parts, one) for name, one in outcomes.items() if one.result}
    texts = [f"# GPU round\n\n{about}"]
    failed = {name: one for name, one in outcomes.items() if one.failure}
    if failed:
        lines = [f"- `{one.command}`\n  failed: {one.failure}" for one in failed.values()]
        texts.append("\n".join(["## Failures\n", *lines]))
    if outcomes.get(TESTS) and (found := outcomes[TESTS].result):
        counts = ", ".join(f"{count} {how}" for how, count in found.items())
        texts.append(f"## Tests\n\n`{outcomes[TESTS].command}`: {counts}.")
    of = {name: [r for n, r in results.items() if n.partition("-")[0] == name] for name in TITLES}
    for name, (title, tables) in TITLES.items():
        if of[name]:
            first = next(one for n, one in outcomes.items() if n.partition("-")[0] == name)
            shown = "\n\n".join(each.markdown() for each in tables(of[name]))
            texts.append(f"## {title}\n\n```console\n$ {first.command}\n```\n\n{shown}")
    return "\n\n".join(texts) + "\n"


def _result(name: str, parts: Sequence[RoundPart], outcome: PartResult) -> Any:
    part = next(part for part in parts if part.name == name)
    if not part.bench:
        return outcome.result
    return TypeAdapter(load_bench(part.bench).result).validate_python(outcome.result)


def ttft_tables(results: Sequence[TtftResult]) -> list[ResultTable]:
    """One row for each prompt and tier."""
    rows = []
    for one in results:
        full = one.ms["full"].median
        cells = [f"{one.prompt_tokens:,}", f"{one.kv_bytes / 1e6:,.0f}", one.tier, figure(full)]
        for way in ("prefix_stock", "blend", "reuse"):
            median = one.ms[way].median
            cells.append(f"{figure(median)} ({times(full / median)})")
        rows.append(cells)
    ratio = f"blend, r = {results[0].ratio:.2g}"
    head = ("prompt tokens", "MB of KV", "KV from", "full prefill, ms", "prefix", ratio, "reuse")
    return [ResultTable(head, rows, f"{results[0].model}, {results[0].machine}.")]


def answer_tables(results: Sequence[AnswerResult]) -> list[ResultTable]:
    """One row for each prompt and way."""
    rows = [
        (
            f"{one.prompt_tokens:,}", row.way, figure(row.first_ms.median), figure(row.token_ms),
            figure(row.last_ms.median),
        )
        for one in results
        for row in one.rows
    ]  # fmt: skip
    last = f"{results[0].new_tokens} tokens, ms"
    return [ResultTable(("prompt tokens", "way", "first token, ms", "ms per token", last), rows)]


def bench_tables(name: str) -> Callable[[Sequence[Any]], list[ResultTable]]:
    return lambda results: [load_bench(name).table(one) for one in results]


#: Benches → their titles on the page, and how their results are shown.
TITLES: dict[str, tuple[str, Callable[[Sequence[Any]], list[ResultTable]]]] = {
    "ttft": ("Time to first token", ttft_tables),
    "answer": ("Whole answers", answer_tables),
    "serve": ("Many requests", bench_tables("serve")),
    "overhead": ("Operators and kernel launches", bench_tables("overhead")),
}


def ttft_figure(results: Sequence[TtftResult]) -> Figure:
    """Bars of each prompt and tier: full, blend, reuse."""
    import matplotlib
    from matplotlib.figure import Figure

    ways = (("full", GREY), ("blend", COLOURS[1]), ("reuse", COLOURS[5]))
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(9.0, 3.2), layout="constrained")
        axes = drawn.subplots()
        for number, (way, colour) in enumerate(ways):
            at = [place + 0.27 * (number - 1) for place in range(len(results))]
            bars = axes.bar(
                at, [one.ms[way].median for one in results], 0.25, color=colour, label=way
            )
            axes.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=7)
        names = [f"{one.prompt_tokens:,} tokens\nKV from {one.tier}" for one in results]
        axes.set_xticks(range(len(results)), names)
        axes.set(ylabel="first token after, ms", yscale="log")
        axes.grid(visible=False, axis="x")
        axes.legend(ncols=3, loc="upper left")
    return drawn


# -- the command ------------------------------------------------------------------------------------


def machine() -> str:
    """The device, its driver and the versions, in a sentence."""
    import platform

    import torch
    import transformers

    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )
    if not torch.cuda.is_available():
        return f"Without a GPU, a tiny model on the CPU; {versions}."
    limits = " ".join(f"{name}={value}" for name, value in LIMITS.items())
    properties = torch.cuda.get_device_properties(0)
    driver = ""
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()
        driver = f", driver {found[0]}" if found else ""
    return (
        f"One {properties.name} ({properties.total_memory / 2**30:.0f} GiB{driver}), {os.cpu_count()} CPU "
        f"cores; {versions}. Random weights of the named geometry in bfloat16; {limits}."
    )


@reporting
def main(
    out: Annotated[Path, typer.Option(help="Folder of the page and the JSON.")],
    seconds: Annotated[float, typer.Option(help="Time for all parts together.", min=1)] = 520.0,
    rounds: Annotated[int, typer.Option(help="Rounds of each bench.", min=1)] = 3,
    only: Annotated[str, typer.Option(help="Run only parts that begin with: tests,ttft-6.")] = "",
    worker: Annotated[str, typer.Option(hidden=True)] = "",
) -> int:
    """Run the tests and benches of a machine with one GPU. The status is 1 if a part failed."""
    begin(verbose=False, if_interrupted="the round was abandoned")
    if worker:
        work([RoundPart(**each) for each in json.loads(worker)], out)
        return DONE
    import torch

    began = time.monotonic()
    chosen = tuple(filter(None, only.split(",")))
    parts = [
        part
        for part in round_parts(torch.cuda.is_available(), rounds)
        if not chosen or part.name.startswith(chosen)
    ]
    out.mkdir(parents=True, exist_ok=True)
    with scratch() as folder:
        outcomes = run_parts(parts, folder, seconds, start_worker, echo)
        shutil.copyfile(folder / LOG, out / f"{NAME}.log")
    took_s = time.monotonic() - began
    about = f"{machine()} The round took {took_s:.0f} s."
    found = {name: asdict(outcome) for name, outcome in outcomes.items()}
    _write(out / f"{NAME}.json", {"machine": machine(), "seconds": took_s, "parts": found})
    page = round_page(about, parts, outcomes)
    prompts = [
        _result(name, parts, one)
        for name, one in outcomes.items()
        if name.startswith("ttft") and one.result
    ]
    if prompts:
        with suppress(ImportError):
            write_png(ttft_figure(prompts), out / f"{NAME}.png")
            page += f"\n![Time to first token by prompt and tier.]({NAME}.png)\n"
    (out / f"{NAME}.md").write_text(page, encoding="utf-8")
    for line in page.splitlines():
        echo(line)
    return 1 if any(one.failure for one in outcomes.values()) else DONE


if __name__ == "__main__":
    typer.run(main)
