"""Tables and plots of docs/performance.md: ``python -m blendrag.lab.bench.page``, or ``make bench``.

Owns the regions of the page. What stands between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` is
written from ``NAME.json``, which ``blendrag bench … --json`` printed; a region without such a file, and
everything outside of regions, stays as it is. NAME begins with the bench: ``ttft``, ``ttft-int8``,
``sweep-chunks``. Equal files give an equal page.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blendrag.cli.drawing import require_matplotlib
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.lab.bench.page_tables import TEXTS
from blendrag.lab.bench.pictures import figure_of
from blendrag.lab.bench.results import RESULTS, Measured, read_result
from blendrag.lab.bench.sweep import FACTORS, SweepResult

PAGE = "performance.md"
#: Folder beside the page for its pictures.
FOLDER = "performance"
#: Benches whose results are drawn → what stands under the picture.
CAPTIONS = {
    "sweep": "Time to first token by the factor's value",
    "load": "Time to first token by request rate",
    "trace": "The request's timeline",
}

_OPENING = re.compile(r"^<!-- bench:(\S+) -->$", re.MULTILINE)
_REGION = re.compile(
    r"^(<!-- bench:(\S+) -->\n)(.*?)^(<!-- /bench:\2 -->)$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Region:
    """One region of the page whose numbers are there."""

    name: str
    bench: str
    path: Path
    measured: Measured


def write_page(directory: Path, source: Path) -> list[str]:
    """Write the page's regions whose files are in ``source``; their names.

    Raises :class:`InvalidInputError`; then the page is as it was.
    """
    page = directory / PAGE
    text = _page_text(page)
    found = {name: region for name in _names(page, text) if (region := _region(name, source))}
    if not found:
        raise InvalidInputError(
            f"{source} holds no result for {page}, expected files such as ttft.json and sweep-ratio.json; "
            "make them by make bench or make bench-all"
        )
    made = {name: _written(region, directory / FOLDER) for name, region in found.items()}

    def replaced(match: re.Match[str]) -> str:
        opening, name, old, closing = match.groups()
        return f"{opening}{made.get(name, old)}{closing}"

    page.write_text(_REGION.sub(replaced, text), encoding="utf-8")
    return list(found)


# -- regions ----------------------------------------------------------------------------------------


def _page_text(page: Path) -> str:
    try:
        return page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidInputError(
            f"{page} cannot be read ({reason}), expected the page with its regions; name its folder by --out"
        ) from exc


def _names(page: Path, text: str) -> list[str]:
    """Of all regions; raises :class:`InvalidInputError` for one that is none."""
    opened, whole = _OPENING.findall(text), [match[2] for match in _REGION.finditer(text)]
    for name in opened:
        if name not in whole:
            raise InvalidInputError(
                f"{page} opens a region bench:{name} and does not close it, expected <!-- /bench:{name} --> "
                "behind its text; add it"
            )
        if name.partition("-")[0] not in RESULTS:
            raise InvalidInputError(
                f"{page} has a region bench:{name}, expected a name that begins with one of "
                f"{', '.join(RESULTS)}; rename it"
            )
    return whole


def _region(name: str, source: Path) -> Region | None:
    """``None`` without a file; of a sweep it may be named by the factor alone."""
    bench, _, rest = name.partition("-")
    stems = [name, rest] if bench == "sweep" and rest in FACTORS else [name]
    path = next((p for s in stems if (p := source / f"{s}.json").is_file()), None)
    if path is None:
        return None
    measured = read_result(path, bench)
    if isinstance(measured.result, SweepResult):
        factor = measured.result.factor
        if rest != factor and not rest.startswith(f"{factor}-"):
            raise InvalidInputError(
                f"{path} holds a sweep over {factor}, expected one over {rest}; rename it to "
                f"sweep-{factor}.json"
            )
    return Region(name, bench, path, measured)


def _written(region: Region, folder: Path) -> str:
    """What stands in the region; draws its picture, if it has one.

    Raises :class:`InvalidInputError` for a result whose parts do not fit together.
    """
    measured = region.measured
    try:
        text = TEXTS[region.bench](measured.result)
        drawn = figure_of(measured.result)
    except (LookupError, ArithmeticError, ValueError) as exc:
        raise InvalidInputError(
            f"{region.path} is not whole ({exc!r}), expected all that blendrag bench {region.bench} --json "
            "prints; measure again"
        ) from exc
    parts = [f"```console\n$ {measured.command}\n```", text, _made_on(measured)]
    if drawn is not None:
        from blendrag.cli.figures import write_png

        folder.mkdir(parents=True, exist_ok=True)
        write_png(drawn, folder / f"{region.name}.png")
        parts.append(f"![{CAPTIONS[region.bench]}]({FOLDER}/{region.name}.png)")
    return "\n" + "\n\n".join(parts) + "\n\n"


def _made_on(measured: Measured) -> str:
    m = measured.machine
    return (
        f"{m.dtype} on {m.processor}, {m.threads} of {m.cores} CPU cores; torch {m.torch}, transformers "
        f"{m.transformers}."
    )


# -- the command ------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status 2 and one sentence for what does not work."""
    parser = argparse.ArgumentParser(
        prog="python -m blendrag.lab.bench.page",
        description="Write what blendrag bench measured into docs/performance.md, with its pictures.",
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        default=Path("build/bench"),
        help="where the JSON files are",
    )
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where the page is")
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
