"""What the commands of ``blendrag store`` print."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from blendrag.cli.output import duration, megabytes

if TYPE_CHECKING:
    from blendrag.cli.store_corpus import CorpusFacts
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
        f"{found.root}: {found.chunks} chunks, {found.tokens:,} tokens, {megabytes(found.size_bytes)} "
        f"of {megabytes(found.limit_bytes)}{whose}"
    )
    for each in found.namespaces:
        model = _model(each.namespace, corpus) or "model unknown"
        kind = ", ".join([*each.dtypes, *each.encodings]) or "no header of ours"
        typer.echo(
            f"  {each.namespace[:SHOWN_DIGITS]}  {model}, {kind}: {each.chunks} chunks "
            f"({each.pinned} pinned), {each.tokens:,} tokens, {megabytes(each.size_bytes)}"
            + f"; {each.unknown} with a header that is not ours"
            * bool(each.unknown)
        )
    if corpus is not None and corpus.fault:
        typer.echo(f"  corpus: {megabytes(corpus.size_bytes)}; {corpus.fault}")
    elif corpus is not None:
        typer.echo(
            f"  corpus: {corpus.documents} documents, {corpus.chunks} chunks, "
            f"{megabytes(corpus.size_bytes)}"
        )
    if found.quarantine_files:
        typer.echo(
            f"  quarantine: {found.quarantine_files} files, {megabytes(found.quarantine_bytes)}"
        )
    if found.temporary_bytes:
        typer.echo(f"  being written, or left by a crash: {megabytes(found.temporary_bytes)}")


def _model(namespace: str, corpus: CorpusFacts | None) -> str | None:
    """The model of a namespace, which only a corpus made with it knows."""
    return corpus.model if corpus is not None and corpus.namespace == namespace else None


def print_check(report: CheckReport) -> None:
    for each in report.namespaces:
        rows = ""
        if each.missing_rows is not None:
            rows = f"; index: {each.missing_rows} rows missing, {each.dead_rows} dead"
        typer.echo(
            f"  {each.namespace[:SHOWN_DIGITS]}  {each.good} good ({megabytes(each.good_bytes)}), "
            f"{each.damaged} damaged, {each.unreadable} unreadable{rows}; "
            f"{each.foreign_files} foreign files"
        )
    if report.index != "sound":
        typer.echo(f"  index: {report.index}")
    verdict = "every byte is the one that was put" if report.is_good else "some of it is damaged"
    if report.repaired:
        aside = sum(each.damaged for each in report.namespaces)
        verdict += f"; {aside} damaged chunks set aside, the index is in order"
    typer.echo(
        f"{report.root}: {megabytes(report.read_bytes)} read in {duration(report.seconds)}, "
        f"{report.foreign_files} foreign files; {verdict}"
    )


def print_removal(done: Removal, verb: str) -> None:
    typer.echo(
        f"{done.removed} chunks {verb}, {megabytes(done.removed_bytes)}; {done.left} left, "
        f"{megabytes(done.left_bytes)}"
    )


def print_export(report: ExportReport) -> None:
    typer.echo(
        f"{report.payloads} chunks ({report.pinned} pinned), {megabytes(report.size_bytes)}, written "
        f"to {report.archive}; {len(report.left_out)} left out"
    )


def print_import(report: ImportReport) -> None:
    typer.echo(
        f"{report.imported} chunks taken in, {megabytes(report.imported_bytes)}; "
        f"{report.already_there} already there, {len(report.rejected)} rejected"
    )
