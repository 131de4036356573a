"""``blendrag store``: what is in a store, is it sound, make room, take it elsewhere.

Each command parses, calls :mod:`blendrag.store.maintenance`, prints. No model is loaded, no torch.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from blendrag.cli import interrupt, options, output, quiet, store_output
from blendrag.cli.status import DONE, FAILED, reporting, say
from blendrag.errors import InvalidInputError

app = typer.Typer(
    name="store",
    help="Look after a KV store: its contents, its soundness, its size.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        help="Only this one, by the beginning of its name. [default: all]",
        show_default=False,
    ),
]
Archive = Annotated[Path, typer.Argument(metavar="FILE", help="The archive.", show_default=False)]
MaxBytes = Annotated[
    int | None,
    typer.Option(
        "--max-bytes",
        parser=options.parse_size,
        metavar="SIZE",
        help="Largest size afterwards: 2GiB, … [default: the store's own limit]",
        show_default=False,
    ),
]


@app.command()
@reporting
def stats(
    store: options.Store = None, json: options.Json = False, verbose: options.Verbose = False
) -> int:
    """Count what is stored, by namespace (a model, loaded one way). Reads no payload."""
    root = _begin(store, verbose, "nothing was changed")
    from blendrag.cli.store_corpus import CorpusFacts
    from blendrag.store import maintenance

    found = maintenance.survey(root)
    corpus = CorpusFacts.of(root)
    if json:
        output.print_json(store_output.stats_fields(found, corpus))
    else:
        store_output.print_stats(found, corpus)
    return DONE


@app.command()
@reporting
def check(
    store: options.Store = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Set damaged payloads aside, mend the index, drop damaged rows."
        ),
    ] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Read every byte and verify it; exit status 1 if anything is damaged, repaired or not."""
    left = "what was set aside stays so; repeat the command to go on"
    root = _begin(store, verbose, left if repair else "nothing was changed")
    from blendrag.cli.progress import ByteProgress
    from blendrag.cli.store_corpus import check_beside
    from blendrag.store import maintenance

    with ByteProgress("checked") as progress:
        report = maintenance.check(root, repair, progress)
    corpus = check_beside(root, repair)
    is_good = report.is_good and (corpus is None or corpus.is_good)
    for fault in (*report.faults, *(corpus.faults if corpus else ())):
        say("damaged", fault)
    if json:
        fields = asdict(corpus) if corpus else None
        output.print_json({**asdict(report), "corpus": fields, "good": is_good})
    else:
        store_output.print_check(report, corpus)
    return DONE if is_good else FAILED


@app.command()
@reporting
def gc(
    max_bytes: MaxBytes = None,
    store: options.Store = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Evict what was used longest ago until the store is small enough; pinned entries stay."""
    root = _begin(store, verbose, "what is left is sound; repeat the command to go on")
    from blendrag.cli.progress import ByteProgress
    from blendrag.store import maintenance

    with ByteProgress("evicted") as progress:
        done = maintenance.collect(root, max_bytes, progress)
    output.print_json(asdict(done)) if json else store_output.print_removal(done, "evicted")
    if done.left_bytes > done.limit_bytes:
        stay = "1 pinned chunk stays" if done.pinned == 1 else f"{done.pinned:,} pinned chunks stay"
        say("note", f"{stay}, which is more than was asked for")
    return DONE


@app.command()
@reporting
def clear(
    store: options.Store = None,
    namespace: Namespace = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Remove all stored KV, or one namespace's; the corpus and files of others stay."""
    root = _begin(store, verbose, "nothing was removed")
    from blendrag.cli.progress import ByteProgress
    from blendrag.store import maintenance

    maintenance.require_writable(root)
    whole = None if namespace is None else maintenance.find_namespace(root, namespace)
    if not yes and not _agreed(root, whole):
        say("note", "nothing was removed")
        return FAILED
    interrupt.expect("what is left is sound; repeat the command to go on")
    with ByteProgress("removed") as progress:
        done = maintenance.clear(root, whole, progress)
    output.print_json(asdict(done)) if json else store_output.print_removal(done, "removed")
    return DONE


def _agreed(root: Path, namespace: str | None) -> bool:
    """Ask, where there is somebody to ask."""
    from blendrag.store import maintenance

    found = maintenance.survey(root).namespaces
    chosen = [each for each in found if namespace in (None, each.namespace)]
    chunks, size_bytes = sum(e.chunks for e in chosen), sum(e.size_bytes for e in chosen)
    counted = output.count(chunks, "chunk")
    what = f"{counted}, {output.megabytes(size_bytes)}, of store {root}"
    try:
        return typer.confirm(f"Remove {what}?", err=True)
    except typer.Abort as exc:
        if interrupt.requested():
            raise KeyboardInterrupt from exc
        typer.echo(err=True)  # the question has no end of line yet
        raise InvalidInputError(
            f"nobody could be asked whether to remove {what}; add --yes to do it"
        ) from exc


@app.command("export")
@reporting
def export(
    archive: Archive,
    store: options.Store = None,
    namespace: Namespace = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Write stored KV, verified, to a tar archive; exit status 1 if damaged chunks were left out."""
    root = _begin(store, verbose, f"{archive} was not written")
    from blendrag.cli.progress import ByteProgress
    from blendrag.store import maintenance

    maintenance.require_store(root)
    whole = None if namespace is None else maintenance.find_namespace(root, namespace)
    with ByteProgress("exported") as progress:
        report = maintenance.export(root, archive, whole, progress)
    for fault in report.left_out:
        say("left out", fault)
    output.print_json(asdict(report)) if json else store_output.print_export(report)
    return FAILED if report.left_out else DONE


@app.command("import")
@reporting
def import_(
    archive: Archive,
    store: options.Store = None,
    disk_bytes: options.DiskBytes = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Take in an archive's KV, each chunk verified; exit status 1 unless all of it is there then."""
    root = _begin(store, verbose, "what was taken in is kept; repeat the command to go on")
    from blendrag.cli.progress import ByteProgress
    from blendrag.store import maintenance

    with ByteProgress("imported") as progress:
        report = maintenance.take_in(root, archive, disk_bytes, progress)
    for fault in report.rejected:
        say("rejected", fault)
    output.print_json(asdict(report)) if json else store_output.print_import(report)
    if report.stopped:
        say("error", report.stopped)
    return DONE if report.is_complete else FAILED


def _begin(store: Path | None, verbose: bool, if_interrupted: str) -> Path:
    """The store meant, once it is settled who may speak and what Ctrl-C means."""
    quiet.set_up(verbose)
    options.check_environment()
    interrupt.expect(if_interrupted)
    from blendrag.config import settings

    return (store if store is not None else settings().store).absolute()
