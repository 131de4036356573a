"""``PUT /v1/documents``: files that clients send. They are ingested one after another, in the background.

A file is kept in the temporary directory until its turn. Chunks are encoded one by one between requests, so
no answer waits for them, and other changes of documents wait for one file at most.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from starlette.requests import ClientDisconnect, Request

from blendrag.corpus.embedding_turns import Check
from blendrag.engine import BlendEngine, Document, IngestReport
from blendrag.errors import (
    BlendragError,
    InvalidInputError,
    RequestCancelled,
    UnreadableDocumentError,
    UnsupportedModelError,
    check_unicode,
)
from blendrag.server.access import BODY_TIMEOUT_S
from blendrag.server.refusals import ClientGoneError, Refusal, refusal_of, wrong_field
from blendrag.server.replies import Fields
from blendrag.server.upload_folders import UploadFolder
from blendrag.serving.thread_queue import ThreadQueue
from blendrag.store.durable import readable_size
from blendrag.text.limited_reading import read_documents
from blendrag.text.names import check_name
from blendrag.wording import printable

log = logging.getLogger(__name__)

#: Files that arrive or wait at once.
MAX_WAITING = 64
#: Uploads that have ended and are still listed.
MAX_ENDED = 100
#: A file may take :data:`~blendrag.server.access.BODY_TIMEOUT_S` for each such part of it.
PART_BYTES = 8 * 1024**2
MAX_FILE_NAME_BYTES = 255
#: Ends the name of a file whose documents are its lines, with sources ``name#id``.
LINES_SUFFIX = ".jsonl"

Status = Literal["waiting", "running", "stored", "failed", "cancelled"]


@dataclass(eq=False)
class FileUpload:
    """A file that a client sent."""

    source: str
    path: Path
    folder: UploadFolder
    size_bytes: int = 0
    status: Status = "waiting"
    done: float = 0.0
    """The share of the work that is done, in [0, 1]."""
    messages: list[str] = field(default_factory=list)
    """Why it failed, or what of it could not be read."""

    @property
    def fields(self) -> Fields:
        return {
            "object": "upload",
            "source": self.source,
            "bytes": self.size_bytes,
            "status": self.status,
            "done": round(self.done, 3),
            "messages": self.messages,
        }

    @property
    def has_ended(self) -> bool:
        return self.status not in ("waiting", "running")


class FileUploads:
    """The files of one server, by source. Used on the event loop only."""

    def __init__(self, engine: BlendEngine, changes: ThreadQueue, max_bytes: int) -> None:
        """``changes``: where documents are changed; ``max_bytes``: the largest file."""
        self._engine, self._changes, self._max_bytes = engine, changes, max_bytes
        self._all: dict[str, FileUpload] = {}
        self._arriving = 0
        self._turn = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()

    def listed(self) -> Fields:
        """All that wait, run or have ended lately, in the order of their arrival."""
        data = [each.fields for each in self._all.values()]
        return {"object": "list", "max_bytes": self._max_bytes, "data": data}

    @property
    def left(self) -> int:
        """How many are not stored yet."""
        return sum(not each.has_ended for each in self._all.values())

    def is_left(self, source: str) -> bool:
        """Whether a file of this source waits or is being ingested."""
        return source in self._all and not self._all[source].has_ended

    async def receive(self, request: Request, source: str) -> Fields:
        """Keep the body of a request, to be ingested under ``source``. Raises :class:`Refusal`."""
        name = checked_file_name(source)
        most = self._max_bytes
        if int(request.headers.get("content-length", "0")) > most:
            raise self._too_large()
        with self._place() as folder:
            upload = FileUpload(source, folder.path / name, folder)
            await self._write(request.stream(), upload)
            self.cancel(source)
            self._all.pop(source, None)  # listed where it came last
            self._all[source] = upload
            for old in [each for each in self._all.values() if each.has_ended][:-MAX_ENDED]:
                del self._all[old.source]
        task = asyncio.create_task(self._ingested(upload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return upload.fields

    def cancel(self, source: str) -> bool:
        """Do not store a file that waits or is being ingested; whether there was one."""
        if not self.is_left(source):
            return False
        upload = self._all[source]
        if upload.status == "waiting":
            upload.folder.remove()
        upload.status = "cancelled"
        return True

    @contextmanager
    def _place(self) -> Iterator[UploadFolder]:
        """A new folder for a file, which is removed again if the context fails."""
        if self.left + self._arriving >= MAX_WAITING:
            raise Refusal(
                429,
                f"{MAX_WAITING} files are waiting to be ingested, the limit of this server; send more once "
                "GET /v1/uploads shows that some are stored",
                code="server_overloaded",
                headers={"Retry-After": "30"},
            )
        self._arriving += 1
        folder = None
        try:
            folder = UploadFolder()
            yield folder
        except BaseException as error:
            if folder is not None:
                folder.remove()
            if isinstance(error, OSError):
                raise Refusal(
                    507,
                    f"the file cannot be kept in {tempfile.gettempdir()} ({error.strerror or error}); free "
                    "space there, or start the server with another TMPDIR",
                ) from error
            raise
        finally:
            self._arriving -= 1

    async def _write(self, pieces: AsyncIterator[bytes], upload: FileUpload) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            with upload.path.open("xb") as file:
                async with asyncio.timeout(BODY_TIMEOUT_S) as limit:
                    async for piece in pieces:
                        upload.size_bytes += len(piece)
                        if upload.size_bytes > self._max_bytes:
                            raise self._too_large()
                        await asyncio.to_thread(file.write, piece)
                        parts = 1 + upload.size_bytes // PART_BYTES
                        limit.reschedule(began + BODY_TIMEOUT_S * parts)
        except TimeoutError:
            raise Refusal(
                408,
                f"the file arrives too slowly: {readable_size(upload.size_bytes)} in "
                f"{loop.time() - began:.0f} s; send it over a faster connection",
            ) from None
        except ClientDisconnect as gone:
            raise ClientGoneError(
                "the connection was closed before the file was complete"
            ) from gone

    def _too_large(self) -> Refusal:
        return Refusal(
            413,
            f"the file is larger than {readable_size(self._max_bytes)}, the limit of this server "
            "(--max-upload); use blendrag ingest for it",
        )

    async def _ingested(self, upload: FileUpload) -> None:
        """Ingest a file when it is its turn; nothing is raised."""
        try:
            async with self._turn:
                if upload.status == "waiting":
                    upload.status = "running"
                    await self._changes.run(partial(store_file, self._engine, upload))
                    upload.done, upload.status = 1.0, "stored"
        except RequestCancelled:
            pass  # it has that status
        except Exception as error:
            if not isinstance(error, BlendragError):
                log.exception("a file that a client sent was not stored")
            upload.messages.append(printable(str(refusal_of(error))))
            upload.status = "failed"
        finally:
            upload.folder.remove()


def checked_file_name(source: str) -> str:
    """The file name that ends a source. Raises :class:`Refusal` and :class:`InvalidInputError`."""
    check_unicode(source, "source")
    check_name("source", source)
    name = source.rpartition("/")[2]
    if "\0" in source or not name.strip(" .") or len(name.encode()) > MAX_FILE_NAME_BYTES:
        raise wrong_field(
            "source",
            f"does not end in the name of a file, of at most {MAX_FILE_NAME_BYTES} bytes; send one such as "
            "report.pdf",
        )
    return name


def store_file(engine: BlendEngine, upload: FileUpload, check: Check) -> None:
    """Ingest a file as documents of its source. Raises what an ingest raises, and
    :class:`InvalidInputError` for a file without a document that can be read."""

    def watch(report: IngestReport) -> None:
        check()
        if upload.status == "cancelled":
            raise RequestCancelled("the upload was cancelled; nothing of it was stored")
        upload.done = report.work_done / report.work if report.work else 0.0

    documents, failure = list[Document](), ""
    path = upload.path.as_posix()
    try:
        for document in read_documents(upload.path):
            upload.messages += filter(None, [document.damage.replace(path, upload.source)])
            source = upload.source + document.source.removeprefix(path)
            documents.append(replace(document, source=source, damage=""))
    except UnreadableDocumentError as bad:
        failure = f"{upload.source}: {bad.reason}"
    if not documents:
        raise InvalidInputError(failure)
    try:
        report = engine.ingest(documents, watch).whole()
    except UnsupportedModelError as refused:  # the texts are stored
        report = IngestReport(warnings=[str(refused)])
    upload.messages += [*filter(None, [failure]), *report.failures, *report.warnings]
    if report.failed == len(documents):
        raise InvalidInputError(upload.messages.pop())
    if not failure:
        new = {document.source for document in documents}
        gone = [each for each in lines_of(engine, upload.source) if each not in new]
        if gone:
            engine.remove_sources(gone)


def lines_of(engine: BlendEngine, source: str) -> list[str]:
    """Sources of the documents in an uploaded file of JSON lines; none for other files."""
    corpus = engine.corpus
    if corpus is None or os.path.splitext(source)[1].lower() != LINES_SUFFIX:
        return []
    return [each.source for each in corpus.documents() if each.source.startswith(f"{source}#")]
