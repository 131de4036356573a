"""A small S3 server in memory, with faults: for tests, and as a process of its own.

``python -m s3 [PORT [DIRECTORY]]`` keeps objects in a directory, so that they survive a kill.
``fault`` applies to every GET below ``/kv/`` and ``/corpus/``: 503, "503 once", hang, cut, throttle, trickle,
flip, "flip once". ``POST /fault`` sets it from outside.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "/bucket"
#: Bytes per second of the fault "throttle".
THROTTLED = 1_000_000


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


class S3(BaseHTTPRequestHandler):
    """GET with a range, HEAD, conditional PUT, DELETE of one or many, and lists of one page."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        if "list-type" in path.query:
            return self.listing(unquote(parse_qs(path.query).get("prefix", [""])[0]))
        data = self.server.objects.get(unquote(path.path))
        if data is None or not self.path.startswith(BUCKET):
            code = "NoSuchKey" if self.path.startswith(BUCKET) else "NoSuchBucket"
            return self.reply(404, f"<Error><Code>{code}</Code></Error>".encode())
        headers, part, status = {"ETag": etag(data)}, data, 200
        if wanted := self.headers["Range"]:
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            part, status = data[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        is_hit = "/kv/" in self.path or "/corpus/" in self.path
        fault = self.server.fault if is_hit else ""
        if fault == "flip once":  # in one of the next few
            fault = "flip" * (self.server.chance.random() < 0.4)
            self.server.fault = "" if fault else self.server.fault
        if fault == "503 once":
            self.server.fault, fault = "", "503"
        if fault == "503":
            return self.reply(503, b"<Error><Code>SlowDown</Code></Error>")
        if fault == "hang":
            self.server.go_on.wait(20)
        if fault == "flip" and part:
            part = flipped(part, self.server.chance)
            self.server.flips += 1
        return self.reply(status, part, headers, fault)

    def listing(self, prefix: str) -> None:
        found = "".join(
            f"<Contents><Key>{name.removeprefix(BUCKET + '/')}</Key><Size>{len(data)}</Size>"
            f"<ETag>{etag(data)}</ETag><LastModified>{self.server.modified(name)}</LastModified></Contents>"
            for name, data in sorted(self.server.objects.copy().items())
            if name.startswith(f"{BUCKET}/{prefix}")
        )
        self.reply(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())

    def do_HEAD(self) -> None:
        data = self.server.objects.get(unquote(self.path))
        found = {} if data is None else {"ETag": etag(data)}
        self.reply(404 if data is None else 200, data or b"", found, is_head=True)

    def do_PUT(self) -> None:
        data, path = self.body(), unquote(self.path)
        with self.server.lock:
            there = self.server.objects.get(path)
            if_match = self.headers["If-Match"]
            if (self.headers["If-None-Match"] == "*" and there is not None) or (
                if_match and (there is None or if_match != etag(there))
            ):
                return self.reply(412, b"")
            self.server.keep(path, data)
        return self.reply(200, b"", {"ETag": etag(data)})

    def do_DELETE(self) -> None:
        self.server.objects.pop(unquote(self.path), None)
        self.reply(204, b"")

    def do_POST(self) -> None:
        """Set the fault, or delete the objects that are named."""
        if "delete" in urlsplit(self.path).query:
            names = re.findall("<Key>(.*?)</Key>", self.body().decode())
            for name in names:
                self.server.objects.pop(f"{BUCKET}/{name}", None)
            gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return self.reply(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
        self.server.fault = self.body().decode()
        return self.reply(200, b"")

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def reply(
        self,
        status: int,
        data: bytes,
        more: dict[str, str] | None = None,
        fault: str = "",
        is_head: bool = False,
    ) -> None:
        self.send_response(status)
        headers = {"Last-Modified": "Mon, 23 Nov 2026 20:00:00 GMT"} | (more or {})
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if is_head:
            return
        with contextlib.suppress(OSError):
            if fault == "cut":
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
            elif fault in ("throttle", "trickle"):
                step, pause_s = (THROTTLED // 20, 0.05) if fault == "throttle" else (100, 0.5)
                for at in range(0, len(data), step):
                    with self.server.line:  # one line for all connections
                        self.wfile.write(data[at : at + step])
                        time.sleep(pause_s)
            else:
                self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def flipped(data: bytes, chance: random.Random) -> bytes:
    """With one bit changed."""
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, seed: int = 0, port: int = 0, directory: Path | None = None) -> None:
        super().__init__(("127.0.0.1", port), S3)
        self.objects: dict[str, bytes] = {}
        self._directory = directory
        self.written: dict[str, float] = {}
        """When, in Unix time."""
        self.fault, self.flips = "", 0
        self.go_on = threading.Event()
        self.lock, self.line = threading.Lock(), threading.Lock()
        self.chance = random.Random(seed)

    def keep(self, path: str, data: bytes) -> None:
        if self._directory is not None:
            unfinished = self._directory / "unfinished"
            unfinished.write_bytes(path.encode() + b"\n" + data)
            unfinished.rename(self._directory / hashlib.md5(path.encode()).hexdigest())
        self.objects[path] = data
        self.written[path] = time.time()

    def load(self) -> None:
        """What was kept before a kill."""
        for file in self._directory.glob("*") if self._directory is not None else ():
            if file.name != "unfinished":
                path, _, data = file.read_bytes().partition(b"\n")
                self.objects[path.decode()] = data
                self.written[path.decode()] = file.stat().st_mtime

    def modified(self, path: str) -> str:
        then = datetime.fromtimestamp(self.written.get(path, 0.0), UTC)
        return then.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def handle_error(self, *args: object) -> None:
        """Clients give up; that is what is tested."""

    @contextlib.contextmanager
    def running(self):
        thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self.go_on.set()
            self.shutdown()
            thread.join()
            self.server_close()


def environment(port: int) -> dict[str, str]:
    """Variables by which obstore finds the server."""
    return {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip


class Process:
    """The S3 server in a process of its own, which can be stopped and killed."""

    def __init__(self, directory: Path | None = None) -> None:
        """``directory``: in which it keeps its objects."""
        self._directory, self.port = directory, 0
        self.start()

    def start(self) -> None:
        """Start it, after a kill at the same port."""
        place = [] if self._directory is None else [str(self._directory)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "s3", str(self.port), *place],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        """SIGKILL, with whatever it was doing."""
        self._process.kill()
        self._process.wait()

    @contextlib.contextmanager
    def suffering(self, fault: str) -> Iterator[None]:
        if fault == "frozen":
            self._process.send_signal(signal.SIGSTOP)
        else:
            self._set(fault)
        try:
            yield
        finally:
            if fault == "frozen":
                self._process.send_signal(signal.SIGCONT)
            self._set("")

    def _set(self, fault: str) -> None:
        url = f"http://127.0.0.1:{self.port}/fault"
        with urllib.request.urlopen(url, data=fault.encode(), timeout=30):
            pass

    close = kill


if __name__ == "__main__":
    port, directory = (*sys.argv[1:], *("0", "")[len(sys.argv) - 1 :])
    made = Server(port=int(port), directory=Path(directory) if directory else None)
    made.load()
    sys.stdout.write(f"{made.server_port}\n")
    sys.stdout.flush()
    made.serve_forever()
