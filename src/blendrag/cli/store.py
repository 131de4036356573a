"""``blendrag store``: inspect, check, shrink, clear, export, import and share a store.

Only ``publish`` loads torch, for the tokenizer.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import interrupt, options
from blendrag.cli.groups import SuggestingGroup
from blendrag.cli.lifecycle import DONE, FAILED, begin, removal_confirmed, reporting
from blendrag.cli.output import count, duration, echo, print_json, say, show
from blendrag.cli.progress import ByteProgress
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.store.durable import readable_size
from blendrag.store.identity import is_learned

if TYPE_CHECKING:
    from blendrag.config import Settings
    from blendrag.corpus.corpus import CorpusCheck
    from blendrag.store.maintenance import CheckReport, Removal, StoreSurvey

#: Digits of a namespace that are shown; ``--namespace`` accepts any unique beginning.
SHOWN_DIGITS = 12

app = typer.Typer(
    name="store",
    cls=SuggestingGroup,
    help="Inspect, check, shrink, clear, export and share a store.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Namespace = Annotated[
    str | None, options.optional("Only this one, by the beginning of its name. [default: all]")
]
Archive = Annotated[Path, typer.Argument(metavar="FILE", help="The archive.", show_default=False)]


def _begin(store: Path | None, verbose: bool, if_interrupted: str) -> Path:
    """Begin a command; the store's directory."""
    begin(verbose, if_interrupted, loads_torch=False)
    from blendrag.config import settings

    return (store or settings().store).absolute()


@dataclass(frozen=True)
class CorpusFacts:
    """The corpus in a store, or why it cannot be read."""

    documents: int = 0
    chunks: int = 0
    size_bytes: int = 0
    model: str | None = None
    namespace: str | None = None
    """Namespace of its chunks' KV, as the last ingest recorded it."""
    writer: str | None = None
    """Fingerprint of the writer of that KV, if there is one."""
    encode_after: int = 0
    """Most similar chunks that each chunk of it was encoded after."""
    fault: str | None = None


@app.command()
@reporting
def stats(
    store: options.Store = None, json: options.Json = False, verbose: options.Verbose = False
) -> int:
    """Count what is stored, by namespace. That is one model, loaded in one way. Reads no payload."""
    root = _begin(store, verbose, "nothing was changed")
    from blendrag.store import maintenance

    found, corpus = maintenance.survey(root), _corpus_facts(root)
    models = {each.namespace: each.model for each in found.namespaces}
    if corpus and corpus.namespace and corpus.model:
        models[corpus.namespace] = corpus.model  # as the user named it
    is_readable = corpus is None or not corpus.fault
    unused = found.unused_writers((corpus and corpus.writer) or "") if is_readable else []
    if json:
        fields = {**asdict(found), "corpus": asdict(corpus) if corpus else None}
        for each in fields["writers"]:
            each["needed"] = each["writer"] not in unused
        for each in fields["namespaces"]:
            each["model"] = models[each["namespace"]]
        print_json(fields)
    else:
        _print_stats(found, corpus, models, unused)
    return DONE


def _corpus_facts(root: Path) -> CorpusFacts | None:
    """The corpus of the store at ``root``, opened read-only; ``None`` if there is none."""
    directory = root / "corpus"
    if not directory.is_dir():
        return None
    from blendrag.corpus.corpus import Corpus

    size_bytes = 0
    with suppress(OSError):
        size_bytes = sum(entry.lstat().st_size for entry in directory.iterdir())
    try:
        with Corpus.open(root, read_only=True) as corpus:
            manifest = corpus.manifest_or_none
            return CorpusFacts(
                documents=len(corpus.sources()),
                chunks=len(corpus),
                size_bytes=size_bytes,
                model=manifest.model if manifest else None,
                namespace=manifest.namespace or None if manifest else None,
                writer=manifest.writer or None if manifest else None,
                encode_after=manifest.encode_after if manifest else 0,
            )
    except BlendragError as exc:
        return CorpusFacts(size_bytes=size_bytes, fault=str(exc))


def _print_stats(
    found: StoreSurvey,
    corpus: CorpusFacts | None,
    models: dict[str, str | None],
    unused: list[str],
) -> None:
    default = "" if found.limit_is_remembered else " (the default)"
    echo(
        f"{found.root}: {count(found.chunks, 'chunk')}, {count(found.tokens, 'token')}, "
        f"{readable_size(found.size_bytes)} of {readable_size(found.limit_bytes)}{default}"
    )
    for each in found.namespaces:
        learned = "learned from prompts" if is_learned(each.namespace) else "model unknown"
        model = models[each.namespace] or learned
        kind = ", ".join([*each.dtypes, *each.encodings]) or "no known header"
        unknown = f"; {each.unknown} with an unknown header" * bool(each.unknown)
        if found.writers and each.writer is None and not is_learned(each.namespace):
            kind += ", writer unknown"
        elif each.writer:
            kind += f", writer {each.writer[:SHOWN_DIGITS]}"
        if each.encode_after:
            kind += f", each after {count(each.encode_after, 'similar chunk')}"
        echo(
            f"  {each.namespace[:SHOWN_DIGITS]}  {model}, {kind}: {count(each.chunks, 'chunk')} "
            f"({each.pinned} pinned), {count(each.tokens, 'token')}, "
            f"{readable_size(each.size_bytes)}{unknown}"
        )
    if corpus is not None:
        counts = f"{count(corpus.documents, 'document')}, {count(corpus.chunks, 'chunk')}"
        writer = f"; encoded with writer {corpus.writer[:SHOWN_DIGITS]}" if corpus.writer else ""
        after = corpus.encode_after
        writer += f"; each encoded after {count(after, 'other chunk')}" * bool(after)
        echo(f"  corpus: {readable_size(corpus.size_bytes)}, {corpus.fault or counts}{writer}")
    for kept in found.writers:
        use = "not needed any more; blendrag store gc removes it" * (kept.writer in unused)
        echo(
            f"  writer {kept.writer[:SHOWN_DIGITS]}: {readable_size(kept.size_bytes)}"
            + f", {use}" * bool(use)
        )
    if found.quarantine_files:
        echo(
            f"  quarantine: {count(found.quarantine_files, 'file')}, "
            f"{readable_size(found.quarantine_bytes)}"
        )
    if found.temporary_bytes:
        echo(f"  being written, or left by a crash: {readable_size(found.temporary_bytes)}")


@app.command()
@reporting
def check(
    store: options.Store = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Quarantine damaged payloads, repair the index, drop damaged rows."
        ),
    ] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Read the whole store and verify checksums. Exit status 1 if anything is damaged, repaired or not."""
    kept = "what was repaired stays repaired; repeat the command to go on"
    root = _begin(store, verbose, kept if repair else "nothing was changed")
    from blendrag.store import maintenance

    with ByteProgress("checked") as progress:
        report = maintenance.check(root, repair, progress)
    corpus = _check_corpus(root, repair)
    is_good = report.is_good and (corpus is None or corpus.is_good)
    for fault in (*report.faults, *(corpus.faults if corpus else ())):
        say("damaged", fault)
    if json:
        fields = asdict(corpus) if corpus else None
        print_json({**asdict(report), "corpus": fields, "good": is_good})
    else:
        _print_check(report, corpus, is_good)
    return DONE if is_good else FAILED


def _check_corpus(root: Path, repair: bool) -> CorpusCheck | None:
    """Check and repair the corpus of the store at ``root``; ``None`` if there is none."""
    from blendrag.corpus.database import FILE_NAME

    if not os.path.lexists(root / "corpus" / FILE_NAME):
        return None
    from blendrag.corpus.corpus import CorpusCheck, check_corpus

    try:
        return check_corpus(root, repair)
    except BlendragError as exc:
        return CorpusCheck(rows=0, damaged=1, faults=(str(exc),), repaired=False)


def _print_check(report: CheckReport, corpus: CorpusCheck | None, is_good: bool) -> None:
    for each in report.namespaces:
        rows = ""
        if each.missing_rows is not None:
            rows = f"; index: {count(each.missing_rows, 'row')} missing, {each.dead_rows} dead"
        echo(
            f"  {each.namespace[:SHOWN_DIGITS]}  {each.good} good ({readable_size(each.good_bytes)}), "
            f"{each.damaged} damaged, {each.unreadable} unreadable{rows}"
        )
    if report.index != "sound":
        remedy = "; a repair rebuilds it" * (report.index == "damaged")
        echo(f"  index {report.index}: {report.index_fault}{remedy}")
    if corpus is not None:
        removed = "; the damaged documents were removed: ingest them again" * corpus.repaired
        echo(f"  corpus: {count(corpus.rows, 'row')}, {count(corpus.damaged, 'fault')}{removed}")
    verdict = "all checksums match" if is_good else "some of it is damaged"
    if report.repaired:
        damaged = sum(each.damaged for each in report.namespaces)
        verdict += f"; {count(damaged, 'damaged chunk')} quarantined, index repaired"
    echo(
        f"{report.root}: {readable_size(report.read_bytes)} read in {duration(report.seconds)}; {verdict}"
    )


@app.command()
@reporting
@options.takes("model", "store", "remote")
def publish(
    context: typer.Context,
    again: Annotated[
        bool,
        typer.Option("--again", help="Write everything, if the remote has lost or damaged it."),
    ] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Publish the corpus in the remote. `blendrag serve` and `store follow` find it there."""
    begin(verbose, "the published corpus is the one before, or the new one")
    with options.engine_for(context) as engine:
        done = engine.publish(again)
    what = "published" if done.changed else "was published already"
    show(
        json,
        done,
        f"snapshot {done.serial} {what}: {count(done.documents, 'document')}, "
        f"{count(done.chunks, 'chunk')}; {readable_size(done.uploaded_bytes)} uploaded",
    )
    if done.missing:
        say("note", f"{count(done.missing, 'chunk')} without KV will be computed when asked for")
    return DONE


@app.command()
@reporting
def follow(
    store: options.Store = None,
    remote: options.Remote = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Make the store's corpus equal to the one published in the remote."""
    root = _begin(store, verbose, "the corpus is as it was")
    given = _with_remote(remote)
    from blendrag.corpus.shared import sharing, snapshots

    with snapshots.remote_root(given) as there:
        done = sharing.follow(root, there)
        if done is None:
            raise InvalidInputError(
                f"remote {there.url} has no published corpus; publish one on the machine that ingested it "
                "(blendrag store publish)"
            )
    what = f"{done.added:,} added or changed, {done.removed:,} removed"
    show(
        json,
        done,
        f"snapshot {done.serial}: {count(done.documents, 'document')}, {count(done.chunks, 'chunk')}; "
        f"{what if done.changed else 'nothing new'}, {readable_size(done.read_bytes)} read",
    )
    return DONE


def _with_remote(remote: str | None) -> Settings:
    from blendrag.config import settings

    return replace(settings(), remote=remote or settings().remote)


@app.command()
@reporting
def gc(
    max_bytes: options.MaxBytes = None,
    store: options.Store = None,
    remote: Annotated[
        str | None,
        options.optional("Collect this remote instead: remove KV that no snapshot names."),
    ] = None,
    grace_hours: Annotated[
        float | None,
        options.number("With --remote: keep what was written within that time. [default: 168]", 0),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Evict the least recently used chunks. Ends when the store is small enough; pinned chunks stay."""
    if remote is not None and max_bytes is not None:
        raise InvalidInputError("--max-bytes applies to the local store; leave it or --remote out")
    if remote is not None:
        return _collect_remote(remote, 168.0 if grace_hours is None else grace_hours, json, verbose)
    if grace_hours is not None:
        raise InvalidInputError("--grace-hours applies to a remote; add --remote or leave it out")
    root = _begin(store, verbose, "the rest of the store is intact; repeat the command to go on")
    from blendrag.store import maintenance

    with ByteProgress("evicted") as progress:
        done = maintenance.collect(root, max_bytes, progress)
    done = _without_unused_writers(root, done)
    _print_removal(done, "evicted", json)
    if done.left_bytes > done.limit_bytes:
        stays = "stays" if done.pinned == 1 else "stay"
        say("note", f"{count(done.pinned, 'pinned chunk')} {stays}, more than the size asked for")
    return DONE


def _collect_remote(remote: str, grace_hours: float, json: bool, verbose: bool) -> int:
    _begin(None, verbose, "what was removed was not needed; repeat the command to go on")
    from blendrag.corpus.shared import snapshots
    from blendrag.corpus.shared.collection import collect_remote

    with snapshots.remote_root(_with_remote(remote)) as there:
        done = collect_remote(there, 3600 * grace_hours)
    show(
        json,
        done,
        f"{count(done.removed, 'chunk')} removed, {readable_size(done.removed_bytes)}; {done.left:,} left, "
        f"{readable_size(done.left_bytes)}",
    )
    if done.young:
        unused = f"{count(done.young, 'chunk')} that the current snapshot does not name"
        say("note", f"{unused} stay until {grace_hours:g} hours have passed")
    if done.other_namespaces:
        names = ", ".join(name[:SHOWN_DIGITS] for name in done.other_namespaces)
        say(
            "note",
            f"left alone: KV of other models or prompt schemas ({names}); to remove it: blendrag store "
            f"clear --remote {remote} --namespace NAME",
        )
    return DONE


@app.command()
@reporting
def clear(
    store: options.Store = None,
    namespace: Namespace = None,
    remote: Annotated[
        str | None, options.optional("Clear a namespace of this remote instead of the store.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Skip confirmation.")] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Remove all stored KV, or that of one namespace. The corpus and other files stay."""
    if remote is not None:
        return _clear_remote(remote, namespace, yes, json, verbose)
    root = _begin(store, verbose, "nothing was removed")
    from blendrag.store import maintenance

    maintenance.require_writable(root)
    whole = None if namespace is None else maintenance.find_namespace(root, namespace)
    if not yes and not _confirmed(root, whole):
        say("note", "nothing was removed")
        return FAILED
    interrupt.expect("the rest of the store is intact; repeat the command to go on")
    with ByteProgress("removed") as progress:
        done = maintenance.clear(root, whole, progress)
    done = _without_unused_writers(root, done)
    _print_removal(done, "removed", json)
    return DONE


def _clear_remote(remote: str, namespace: str | None, yes: bool, json: bool, verbose: bool) -> int:
    if not namespace:
        raise InvalidInputError(
            "--remote without --namespace, expected the namespace to remove; a whole prefix is removed with "
            "the tools of the object store"
        )
    _begin(None, verbose, "the rest of the remote is intact; repeat the command to go on")
    from blendrag.corpus.shared import snapshots
    from blendrag.corpus.shared.collection import clear_remote

    def confirm(name: str, objects: int, size_bytes: int) -> bool:
        kv = f"namespace {name[:SHOWN_DIGITS]}, {count(objects, 'chunk')}, {readable_size(size_bytes)}"
        return yes or removal_confirmed(f"{kv}, of remote {remote}")

    with snapshots.remote_root(_with_remote(remote)) as there:
        done = clear_remote(there, namespace, confirm)
    if done is None:
        say("note", "nothing was removed")
        return FAILED
    removed, removed_bytes = done
    if json:
        print_json({"removed": removed, "removed_bytes": removed_bytes})
    else:
        echo(f"{count(removed, 'chunk')} removed, {readable_size(removed_bytes)}")
    return DONE


def _confirmed(root: Path, namespace: str | None) -> bool:
    from blendrag.store import maintenance

    found = maintenance.survey(root).namespaces
    chosen = [each for each in found if namespace in (None, each.namespace)]
    chunks, size_bytes = sum(e.chunks for e in chosen), sum(e.size_bytes for e in chosen)
    return removal_confirmed(
        f"{count(chunks, 'chunk')}, {readable_size(size_bytes)}, of store {root}"
    )


def _without_unused_writers(root: Path, done: Removal) -> Removal:
    """Also remove the writers that nothing needs any more."""
    from blendrag.corpus.unused_writers import remove_unused_writers

    try:
        return replace(done, writers=remove_unused_writers(root))
    except BlendragError as exc:
        say("note", f"no writer was removed: {exc}")
        return done


def _print_removal(done: Removal, verb: str, json: bool) -> None:
    show(
        json,
        done,
        f"{count(done.removed, 'chunk')} {verb}, {readable_size(done.removed_bytes)}; "
        f"{done.left:,} left, {readable_size(done.left_bytes)}"
        + f"; {count(len(done.writers), 'unused writer')} removed"
        * bool(done.writers),
    )


@app.command("export")
@reporting
def export(
    archive: Archive,
    store: options.Store = None,
    namespace: Namespace = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Write verified KV to a tar archive. Exit status 1 if damaged chunks were left out."""
    root = _begin(store, verbose, f"{archive} was not written")
    from blendrag.store import maintenance

    maintenance.require_store(root)
    whole = None if namespace is None else maintenance.find_namespace(root, namespace)
    with ByteProgress("exported") as progress:
        report = maintenance.export_archive(root, archive, whole, progress)
    for fault in report.left_out:
        say("left out", fault)
    show(
        json,
        report,
        f"{count(report.payloads, 'chunk')} ({report.pinned} pinned), {readable_size(report.size_bytes)}, "
        f"written to {report.archive}; {len(report.left_out)} left out",
    )
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
    """Import an archive's KV and verify each chunk. Exit status 1 unless all of it is then stored.

    Import archives only from trusted sources: checksums detect damage, not a forged archive.
    """
    root = _begin(store, verbose, "what was imported is kept; repeat the command to go on")
    from blendrag.store import maintenance

    with ByteProgress("imported") as progress:
        report = maintenance.import_archive(root, archive, disk_bytes, progress)
    for fault in report.rejected:
        say("rejected", fault)
    show(
        json,
        report,
        f"{count(report.imported, 'chunk')} imported, {readable_size(report.imported_bytes)}; "
        f"{report.already_there:,} already stored, {len(report.rejected)} rejected",
    )
    if report.stopped:
        say("error", report.stopped)
    return DONE if report.is_complete else FAILED
