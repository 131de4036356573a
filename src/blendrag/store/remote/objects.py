"""Bytes by name in an object store that several machines share: S3, GCS, Azure, or a directory.

Over the library obstore (extra ``blendrag[remote]``), which is imported only here. Requests run on one
event loop in a background thread, a limited number at a time; each is retried with backoff and has a
deadline. Errors of obstore become :class:`StoreUnavailableError` with one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from blendrag.config import of_variable
from blendrag.errors import InvalidInputError, StoreUnavailableError, starting_thread
from blendrag.store.base import ProcessBound
from blendrag.store.remote.directory import Listed, ObjectDirectory
from blendrag.wording import first_line, quoted

T = TypeVar("T")

SCHEMES = ("s3", "gs", "az", "file")
#: Requests that run at a time, so that the latency of a network is hidden.
IN_FLIGHT = 64
#: The same for a directory: each of them takes a thread.
IN_FLIGHT_FILES = 16
#: Longest time that writing or listing takes, retries included.
WRITE_S = 60.0
#: Most that is read of an object that is small.
SMALL_BYTES = 64 << 10
#: Longest time to reach the server.
CONNECT_S = 2.0
_BACKOFF = {
    "init_backoff": timedelta(milliseconds=50),
    "max_backoff": timedelta(seconds=2),
    "base": 2,
}

_NO_BUCKET = re.compile(
    r"NoSuchBucket|ContainerNotFound|specified bucket does not exist", re.IGNORECASE
)
#: Where obstore looks for credentials last.
_METADATA = re.compile(r"169\.254\.169\.254|metadata\.google")
_NO_ACCESS = re.compile(
    r"169\.254\.169\.254|metadata\.google|credential|Unauthorized|Forbidden|AccessDenied|\b40[13]\b",
    re.IGNORECASE,
)
_SKEWED = re.compile("RequestTimeTooSkewed|RequestExpired", re.IGNORECASE)
_CODE = re.compile("<Code>([A-Za-z]+)</Code>")
#: The innermost of nested errors comes last.
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
#: A store without conditional writes.
_NO_MODE = re.compile("NotImplemented|not supported|not implemented")
_NO_RANGE = re.compile(
    r"range was invalid|invalid range|range not satisfiable|\b416\b", re.IGNORECASE
)


class RemoteRefusedError(StoreUnavailableError):
    """The remote cannot be used as it was named: no such bucket, no access. Waiting does not help."""


class ObjectBytes(NamedTuple):
    """Bytes of an object, fewer than asked for where it ends."""

    data: memoryview
    object_bytes: int = 0
    latency_s: float = 0.0
    """From the request to the first byte."""
    arrived_at: float = 0.0
    """By ``time.monotonic()``."""


class Stored(NamedTuple):
    """An object as it was read."""

    data: bytes
    version: dict[str, str]
    """By which :meth:`RemoteObjects.replace` recognises it."""


class RemoteObjects(ProcessBound):
    """Objects below one URL. Thread-safe."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """``timeout_s``: for one read, retries included. Connects to nothing.

        Raises :class:`InvalidInputError` without obstore and for a URL that names no object store.
        """
        super().__init__()
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self.opened = _opened(url, timeout_s)
        """obstore's store, with the deadline of reads."""
        self._write_to = _opened(url, WRITE_S)
        place = urlsplit(url)
        is_directory = place.scheme == "file"
        self._directory = ObjectDirectory(Path(unquote(place.path))) if is_directory else None
        self.in_flight = IN_FLIGHT if self._directory is None else IN_FLIGHT_FILES
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def head(self, name: str) -> int | None:
        """Bytes of an object, ``None`` if there is none. Raises :class:`StoreUnavailableError`."""
        piece = self.wait(self.read(name, 0, 1), self._timeout_s)
        return None if piece is None else piece.object_bytes

    def read(self, name: str, offset: int, length: int) -> Future[ObjectBytes | None]:
        """Begin to read bytes of an object; ``None`` if there is none. :meth:`wait` for the result."""
        import obstore

        async def ask() -> ObjectBytes:
            if self._directory is not None:
                await asyncio.to_thread(self._check_file, self._directory, name)
            began = time.monotonic()
            wanted: Any = {"range": (offset, offset + length)}
            found = await obstore.get_async(self.opened, name, options=wanted)
            latency_s, size_bytes = time.monotonic() - began, int(found.meta["size"])
            data = memoryview(await found.bytes_async())
            return ObjectBytes(data, size_bytes, latency_s, time.monotonic())

        return self._begin(partial(self._found, ask))

    def _check_file(self, directory: ObjectDirectory, name: str) -> None:
        """Refuse what is there and no regular file: obstore would wait for the writer of a FIFO."""
        with self._changing(), contextlib.suppress(FileNotFoundError):
            directory.check(name)

    def read_range(self, name: str, offset: int, length: int) -> Future[ObjectBytes | None]:
        """:meth:`read` without the size of the object and without times, which is faster."""
        import obstore

        async def ask() -> ObjectBytes:
            ends = {"start": offset, "end": offset + length}
            return ObjectBytes(memoryview(await obstore.get_range_async(self.opened, name, **ends)))

        return self._begin(partial(self._found, ask))

    async def _found(
        self, ask: Callable[[], Coroutine[Any, Any, ObjectBytes]]
    ) -> ObjectBytes | None:
        import obstore

        try:
            return await ask()
        except FileNotFoundError as exc:
            if _NO_BUCKET.search(str(exc)):
                raise
            return None
        except obstore.exceptions.BaseError as exc:
            if _NO_RANGE.search(first_line(exc)):
                return ObjectBytes(memoryview(b""))
            raise

    def put(self, name: str, data: bytes | bytearray, if_absent: bool) -> bool:
        """Write an object whole and durably; ``False`` if there is one already and ``if_absent``.

        Raises :class:`StoreUnavailableError`.
        """
        if self._directory is not None:
            with self._changing():
                return self._directory.put(name, data, if_absent)
        written = self._write(name, data, "create" if if_absent else "overwrite")
        if written is None:  # equal names have equal contents, so nothing is lost
            written = self._write(name, data, "overwrite")
        return bool(written)

    def _write(self, name: str, data: bytes | bytearray, mode: Any) -> bool | None:
        """Whether an object was written in a mode of obstore; ``None`` if the store lacks the mode."""
        import obstore

        async def ask() -> bool | None:
            try:
                put = obstore.put_async
                await put(self._write_to, name, bytes(data), mode=mode, use_multipart=False)
            except (
                obstore.exceptions.AlreadyExistsError,
                obstore.exceptions.PreconditionError,
            ):
                if mode == "overwrite":  # which has no condition: somebody holds the object
                    raise
                return False
            except FileNotFoundError as exc:
                if isinstance(mode, str) or _NO_BUCKET.search(str(exc)):
                    raise
                return False  # it was removed
            except (obstore.exceptions.BaseError, NotImplementedError) as exc:
                if mode == "overwrite" or not _NO_MODE.search(str(exc)):
                    raise
                return None
            return True

        return self.wait(self._begin(ask), WRITE_S)

    def get(self, name: str, most_bytes: int = SMALL_BYTES) -> Stored | None:
        """A whole object; ``None`` if there is none.

        Raises :class:`StoreUnavailableError`, also if it has more than ``most_bytes``.
        """
        if self._directory is not None:
            with self._changing():
                file = self._directory.get(name, most_bytes)
            if file is not None:
                self._refuse_size(name, file[1], most_bytes)
            return None if file is None else Stored(file[0], {})
        import obstore

        async def ask() -> Stored | None:
            try:
                found = await obstore.get_async(self._write_to, name)
            except FileNotFoundError as exc:
                if _NO_BUCKET.search(str(exc)):
                    raise
                return None
            self._refuse_size(name, int(found.meta["size"]), most_bytes)
            return Stored(bytes(await found.bytes_async()), _version(found.meta))

        return self.wait(self._begin(ask), WRITE_S)

    def _refuse_size(self, name: str, size_bytes: int, most_bytes: int) -> None:
        if size_bytes > most_bytes:
            raise StoreUnavailableError(
                f"{name} of remote {self.url} has {size_bytes:,} bytes, expected at most {most_bytes:,}: "
                "it is not what blendrag wrote; publish again, or choose another prefix"
            )

    def replace(self, name: str, data: bytes, before: Stored | None) -> bool:
        """Write an object in place of what :meth:`get` gave; ``False`` if it is another one meanwhile.

        Compare-and-swap where the store has it, under a lock in a directory; elsewhere the object is
        compared before and read after. Raises :class:`StoreUnavailableError`.
        """
        if self._directory is not None:
            with self._changing(), self._directory.locked(name, WRITE_S):
                return self._is_still(name, before) and self.put(name, data, if_absent=False)
        is_written = self._write(name, data, "create" if before is None else before.version)
        if is_written is None and self._is_still(name, before):
            self.put(name, data, if_absent=False)
        if not is_written:  # a repeated request finds what the first one has written
            found = self.get(name)
            return found is not None and found.data == data
        return True

    def _is_still(self, name: str, before: Stored | None) -> bool:
        now = self.get(name)
        return (now and now.data) == (before and before.data)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Name what goes wrong with a directory."""
        self.check_process()
        try:
            yield
        except OSError as exc:
            what = f"{exc.strerror}: {exc.filename}" if exc.filename else exc.strerror
            raise StoreUnavailableError(
                f"remote {self.url} fails ({what}); check its disk or mount"
            ) from exc

    def delete(self, *names: str) -> None:
        """Remove objects, if they are there. Raises :class:`StoreUnavailableError`."""
        if self._directory is not None:
            with self._changing():
                self._directory.delete(*names)
            return
        import obstore

        async def ask() -> None:
            with contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(self._write_to, names[0] if len(names) == 1 else names)

        self.wait(self._begin(ask), WRITE_S)

    def listing(self, prefix: str) -> Iterator[Listed]:
        """Objects below a prefix, in no particular order. Raises :class:`StoreUnavailableError`."""
        if self._directory is not None:
            with self._changing():
                yield from self._directory.listing(prefix)
            return
        import obstore

        pages = obstore.list(self._write_to, prefix)
        while True:
            page = self.wait(self._begin(partial(_next_page, pages)), WRITE_S)
            if page is None:
                return
            for meta in page:
                modified = meta["last_modified"].timestamp()
                yield Listed(meta["path"], int(meta["size"]), modified)

    def wait(self, result: Future[T], timeout_s: float) -> T:
        """The result of a request. Raises :class:`StoreUnavailableError` after ``timeout_s``."""
        try:
            return result.result(max(0.0, timeout_s))
        except FutureTimeout as exc:
            result.cancel()
            raise StoreUnavailableError(
                f"remote {self.url} gave no answer in time; check it, or allow more with "
                "BLENDRAG_REMOTE_TIMEOUT_S"
            ) from exc
        except CancelledError as exc:
            raise StoreUnavailableError(f"remote {self.url} was closed; open it again") from exc
        except StoreUnavailableError:
            raise
        except Exception as exc:
            raise self._named(exc) from exc

    def close(self) -> None:
        """Cancel what still runs and end the thread. Idempotent."""
        if self.is_inherited:
            return
        with self._lock:
            self._is_closed = True
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run on the loop, after those that wait already."""
        self.check_process()
        loop = self._running_loop()
        return asyncio.run_coroutine_threadsafe(self._in_turn(work), loop)

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._turns:
            return await work()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_closed:
                raise StoreUnavailableError(f"remote {self.url} was closed; open it again")
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._turns = asyncio.Semaphore(self.in_flight)
                thread = threading.Thread(
                    target=_run, args=(loop,), name="blendrag-remote", daemon=True
                )
                with starting_thread():
                    thread.start()
                self._loop, self._thread = loop, thread
            return self._loop

    def _named(self, exc: Exception) -> StoreUnavailableError:
        """An error of obstore in one sentence."""
        text = first_line(exc, 300)
        if _NO_BUCKET.search(str(exc)):
            return RemoteRefusedError(
                f"remote {self.url}: there is no such bucket, expected one that exists; create it or choose "
                "another --remote"
            )
        if _SKEWED.search(str(exc)):
            return RemoteRefusedError(
                f"remote {self.url} refuses requests of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, which is "
                "this machine's time, expected one within minutes of the remote's; set the clock"
            )
        code, causes = _CODE.search(str(exc)), _CAUSE.findall(str(exc))
        said = code[1] if code else causes[-1] if causes else text
        if _METADATA.search(text):
            said = "none in the environment"
        denied = type(exc).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
        if denied or _NO_ACCESS.search(text):
            return RemoteRefusedError(
                f"remote {self.url} refuses access or finds no credentials ({said}); set the variables of "
                "its service (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, "
                "AZURE_STORAGE_ACCOUNT_KEY) to an identity that may read and write there"
            )
        return StoreUnavailableError(
            f"remote {self.url} fails ({said}); check that it can be reached from here"
        )

    def sync(self, name: str) -> None:
        """Make an object of a directory durable that somebody else wrote.

        Raises :class:`StoreUnavailableError`.
        """
        if self._directory is not None:
            with self._changing():
                self._directory.sync(name)

    def redate(self, name: str) -> None:
        """Give an object of a directory the present time; object stores date by their own clock.

        Raises :class:`StoreUnavailableError`.
        """
        if self._directory is not None:
            with self._changing():
                self._directory.redate(name)

    def remove_unfinished(self, before: float) -> int:
        """Remove what killed writers left in a directory before a Unix time; its bytes.

        Object stores have no such thing. Raises :class:`StoreUnavailableError`.
        """
        if self._directory is None:
            return 0
        with self._changing():
            return self._directory.remove_unfinished(before)


def _opened(url: str, timeout_s: float) -> Any:
    """obstore's store for a URL."""
    place = urlsplit(url)
    scheme = place.scheme
    is_bucket = scheme in SCHEMES and scheme != "file" and bool(place.netloc)
    if not (is_bucket or (scheme == "file" and not place.netloc and place.path.startswith("/"))):
        raise InvalidInputError(
            f"remote {quoted(url)}{of_variable('remote', url)} is no object store, expected "
            "s3://bucket/prefix, gs://…, az://… or file:///directory"
        )
    try:
        import obstore.exceptions
        from obstore.store import LocalStore, from_url
    except ImportError as exc:
        raise InvalidInputError(
            f"remote {url} needs obstore, which is not installed; pip install 'blendrag[remote]'"
        ) from exc
    if scheme == "file":
        directory = Path(unquote(urlsplit(url).path))
        if not directory.is_dir():
            raise InvalidInputError(
                f"remote {url}: there is no directory {directory}, expected one that exists; create it or "
                "mount what it is on"
            )
        return LocalStore(directory)
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=CONNECT_S),
    }
    for variable in ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP"):
        if os.environ.get(variable, "").lower() in ("1", "true", "yes"):
            client["allow_http"] = True
    retry: Any = {
        "backoff": _BACKOFF,
        "max_retries": 10,
        "retry_timeout": timedelta(seconds=timeout_s),
    }
    try:
        return from_url(url, client_options=client, retry_config=retry)
    except (obstore.exceptions.BaseError, ValueError) as exc:
        raise InvalidInputError(
            f"remote {url} cannot be used ({first_line(exc)}), expected scheme://bucket/prefix"
        ) from exc


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Serve the loop until it is stopped; what still runs then is cancelled."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    finally:
        loop.close()


async def _next_page(pages: Any) -> Any:
    try:
        return await pages.__anext__()
    except StopAsyncIteration:
        return None


def _version(meta: Any) -> dict[str, str]:
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}
