"""``blendrag ingest``, ``remove`` and ``list``: change and show what the corpus holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import interrupt, options
from blendrag.cli.extras import ray_function
from blendrag.cli.lifecycle import DONE, FAILED, REFUSED_MODEL, begin, interrupted, reporting
from blendrag.cli.output import count, duration, echo, print_json, say, show, shown_sources
from blendrag.cli.progress import IngestProgress
from blendrag.errors import InvalidInputError
from blendrag.store.durable import readable_size
from blendrag.store.regular_files import MIB

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine, IngestReport
    from blendrag.text.inputs import Patterns

#: Size limit of ``--prefix-file``.
MAX_PREFIX_BYTES = MIB
#: Files named in a line about skipped ones.
NAMED_FILES = 3
#: Seconds of an ingest from which a dry run names the document that takes most of them.
LONG_S = 60

Paths = Annotated[list[Path], typer.Argument(help="Files or directories.", show_default=False)]


@reporting
@options.takes(*options.NEW_CORPUS)
def ingest(
    context: typer.Context,
    paths: Paths,
    prefix_file: Annotated[
        Path | None,
        options.optional("Rendered prompt up to the first chunk; chunks are encoded after it."),
    ] = None,
    include: Annotated[
        list[str] | None,
        options.optional("Read only these files of directories, as in .gitignore; repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        options.optional("Leave these out, besides hidden files; repeatable: '*.log', 'old/'."),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Compute on a Ray cluster: RAY_ADDRESS, else this machine."),
    ] = False,
    workers: Annotated[
        int | None,
        options.number(
            "With --ray: processes with a model each. [default: GPUs, else machines]", 1, kind=int
        ),
    ] = None,
    gpus_per_worker: Annotated[
        float | None, options.number("With --ray. [default: 1, without GPUs 0]", 0)
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Remove documents of the given paths whose file is gone; by path, whatever put them there.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count and estimate; write nothing.")
    ] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Add documents to a store and precompute their KV.

    Reads text of any kind, HTML and JSON lines; with blendrag[files] PDF, DOCX and XLSX. Safe to interrupt
    and to repeat.
    """
    begin(verbose, "nothing new was stored; repeat the command to go on")
    from blendrag.text.inputs import Patterns

    patterns = Patterns(tuple(include or ()), tuple(exclude or ()))
    _require_documents(paths, patterns)
    prefix = None
    if prefix_file is not None:
        content = "the rendered prompt up to the first chunk"
        prefix = options.read_text("--prefix-file", prefix_file, MAX_PREFIX_BYTES, content)
    how = {"prefix_text": prefix, "read_only": dry_run}
    run = _runner(ray, workers, gpus_per_worker)
    with options.engine_for(context, for_ingest=True, **how) as engine:
        if dry_run:
            return _dry_run(engine, paths, patterns, json)
        return _ingest(engine, run, paths, patterns, prune, json)


#: Ingests paths into an engine's store: in this process, or on a Ray cluster.
Runner = Callable[..., "IngestReport"]


def _runner(ray: bool, workers: int | None, gpus_per_worker: float | None) -> Runner:
    if not ray:
        for option, value in (("--workers", workers), ("--gpus-per-worker", gpus_per_worker)):
            if value is not None:
                raise InvalidInputError(
                    f"{option} {value:g} without --ray, expected both; add --ray"
                )
        from blendrag.engine import BlendEngine

        return BlendEngine.ingest
    runner: Runner = ray_function("ingest")(workers, gpus_per_worker)
    return runner


def _require_documents(paths: list[Path], patterns: Patterns) -> None:
    """Refuse missing paths and an empty corpus before the model is loaded."""
    from blendrag.text.inputs import scan_inputs

    found = scan_inputs(paths, patterns, most=1)
    if not found.files:
        skipped = "; ".join(f"{len(files)} skipped: {why}" for why, files in found.skipped.items())
        raise InvalidInputError(
            f"there is no document in {', '.join(map(str, paths))}{f' ({skipped})' if skipped else ''}; "
            "expected files of text that the patterns do not leave out"
        )


def _say_skipped(skipped: dict[str, list[str]]) -> None:
    """One line for each reason; ``--json`` has all names."""
    for why, files in skipped.items():
        more = ", …" * (len(files) > NAMED_FILES)
        names = ", ".join(files[:NAMED_FILES])
        say("skipped", f"{count(len(files), 'file')}, {why}: {names}{more}")


def _ingest(
    engine: BlendEngine, run: Runner, paths: list[Path], patterns: Patterns, prune: bool, json: bool
) -> int:
    interrupt.expect("what was stored is kept; repeat the command to go on", grace_s=10.0)
    with IngestProgress() as progress:
        report = run(engine, paths, progress, prune, patterns)
        progress.name_failures(report.failures)
    for warning in report.warnings:
        say("warning", warning)
    _say_skipped(report.skipped)
    if report.gone and not prune:
        (example,) = shown_sources(report.gone[:1]).values()
        gone = f"{count(len(report.gone), 'document')}, such as {example}"
        say("note", f"not found any more: {gone}; add --prune to remove what is gone")
    encoded = (
        f"{readable_size(report.bytes)} encoded in {duration(report.encoding_s)}, "
        f"{report.tokens_per_s:,.0f} tokens/s; "
    )
    if report.context_tokens:
        encoded += f"{count(report.context_tokens, 'token')} of other chunks before them; "
    pruned = f"; {count(report.pruned, 'document')} removed" * bool(report.pruned)
    show(
        json,
        report,
        f"{count(report.documents, 'document')} ({report.documents_unchanged:,} unchanged), "
        f"{count(report.chunks, 'chunk')}: {report.chunks_computed:,} computed, "
        f"{report.chunks_skipped:,} already stored; {report.failed} failed; "
        f"{encoded if report.bytes else ''}{duration(report.seconds)} in all{pruned}",
    )
    if report.interrupted:
        return interrupted()
    if report.stopped:
        say("error", report.stopped)
    return FAILED if report.stopped or report.failed else DONE


def _dry_run(engine: BlendEngine, paths: list[Path], patterns: Patterns, json: bool) -> int:
    interrupt.expect("nothing was written")
    plan = engine.dry_run(paths, patterns)
    for failure in plan.failures:
        say("failed", failure)
    for warning in plan.warnings:
        say("warning", warning)
    _say_skipped(plan.skipped)
    writer = f", with writer {plan.writer[:12]}" if plan.writer else ""
    writer += f", each after {count(plan.encode_after, 'chunk')}" * bool(plan.encode_after)
    show(
        json,
        plan,
        f"{count(plan.documents, 'document')} ({plan.documents_unchanged:,} unchanged), "
        f"{count(plan.chunks, 'chunk')}, {count(plan.tokens, 'token')}: "
        f"{readable_size(plan.bytes)} of new KV, "
        f"about {duration(plan.seconds)}{writer}; {plan.failed} failed; nothing was written",
    )
    if plan.largest and plan.seconds > LONG_S:
        shown = shown_sources([plan.largest])[plan.largest]
        say("note", f"{shown} has more than half of the tokens; --exclude leaves files out")
    if plan.refused:
        say("error", f"{plan.refused}; an ingest would store the texts without KV")
        return REFUSED_MODEL
    return FAILED if plan.failed else DONE


@reporting
@options.takes("model", "store")
def remove(
    context: typer.Context,
    paths: Paths,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Remove documents: their texts, vectors and KV. A directory names all documents in it."""
    begin(verbose, "documents not removed yet are intact; repeat the command to go on")
    with options.engine_for(context) as engine:
        corpus = engine.require_corpus()
        unknown = [path for path in paths if not corpus.sources_of(path)]
        known = [path for path in paths if path not in unknown]
        removed = engine.remove(known or unknown)
    for path in unknown:
        say("failed", f"{path} is not in the corpus of {engine.root}")
    if json:
        print_json({"documents": removed, "failed": [str(path) for path in unknown]})
    else:
        echo(f"{count(removed, 'document')} removed")
    return FAILED if unknown else DONE


@reporting
def list_documents(
    store: options.Store = None, json: options.Json = False, verbose: options.Verbose = False
) -> int:
    """List the documents of the corpus with their chunks and tokens. Loads no model."""
    begin(verbose, "nothing was changed", loads_torch=False)
    from blendrag.config import settings
    from blendrag.corpus.corpus import Corpus, files_of
    from blendrag.corpus.documents import LEARNED

    with Corpus.open(store or settings().store, read_only=True) as corpus:
        documents, entries = corpus.documents(), len(corpus.entries)
        learned = len(corpus.entries.ids(LEARNED))
        manifest = corpus.manifest_or_none
        model = manifest.model if manifest is not None else None
    rows = [
        asdict(each)
        | {"gone": each.source[:1] == "/" and not any(map(os.path.lexists, files_of(each.source)))}
        for each in documents
    ]
    if json:
        print_json({"model": model, "documents": rows, "entries": entries, "learned": learned})
        return DONE
    shown = shown_sources(row["source"] for row in rows)
    for row in rows:
        size = f"{count(row['chunks'], 'chunk')}, {count(row['tokens'], 'token')}"
        echo(f"{shown[row['source']]}: {size}{', the file is gone' * row['gone']}")
    added = f", {count(entries, 'text')} added by id" * bool(entries)
    added += f", {count(learned, 'passage')} learned from prompts" * bool(learned)
    echo(f"{count(len(rows), 'document')}{added}; {f'model {model}' if model else 'no model yet'}")
    return DONE
