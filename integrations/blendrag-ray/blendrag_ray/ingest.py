"""Ingest on Ray Data: files → documents → chunks with vectors → KV → rows of the corpus.

::

    read_file           tasks on the driver's machine      a file becomes its documents
    EmbedChunks         actors, each with an embedder      a document becomes its chunks
    EncodeChunks        actors, each with a model          KV → shared store or remote, durable
    DistributedIngest   the driver, in order of the files  a document's rows, in one transaction

Ray retries the work of processes and machines that die. KV is durable before it is acknowledged and looked up
before it is computed, so neither a retry nor another run computes it again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blendrag.corpus.corpus import Corpus, files_of
from blendrag.corpus.languages import Languages
from blendrag.engine import BlendEngine
from blendrag.engine.ingest import (
    DocumentRows,
    IngestReport,
    Watch,
    ended,
    ended_early,
    files_at,
    named_failure,
)
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.errors import IdentityChangedError, InvalidInputError, StoreFullError
from blendrag.planning.machine import cores
from blendrag.text.chunking import Chunk, chunk_id_of
from blendrag.text.inputs import ALL, Patterns
from blendrag.text.readers import Document
from blendrag_ray.ingest_stages import EmbedChunks, EncodeChunks, IngestPlan, Row, read_file
from blendrag_ray.nodes import on_every_node
from blendrag_ray.ray_session import ray_session

#: Chunks that a worker takes at a time, and bytes of text and vectors that travel together.
BATCH_CHUNKS, BLOCK_BYTES = 4, 64 << 10
#: Chunks in a batch that are encoded after one another.
BATCH_NEIGHBOURS = 32
#: Bytes of files that are read by one task.
READ_BYTES = 256 << 10
#: Memory that reading asks for; not what the next stage asks for, which keeps them apart.
READ_MEMORY = 64 << 20
#: Actors that may die in a row while they start.
MAX_START_DEATHS = 100
#: Workers on CPUs for each actor that embeds; on GPUs each has its own, with this many CPUs at most.
WORKERS_PER_EMBEDDER, EMBEDDER_CPUS = 4, 4


def ingest_on_ray(
    engine: BlendEngine,
    paths: Sequence[Path],
    watch: Watch | None = None,
    prune: bool = False,
    patterns: Patterns = ALL,
    workers: int | None = None,
    gpus_per_worker: float | None = None,
) -> IngestReport:
    """:meth:`BlendEngine.ingest` on the workers of a Ray cluster; takes paths only.

    ``workers``: processes with a model each; by default one for each GPU, or for each machine without any.
    Raises the errors of :meth:`BlendEngine.ingest`, and :class:`InvalidInputError` for a cluster that cannot
    do it.
    """
    with ray_session(cores()) as ray:
        share = Share.of(ray, engine.settings.device, workers, gpus_per_worker)

        def compute(plan: IngestPlan, files: list[Row]) -> Generator[Row]:
            check_nodes(plan)
            return dataset_rows(ray, plan, share, files)

        return engine.ingest_by(
            lambda kv: ingest(kv, compute, share.workers, paths, watch, prune, patterns)
        )


#: Begins to compute listed files; the rows come in the order of the files.
Compute = Callable[[IngestPlan, list[Row]], Generator[Row]]


def ingest(
    kv: KVNamespace,
    compute: Compute,
    workers: int,
    paths: Sequence[Path],
    watch: Watch | None = None,
    prune: bool = False,
    patterns: Patterns = ALL,
) -> IngestReport:
    """:func:`ingest_on_ray`, by anything that runs the stages."""
    corpus = kv.create_corpus()

    def run() -> IngestReport:
        begun = compute, workers, watch
        return DistributedIngest(kv, corpus, *begun).run(paths, prune, patterns)

    try:
        report = run()
    except IdentityChangedError:
        if not corpus.manifest.model_signature:
            raise
        kv.forget_signature()  # the files look unchanged but hold other weights
        report = run()
    return ended(kv, report)


# -- the cluster ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What of the cluster each worker takes."""

    workers: int
    cpus: int
    gpus: float
    embedders: int
    embedder_cpus: int

    @classmethod
    def of(cls, ray: Any, device: str, workers: int | None, gpus_per_worker: float | None) -> Share:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus = [int(node.get("CPU", 0)) for node in nodes]
        all_gpus = sum(node.get("GPU", 0) for node in nodes)
        gpus = gpus_per_worker
        if gpus is None:
            gpus = 1.0 if all_gpus and device != "cpu" else 0.0
        fits = int(all_gpus / gpus) if gpus else sum(cpus)
        workers = workers or (fits if gpus else sum(map(bool, cpus))) or 1
        if workers > fits:
            what = f"{gpus:g} GPUs each" if gpus else "a CPU each"
            has = f"{all_gpus:g} GPUs" if gpus else f"{sum(cpus)} CPUs"
            raise InvalidInputError(
                f"{workers} workers with {what}, but the Ray cluster has {has}; start at most {fits} "
                "(--workers), or add nodes"
            )
        if not gpus:
            sizes = range(1, max(cpus) + 1)
            each = max(size for size in sizes if sum(have // size for have in cpus) >= workers)
            return cls(workers, each, 0.0, -(-workers // WORKERS_PER_EMBEDDER), 0)
        spare = sum(cpus) // workers - 1
        return cls(workers, 1, gpus, workers, max(0, min(EMBEDDER_CPUS, spare)))


def check_nodes(plan: IngestPlan) -> None:
    """Raise :class:`InvalidInputError` for a node whose workers could not do this work."""
    format_file, place = str(plan.root / "format"), plan.place
    model, remote = plan.model, plan.remote

    def check() -> None:  # without the modules of this one, which import torch
        import os

        from blendrag.errors import InvalidInputError
        from blendrag_ray.nodes import check_model

        check_model(model)
        try:
            stat = os.stat(format_file)
            is_seen = (stat.st_ino, stat.st_mtime_ns) == place
        except OSError:
            is_seen = False
        if not (is_seen or remote):
            raise InvalidInputError(
                f"the store of {format_file} is not seen, and there is no remote; put the store on a file "
                "system that all nodes share, or name a --remote"
            )

    on_every_node(check)


def dataset_rows(ray: Any, plan: IngestPlan, share: Share, files: list[Row]) -> Generator[Row]:
    """The files' rows after all stages, as workers complete them."""
    from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy

    context = DataContext.get_current().copy()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.target_max_block_size = BLOCK_BYTES
    context.max_consecutive_actor_init_deaths = MAX_START_DEATHS
    here: dict[str, Any] = {}
    if len(ray.nodes()) > 1:  # the files may be on this machine only
        node = ray.get_runtime_context().get_node_id()
        here = {"label_selector": {"ray.io/node-id": node}, "memory": READ_MEMORY}
    tasks = -(-sum(file["bytes"] for file in files) // READ_BYTES)
    with DataContext.current(context):
        rows = (
            ray.data.from_items(files, override_num_blocks=max(1, min(tasks, len(files))))
            .flat_map(read_file, num_cpus=0, compute=TaskPoolStrategy(size=1), **here)
            .flat_map(
                EmbedChunks,
                fn_constructor_args=(plan,),
                num_cpus=share.embedder_cpus,
                compute=ActorPoolStrategy(size=share.embedders),
            )
            .map_batches(
                EncodeChunks,
                fn_constructor_args=(plan,),
                batch_size=BATCH_NEIGHBOURS if plan.encode_after else BATCH_CHUNKS,
                num_cpus=share.cpus,
                num_gpus=share.gpus or None,
                compute=ActorPoolStrategy(size=share.workers),
            )
        )
        yield from rows.iter_rows()


# -- the run --------------------------------------------------------------------------------------


class DistributedIngest:
    """One run: the dataset that the workers compute, and the rows that the driver writes from it."""

    def __init__(
        self,
        kv: KVNamespace,
        corpus: Corpus,
        compute: Compute,
        workers: int,
        watch: Watch | None,
    ) -> None:
        self._kv, self._corpus = kv, corpus
        self._compute, self._workers = compute, workers
        self._watch = watch or (lambda report: None)
        self._rows = DocumentRows(kv, corpus)
        self._languages = Languages()
        self._report = IngestReport()
        self._computed_tokens = 0
        self._began = time.perf_counter()
        self._namespace = ""
        self._stored: set[str] = set()
        """Keys of KV that workers found or wrote."""
        self._document: list[Row] = []
        self._done_bytes, self._files_bytes = 0.0, 0

    def run(self, paths: Sequence[Path], prune: bool, patterns: Patterns) -> IngestReport:
        """Ingest files. After Ctrl-C the report has ``interrupted`` set."""
        report, seen, read = self._report, set[str](), set[str]()
        report.warnings += self._kv.warnings()
        with ended_early(report, self._claim):
            files = files_at([Path(path) for path in paths], report, patterns)
            sizes = {name: size_bytes for name, (_, size_bytes) in files.items()}
            self._kv.record_recipe()
            plan = IngestPlan.of(self._kv)
            with closing(self._compute(plan, self._listed(files))) as rows:
                for row in rows:
                    self._refuse_fatal(row)
                    if row["source"]:
                        seen.add(row["source"])
                        self._take(row)
                    else:
                        self._end_file(row, sizes[row["file"]], read)
            self._rows.find_gone(report, paths, seen, read, prune)
        report.warnings += filter(None, [self._languages.warning(self._corpus.manifest.embedder)])
        self._count()
        return report

    def _listed(self, files: dict[str, tuple[Path, int]]) -> list[Row]:
        """The files with what the corpus has of each."""
        stored: dict[str, list[str]] = {}
        for source in self._corpus.file_sources():
            for name in files_of(source):
                if name in files:
                    stored.setdefault(name, []).append(source)
        return [
            {
                "file": name,
                "path": str(path.absolute()),
                "bytes": size_bytes,
                "known": json.dumps({s: self._corpus.places(s) for s in stored.get(name, ())}),
            }
            for name, (path, size_bytes) in files.items()
        ]

    def _refuse_fatal(self, row: Row) -> None:
        if row["fatal"]:
            raise InvalidInputError(row["fatal"])
        if row["full"]:
            raise StoreFullError(row["full"])
        if row["namespace"]:
            if not self._namespace:
                self._namespace = row["namespace"]
                self._kv.record(row["namespace"], row["signature"])
            if row["namespace"] != self._namespace:
                raise IdentityChangedError(
                    f"workers hold different weights of {self._kv.model.name}, expected the same on "
                    "all machines; copy its files again, and repeat the command"
                )

    def _take(self, row: Row) -> None:
        """Note what a worker did for one chunk; write the rows of a document whose chunks are all there."""
        report = self._report
        self._stored.update(row["keys"].split())
        if row["of"]:
            report.chunks += 1
            report.tokens += row["kv_tokens"]
            report.chunks_computed += row["computed"]
            self._computed_tokens += row["kv_tokens"] * row["computed"]
            report.refused = report.refused or row["refused"]
            report.chunks_skipped += not (row["computed"] or row["refused"] or row["failure"])
            report.context_tokens += row["context_tokens"]
            report.bytes += row["kv_bytes"]
            report.encoding_s += row["seconds"] / self._workers
            before = report.done_bytes
            report.done_bytes = round(
                self._done_bytes + row["bytes"] * (row["end"] / row["characters"])
            )
            if row["computed"]:
                report.work_done += report.done_bytes - before
        if self._document and self._document[0]["source"] != row["source"]:
            self._refuse_changed()
        self._document.append(row)
        if len(self._document) >= row["of"]:
            rows, self._document = self._document, []
            self._done_bytes += row["bytes"]
            self._end_document(rows)
        if row["computed"] or not self._document:
            self._tell()

    def _end_document(self, rows: list[Row]) -> None:
        """Write the rows of a document whose KV is stored. A bad one is named and counted."""
        report, first = self._report, rows[0]
        if failures := [row["failure"] for row in rows if row["failure"]]:
            report.failures.append(failures[0])
            return
        versions = {(row["digest"], row["of"]) for row in rows}
        if len(versions) > 1 or any(row["number"] != i for i, row in enumerate(rows)):
            self._document = rows
            self._refuse_changed()
            return
        is_unchanged = bool(first["places"])
        if not is_unchanged:
            chunks = [
                Chunk(
                    row["text"], row["start"], row["end"], row["tokens"], chunk_id_of(row["text"])
                )
                for row in rows
            ]
            vectors = np.stack([np.frombuffer(row["vector"], np.float32) for row in rows])
            metadata = json.loads(first["metadata"])
            document = Document(first["source"], "", first["title"], metadata)
            try:
                self._rows.put(document, first["digest"], chunks, vectors)
            except InvalidInputError as bad:
                report.failures.append(named_failure(first["source"], bad))
                return
        report.documents += 1
        self._languages.add("\n".join(row["text"] for row in rows))
        report.documents_unchanged += is_unchanged and not any(row["computed"] for row in rows)

    def _refuse_changed(self) -> None:
        """Its file was read again, because a process died, and was another one by then."""
        source = self._document[0]["source"]
        self._report.failures.append(f"{source} changed while it was ingested; ingest it again")
        self._document = []

    def _end_file(self, row: Row, size_bytes: int, read: set[str]) -> None:
        if self._document:
            self._refuse_changed()
        if row["failure"]:
            self._report.failures.append(row["failure"])
        else:
            read.add(row["file"])
        self._report.warnings += json.loads(row["warnings"])
        self._files_bytes += size_bytes
        self._done_bytes = self._report.done_bytes = self._files_bytes

    def _claim(self) -> None:
        self._kv.store.claim(self._namespace, self._stored)

    def _count(self) -> None:
        report = self._report
        report.failed = len(report.failures)
        spent_s = report.encoding_s
        report.tokens_per_s = self._computed_tokens / spent_s if spent_s else 0.0
        report.seconds = time.perf_counter() - self._began
        # workers read the files, so of what is to come only the bytes are known
        report.work = report.work_done + report.total_bytes - report.done_bytes

    def _tell(self) -> None:
        self._count()
        self._watch(self._report)
