"""The remote tier over HTTP: a small S3 server whose faults cost a bounded wait and no wrong byte."""

from __future__ import annotations

import contextlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from blendrag.errors import CorruptKVError, StoreUnavailableError
from blendrag.store import open_store
from blendrag.store.remote import RemoteTier

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow


class S3(BaseHTTPRequestHandler):
    """GET with a range, HEAD, and PUT with ``If-None-Match``. ``fault`` sees every GET of KV."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        data = self.server.objects.get(self.path)
        if data is None or not self.path.startswith("/bucket"):
            code = "NoSuchKey" if self.path.startswith("/bucket") else "NoSuchBucket"
            return self.reply(404, f"<Error><Code>{code}</Code></Error>".encode())
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        where = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        fault = self.server.fault if "/kv/" in self.path else ""
        if fault == "503":
            return self.reply(503, b"<Error><Code>SlowDown</Code></Error>")
        if fault == "503 once":
            self.server.fault = ""
            return self.reply(503, b"")
        if fault == "hang":
            self.server.go_on.wait(20)
        if fault == "flip":
            part = bytes([part[0] ^ 1]) + part[1:]
        return self.reply(206, part, {"Content-Range": where}, fault)

    def do_HEAD(self):
        data = self.server.objects.get(self.path)
        return self.reply(404 if data is None else 200, data or b"", is_head=True)

    def do_PUT(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["If-None-Match"] == "*" and self.path in self.server.objects:
            return self.reply(412, b"")
        self.server.objects[self.path] = data
        return self.reply(200, b"", {"ETag": '"0"'})

    def reply(self, status, data, more=(), fault="", is_head=False):
        self.send_response(status)
        headers = {"ETag": '"0"', "Last-Modified": "Mon, 23 Nov 2026 20:00:00 GMT"} | dict(more)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if fault == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif fault == "throttle":
            with contextlib.suppress(OSError):
                for at in range(0, len(data), 100):
                    self.wfile.write(data[at : at + 100])
                    time.sleep(0.05)
        elif not is_head:
            with contextlib.suppress(OSError):
                self.wfile.write(data)

    def log_message(self, *args):
        """Say nothing."""


@pytest.fixture
def server(monkeypatch):
    made = ThreadingHTTPServer(("127.0.0.1", 0), S3)
    made.daemon_threads = True
    made.objects, made.fault, made.go_on = {}, "", threading.Event()
    thread = threading.Thread(target=made.serve_forever, args=(0.05,))
    thread.start()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.server_port}",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield made
    made.go_on.set()
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def machine(tmp_path):
    with contextlib.ExitStack() as opened:

        def make(name):
            def remote():
                return RemoteTier("s3://bucket/prefix", None, 1.0)

            return opened.enter_context(
                contextlib.closing(open_store(tmp_path / name, 0, 1 << 30, remote=remote))
            )

        yield make


def filled(lab, machine):
    """A machine whose local store is empty, over a remote with chunks 1 and 2."""
    one = machine("one")
    for number in (1, 2):
        lab.put(one, number)
    one.flush()
    return machine("two")


def test_chunks_come_back_over_http(lab, server, machine):
    two = filled(lab, machine)
    assert lab.right(two) == [1, 2]
    assert two.trouble == ""


def test_a_refused_request_is_repeated(lab, server, machine):
    two = filled(lab, machine)
    server.fault = "503 once"
    assert lab.is_right(two, 1)


@pytest.mark.parametrize("fault", ["503", "hang", "cut", "throttle", "flip"])
def test_a_fault_is_a_miss_after_a_bounded_wait(lab, server, machine, fault):
    two = filled(lab, machine)
    reader = lab.open(two, 1)
    server.fault = fault
    with pytest.raises((StoreUnavailableError, CorruptKVError)):
        lab.read(reader)
    assert lab.open(two, 1) is None
    assert bool(two.trouble) == (
        fault != "flip"
    )  # nothing else is asked, or only that chunk is not
    server.fault = ""
    if fault == "flip":
        assert lab.is_right(two, 2)


def test_a_missing_bucket_is_said_in_one_sentence(server):
    with pytest.raises(StoreUnavailableError, match="there is no such bucket"):
        RemoteTier("s3://elsewhere/prefix", None, 1.0)
