"""What the commands of ``blendrag store`` print."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from blendrag.cli.output import count, duration, megabytes

if TYPE_CHECKING:
    from blendrag.cli.store_corpus import CorpusFacts
    from blendrag.corpus.corpus import CorpusCheck
    from blendrag.store.maintenance import (
        CheckReport,
        ExportReport,
        ImportReport,
        Removal,
        StoreSurvey,
    )

#: Digits of a namespace that are shown; ``--namespace`` takes as few as tell it apart.
SHOWN_DIGITS = 12


def stats_fields(found: StoreSurvey, corpus: CorpusFacts | None) -> dict[str, Any]:
    """The JSON of ``store stats``."""
    fields = {**asdict(found), "corpus": asdict(corpus) if corpus else None}
    for each in fields["namespaces"]:
        each["model"] = _model(each["namespace"], corpus)
    return fields


def print_stats(found: StoreSurvey, corpus: CorpusFacts | None) -> None:
    whose = "" if found.limit_is_remembered else " (the default)"
    typer.echo(
        f"{found.root}: {count(found.chunks, 'chunk')}, {count(found.tokens, 'token')}, "
        f"{megabytes(found.size_bytes)} of {megabytes(found.limit_bytes)}{whose}"
    )
    for each in found.namespaces:
        model = _model(each.namespace, corpus) or "model unknown"
        kind = ", ".join([*each.dtypes, *each.encodings]) or "no header of ours"
        typer.echo(
            f"  {each.namespace[:SHOWN_DIGITS]}  {model}, {kind}: {count(each.chunks, 'chunk')} "
            f"({each.pinned} pinned), {count(each.tokens, 'token')}, {megabytes(each.size_bytes)}"
            + f"; {each.unknown} with a header that is not ours"
            * bool(each.unknown)
        )
    if corpus is not None and corpus.fault:
        typer.echo(f"  corpus: {megabytes(corpus.size_bytes)}; {corpus.fault}")
    elif corpus is not None:
        typer.echo(
            f"  corpus: {count(corpus.documents, 'document')}, {count(corpus.chunks, 'chunk')}, "
            f"{megabytes(corpus.size_bytes)}"
        )
    if found.quarantine_files:
        typer.echo(
            f"  quarantine: {count(found.quarantine_files, 'file')}, "
            f"{megabytes(found.quarantine_bytes)}"
        )
    if found.temporary_bytes:
        typer.echo(f"  being written, or left by a crash: {megabytes(found.temporary_bytes)}")


def _model(namespace: str, corpus: CorpusFacts | None) -> str | None:
    """The model of a namespace, which only a corpus made with it knows."""
    return corpus.model if corpus is not None and corpus.namespace == namespace else None


def print_check(report: CheckReport, corpus: CorpusCheck | None) -> None:
    for each in report.namespaces:
        rows = ""
        if each.missing_rows is not None:
            rows = f"; index: {count(each.missing_rows, 'row')} missing, {each.dead_rows} dead"
        typer.echo(
            f"  {each.namespace[:SHOWN_DIGITS]}  {each.good} good ({megabytes(each.good_bytes)}), "
            f"{each.damaged} damaged, {each.unreadable} unreadable{rows}; "
            f"{count(each.foreign_files, 'foreign file')}"
        )
    if report.index != "sound":
        typer.echo(f"  index: {report.index}")
    if corpus is not None:
        mended = "; what they belong to was removed: ingest it again" * corpus.repaired
        typer.echo(
            f"  corpus: {count(corpus.rows, 'row')}, {count(corpus.damaged, 'fault')}{mended}"
        )
    is_good = report.is_good and (corpus is None or corpus.is_good)
    verdict = "every byte is the one that was put" if is_good else "some of it is damaged"
    if report.repaired:
        aside = sum(each.damaged for each in report.namespaces)
        verdict += f"; {count(aside, 'damaged chunk')} set aside, the index is in order"
    typer.echo(
        f"{report.root}: {megabytes(report.read_bytes)} read in {duration(report.seconds)}, "
        f"{count(report.foreign_files, 'foreign file')}; {verdict}"
    )


def print_removal(done: Removal, verb: str) -> None:
    typer.echo(
        f"{count(done.removed, 'chunk')} {verb}, {megabytes(done.removed_bytes)}; {done.left:,} left, "
        f"{megabytes(done.left_bytes)}"
    )


def print_export(report: ExportReport) -> None:
    typer.echo(
        f"{count(report.payloads, 'chunk')} ({report.pinned} pinned), "
        f"{megabytes(report.size_bytes)}, written to {report.archive}; {len(report.left_out)} left out"
    )


def print_import(report: ImportReport) -> None:
    typer.echo(
        f"{count(report.imported, 'chunk')} taken in, {megabytes(report.imported_bytes)}; "
        f"{report.already_there:,} already there, {len(report.rejected)} rejected"
    )
