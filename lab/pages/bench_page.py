"""Writes the tables and figures of docs/performance.md: ``python -m lab.pages.bench_page`` (make bench).

Region ``NAME`` of the page is written from ``NAME.json``, which ``blendrag bench … --json`` printed. A region
without such a file does not change. NAME starts with the bench: ``ttft``,
``answer-smollm2-135m``. Equal files give an equal page.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import TypeAdapter

from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import say
from blendrag.errors import InvalidInputError
from blendrag_lab.bench import SUMMARIES, load_bench
from lab.pages.regions import console, picture, regions_of, write_regions

if TYPE_CHECKING:
    from blendrag_lab.bench.options import Bench

PAGE = "performance.md"

#: Benches whose results the page shows.
PAGE_BENCHES = [name for name in SUMMARIES if name not in ("ingest", "store", "cluster", "grammar")]


def write_page(directory: Path, source: Path) -> list[str]:
    """Write the regions whose files are in ``source``, and return their names. Does not change the page on
    an error."""
    page = directory / PAGE
    texts = {}
    for name in regions_of(page):
        bench = name.partition("-")[0]
        if bench not in PAGE_BENCHES:
            raise InvalidInputError(
                f"{page} has a region bench:{name}, expected a name that starts with one of "
                f"{', '.join(PAGE_BENCHES)}; rename it"
            )
        path = source / f"{name}.json"
        if path.is_file():
            texts[name] = _text(page, name, path, load_bench(bench))
    if not texts:
        raise InvalidInputError(
            f"{source} has no result for {page}, expected files such as ttft.json and overhead.json; "
            "make them with make bench or make bench-all"
        )
    write_regions(page, texts)
    return list(texts)


def _text(page: Path, name: str, path: Path, made_by: Bench) -> str:
    """The text of a region; writes its figure. Raises :class:`InvalidInputError`."""
    bench = name.partition("-")[0]
    try:
        fields = json.loads(path.read_bytes())
        command = TypeAdapter(str).validate_python(fields["command"])
        if command.split()[:3] != ["blendrag", "bench", bench]:
            raise ValueError(f"command {command!r}")
        result = TypeAdapter(made_by.result).validate_python(fields)
        table = made_by.table(result)
        table = replace(table, title=f"{table.title}; {result.machine}.")
        parts = [console([command]), table.markdown()]
        if made_by.figure is not None:
            parts.append(picture(made_by.figure(result), page, name, SUMMARIES[bench]))
    except (OSError, LookupError, ArithmeticError, TypeError, ValueError, RecursionError) as exc:
        reason = " ".join(str(exc).split()) or type(exc).__name__
        raise InvalidInputError(
            f"{path} is not a complete result ({reason}), expected what blendrag bench {bench} --json "
            f"prints; measure again, or remove {path.name}"
        ) from exc
    return "\n\n".join(parts)


@reporting
def main(
    source: Annotated[Path, typer.Option("--from", help="Folder of the JSON files.")] = Path(
        "build/bench"
    ),
    out: Annotated[Path, typer.Option(help="Folder of the page.")] = Path("docs"),
) -> int:
    """Write the results of blendrag bench to docs/performance.md, with figures."""
    begin(verbose=False, if_interrupted="the page did not change")
    say("wrote", f"{', '.join(write_page(out, source))} into {out / PAGE}")
    return DONE


if __name__ == "__main__":
    typer.run(main)
