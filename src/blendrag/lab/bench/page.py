"""Writes the tables and figures of docs/performance.md: ``python -m blendrag.lab.bench.page`` (make bench).

Region ``NAME`` of the page is written from ``NAME.json``, which ``blendrag bench … --json`` printed. A region
without such a file does not change. NAME starts with the bench: ``ttft``, ``ttft-compiled``,
``sweep-chunks``. Equal files give an equal page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from blendrag.cli.plots import require_matplotlib
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.lab import plots
from blendrag.lab.bench import page_tables
from blendrag.lab.bench.auto_results import AutoResult
from blendrag.lab.bench.load import LoadResult
from blendrag.lab.bench.machine import Machine
from blendrag.lab.bench.overhead import OverheadResult
from blendrag.lab.bench.sweep import FACTORS, SweepResult
from blendrag.lab.bench.throughput_results import ThroughputResult
from blendrag.lab.bench.trace import TraceResult
from blendrag.lab.bench.ttft_results import TtftResult
from blendrag.lab.pages import console, picture, regions_of, write_regions

PAGE = "performance.md"


@dataclass(frozen=True)
class Section:
    """How the results of one bench are read and shown."""

    result: Any
    """Type of what the bench prints, besides its command and the machine."""
    text: Callable[[Any], str]
    figure: Callable[[Any], Any] | None = None
    caption: str = ""


SECTIONS = {
    "ttft": Section(TtftResult, page_tables.ttft),
    "sweep": Section(
        SweepResult, page_tables.sweep, plots.sweep_figure, "Time to first token by the factor's value"
    ),
    "trace": Section(
        TraceResult, page_tables.trace, plots.trace_figure, "The request's timeline"
    ),
    "throughput": Section(ThroughputResult, page_tables.throughput),
    "load": Section(
        LoadResult, page_tables.load, plots.load_figure, "Time to first token by request rate"
    ),
    "auto": Section(AutoResult, page_tables.auto),
    "overhead": Section(OverheadResult, page_tables.overhead),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One JSON file: the result, the command that made it, and the machine it ran on."""

    path: Path
    bench: str
    command: str
    machine: Machine
    result: Any


def write_page(directory: Path, source: Path) -> list[str]:
    """Write the regions whose files are in ``source``, and return their names.

    Raises :class:`InvalidInputError`; then the page does not change.
    """
    page = directory / PAGE
    found: dict[str, Measured] = {}
    for name in regions_of(page):
        if name.partition("-")[0] not in SECTIONS:
            raise InvalidInputError(
                f"{page} has a region bench:{name}, expected a name that starts with one of "
                f"{', '.join(SECTIONS)}; rename it"
            )
        path = _file_of(name, source)
        if path is not None:
            found[name] = _measured(name, path)
    if not found:
        raise InvalidInputError(
            f"{source} has no result for {page}, expected files such as ttft.json and sweep-ratio.json; "
            "make them with make bench or make bench-all"
        )
    write_regions(page, {name: _text(page, name, each) for name, each in found.items()})
    return list(found)


def _file_of(name: str, source: Path) -> Path | None:
    """The file of a region; a sweep's file may have the name of its factor alone."""
    bench, _, rest = name.partition("-")
    stems = [name, rest] if bench == "sweep" and rest in FACTORS else [name]
    return next((path for s in stems if (path := source / f"{s}.json").is_file()), None)


def _measured(name: str, path: Path) -> Measured:
    """Raises :class:`InvalidInputError` if ``path`` is not a complete result for region ``name``."""
    bench, _, rest = name.partition("-")
    expected = (
        f"expected what blendrag bench {bench} --json prints; measure again, or remove {path.name}"
    )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "no JSON"
        raise InvalidInputError(f"{path} cannot be read ({reason}), {expected}") from exc
    command = fields.get("command") if isinstance(fields, dict) else None
    if not isinstance(command, str) or command.split()[:3] != ["blendrag", "bench", bench]:
        raise InvalidInputError(f"{path} has the command {command!r}, {expected}")
    try:
        machine = TypeAdapter(Machine).validate_python(fields.get("machine"))
        result = TypeAdapter(SECTIONS[bench].result).validate_python(fields)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"])) or "machine"
        raise InvalidInputError(
            f"{path} is not complete ({where}: {first['msg']}), {expected}"
        ) from exc
    if (
        isinstance(result, SweepResult)
        and rest.partition("-")[0] != result.factor.partition("-")[0]
    ):
        raise InvalidInputError(
            f"{path} is a sweep over {result.factor}, expected one over {rest}; rename it to "
            f"sweep-{result.factor}.json"
        )
    return Measured(path, bench, command, machine, result)


def _text(page: Path, name: str, measured: Measured) -> str:
    """The text of a region; writes its figure.

    Raises :class:`InvalidInputError` for a result whose parts contradict each other.
    """
    section = SECTIONS[measured.bench]
    try:
        parts = [console([measured.command]), section.text(measured.result), _conditions(measured)]
        if section.figure is not None:
            drawn = section.figure(measured.result)
            parts.append(picture(drawn, page, name, section.caption))
    except (LookupError, ArithmeticError, ValueError) as exc:
        raise InvalidInputError(
            f"{measured.path} is not complete ({exc!r}), expected all that blendrag bench "
            f"{measured.bench} --json prints; measure again"
        ) from exc
    return "\n\n".join(parts)


def _conditions(measured: Measured) -> str:
    m = measured.machine
    return (
        f"{m.dtype} on {m.processor}, {m.threads} of {m.cores} CPU cores; torch {m.torch}, transformers "
        f"{m.transformers}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status 2 and one sentence for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m blendrag.lab.bench.page",
        description="Write the results of blendrag bench to docs/performance.md, with figures.",
    )
    parser.add_argument(
        "--from", dest="source", type=Path, default=Path("build/bench"), help="folder of the JSON files"
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the page")
    args = parser.parse_args(arguments)
    try:
        require_matplotlib("the page")
        names = write_page(args.out, args.source)
    except BlendragError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    sys.stderr.write(f"wrote {', '.join(names)} into {args.out / PAGE}\n")


if __name__ == "__main__":
    main()
