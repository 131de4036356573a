"""Send hostile values in every field of every endpoint: each gets a status below 500 and one sentence.

Bodies are made from the models of the routes, so a new field is covered by itself; other requests are wrong
in their paths, queries, headers, or bytes. ``make fuzz-server`` runs it for long, and then no refusal may
take longer than :data:`LIMIT_S`, nor the process grow by more than :data:`LIMIT_BYTES`. What is not refused,
such as an ingest of 1 MB, takes what its work takes; the longest is told.

    make fuzz-server REQUESTS=1000 SEED=7
"""

from __future__ import annotations

import argparse
import json
import random
import select
import socket
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import quote

import psutil
from fastapi.routing import APIRoute
from pydantic import BaseModel

import scripted
import tiny
from blendrag.server.app import create_app
from blendrag.server.service import Limits
from blendrag.wording import MESSAGE_CHARS, printable
from server.live import Live, live

#: Longest time to an answer.
LIMIT_S = 5.0
#: Most memory beyond that of the server after its first answers.
LIMIT_BYTES = 1 << 30
KEY = "a-key-that-writes"
QUESTION = "Which company built ships near the town?"


class Raw(str):
    """JSON as it is, also what is none."""


#: Texts that some field reads as something else.
TEXTS = (
    "", " ", "\0", "\x1b[2J", "\x1b]0;x\x07", "\u202e", "\ud800", "\udfff\ud800", "\ufeff", "\u2028",
    "é" * 300,
    "😀" * 70, "x" * 5000, "word " * 5000, "9" * 5000, "-1", "1e999", "nan", "NaN", "inf", "0x10", "٣",
    "null",
    "first:" + "9" * 5000, "first:0", "first:", "first:²", "geometric:1e999", "geometric:nan",
    "geometric:0",
    "0.5," * 3000, "1,2,3", "1e308,1e308,1", "nan,nan,nan", "query(0-100)", "query(100-0)",
    "boundary(999999999)",
    "boundary(٣)", "hkvd(1)", "calibrated", "auto", "none", "any", "required", "full", "prefix", "reuse",
    "{" * 5000, "[" * 5000, '{"a":' * 2000, "<" * 3000, "<a>" * 2000, "</prompt>", "<user>x</user>",
    "<a/>", "<a x='" + "y" * 3000 + "'/>", "&#0;", "&#x110000;", "&" + "9" * 5000 + ";", "]]>",
    "<!DOCTYPE x>",
    "<!ENTITY a 'a'>", "<![CDATA[", "<?x?>", "%s%n{0}{x!r}", "{{ 7*7 }}", "{% raw %}", "<|start|>",
    "<|end|>",
    "../../etc/passwd", "/etc/passwd", "file:///etc", "entry:x", "learned:x", "a\nb", "a\tb", "x/y.txt",
    "\\", '"',
    "a" * 70_000, "\U000e0041", "ﷺ" * 500, "a\u0301" * 2000, "data:", "json_object", "image_url", "text",
    "function",
    "base64", "system", "assistant", "tool",
)  # fmt: skip
#: Values of other types.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 17, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**40, 0.5, 1.5, -0.0,
    1e-320, 1e-30, 1e308, -1e308, Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"),
    Raw("9" * 5000),
    Raw("9" * 4000), Raw("0." + "1" * 5000), Raw("1e-9999"), Raw("1" + "0" * 400), Raw("01"),
    Raw("undefined"),
    Raw("'x'"), Raw("[" * 500 + "]" * 500), Raw("[" * 50_000), Raw('{"a":' * 500 + "1" + "}" * 500),
    Raw('{"text": "x", "text": "y"}'), Raw('"\\ud800"'), Raw('"\\u0000"'), Raw('"\x01"'), Raw('"\\x"'),
    [], {}, [[]], [{}], [None], {"": None}, {"\ud800": 1}, {"x" * 3000: 1}, {"data": {"data": {}}},
    [""] * 3000, [0] * 3000, [[0]] * 3000, [{}] * 3000, ["x"] * 3000, [[["x"]]],
    {str(i): i for i in range(3000)},
    {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}, {"text": "x",
    "title": "\x1b"},
    {"type": "function", "function": {"name": "f"}}, {"function": {"name": "\ud800", "arguments": "{"}},
)  # fmt: skip
#: What makes bodies large; sent less often.
LARGE: tuple[Callable[[], Any], ...] = (
    lambda: [0] * 1_000_000,
    lambda: [{}] * 500_000,
    lambda: {f"k{i}": i for i in range(200_000)},
    lambda: "x" * 2_000_000,
    lambda: "\x1b" * 500_000,
    lambda: ["x"] * 300_000,
    lambda: Raw("[" * 900_000 + "]" * 900_000),
    lambda: Raw("9" * 2_000_000),
    lambda: "word " * 400_000,
    lambda: [[["x"]]] * 200_000,
    lambda: "<a>" * 300_000,
    lambda: "&amp;" * 300_000,
)
#: Bodies that are answered, by path, besides those made from the models.
KNOWN: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": QUESTION}], "retrieve": True, "blendrag": {"top_k": 1}},
        {"messages": [{"role": "user", "content": QUESTION}], "documents": ["a text", {"text": "x",
        "title": "t"}]},
        {"messages": [{"role": "user", "content": "<a p='x'/>hello"}], "schema": "s"},
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "auto",
        },
        {"messages": [{"role": "user", "content": "x"}], "stream": True,
        "stream_options": {"include_usage": True}},
        {"messages": [{"role": "user", "content": "x"}], "n": 2, "temperature": 1, "seed": 1,
        "logprobs": False},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "logprobs": True,
        "top_logprobs": 2},
        {"messages": [{"role": "user", "content": "x"}], "blendrag": {"mode": "blend", "policy": "hkvd",
         "schedule": "linear", "ratio": 0.5, "min_ratio": 0.1, "timeout_s": 100.0, "explain": True}},
    ),
    "/v1/completions": ({"prompt": "Hello"}, {"prompt": ["a", "b"]}, {"prompt": "x", "stream": True,
    "logprobs": 1}),
    "/v1/embeddings": ({"input": "Hello"}, {"input": ["a", "b"], "encoding_format": "base64"}),
    "/v1/ingest": ({"documents": [{"source": "a.txt", "text": "one two three", "metadata": {"k": 1}}]},),
}  # fmt: skip
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
RAW = tuple(
    text.encode("latin-1")
    for text in (
        HEAD + "Content-Length: 2\r\n\r\n{}",
        HEAD + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        HEAD + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        HEAD + "Content-Length: -1\r\n\r\n{}",
        HEAD.replace("1.1", "1.0") + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET http://x/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /v1/models HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        "GET /v1/models/%ff%00%0d%0a HTTP/1.1\r\nHost: x\r\n\r\n",
    )
)


@dataclass
class FieldFuzzReport:
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    """The slowest refusal."""
    longest_s: float = 0.0
    """The longest request that was answered."""
    grown_bytes: int = 0

    def fail(self, what: str, sent: bytes, got: bytes) -> None:
        self.failures.append(f"{what}\n  sent {_ends(sent)}\n  got  {_ends(got)}")


def _ends(data: bytes) -> str:
    return repr(data if len(data) < 1500 else data[:900] + b" ... " + data[-500:])


# -- bodies ---------------------------------------------------------------------------------------


def valid(kind: Any, draw: random.Random) -> Any:
    """A value of a type of the models."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {
            field.alias or name: valid(field.annotation, draw)
            for name, field in kind.model_fields.items()
            if field.is_required() or draw.random() < 0.1
        }
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return valid(draw.choice(args), draw)
    if origin is Annotated:
        return valid(args[0], draw)
    if origin is Literal:
        return draw.choice(args)
    if origin is list:
        return [valid(args[0], draw) for _ in range(draw.choice((1, 1, 2)))]
    if origin is dict:
        return {"a": valid(args[1], draw)}
    plain = {str: "x", int: 1, float: 0.5, bool: True, type(None): None}
    return plain[kind] if kind in plain else deepcopy(draw.choice(VALUES))


def hostile(draw: random.Random) -> Any:
    kind = draw.random()
    if kind < 0.01:
        return draw.choice(LARGE)()
    return draw.choice(TEXTS) if kind < 0.5 else deepcopy(draw.choice(VALUES))


def spoiled(body: Any, draw: random.Random) -> Any:
    """``body`` with one to three places changed."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = [*_places(body)]
        if not places or draw.random() < 0.02:
            return hostile(draw)
        inside, key = draw.choice(places)
        kind = draw.randrange(10)
        if kind == 0:
            del inside[key]
        elif kind == 1 and isinstance(inside, dict):
            name = draw.choice((*TEXTS, "x" * 1_000_000))
            inside[name] = hostile(draw)
        elif kind == 2 and isinstance(inside, dict):  # the same key twice
            again = Raw(f"{_json(inside[key])}, {json.dumps(key)}: {_json(hostile(draw))}")
            inside[key] = again
        elif kind == 3:
            inside[key] = [inside[key]]
        else:
            inside[key] = hostile(draw)
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    # elements of longer lists are one object
    if isinstance(value, dict | list) and len(value) < 100:
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _json(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(key)}: {_json(each)}" for key, each in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    return json.dumps(value)


# -- requests -------------------------------------------------------------------------------------


def routes(server: Live) -> list[tuple[str, str, Any]]:
    """Method, path and model of the body of each endpoint."""
    found = []
    for route in create_app(server.service).routes:
        if isinstance(route, APIRoute):
            body = route.body_field and route.body_field.field_info.annotation
            found += [(method, route.path, body) for method in sorted(route.methods or ())]
    return found


def made(method: str, path: str, body: Any, draw: random.Random) -> bytes:
    """One request to an endpoint, wrong somewhere."""
    content = b""
    headers = {"Host": "localhost", "Authorization": f"Bearer {KEY}"}
    if body is not None:
        known = KNOWN.get(path, ())
        given = (
            valid(body, draw) if draw.random() < 0.4 else json.loads(json.dumps(draw.choice(known)))
        )
        if draw.random() < 0.9:
            given = spoiled(given, draw)
        content = _json(given).encode("utf-8", "surrogatepass")
        headers["Content-Type"] = "application/json"
        if draw.random() < 0.03:
            at = draw.randrange(len(content) + 1)
            content = content[:at] + draw.randbytes(3) + content[at:]
    text = draw.choice(TEXTS)[:3000].encode("utf-8", "surrogatepass")
    path = path.replace("{name:path}", quote(text))
    if method == "DELETE" or draw.random() < 0.05:
        path += f"?{draw.choice(('source', 'source', 'x'))}={quote(text)}"
    if draw.random() < 0.05:
        path += quote(draw.choice(TEXTS)[:3000].encode("utf-8", "surrogatepass"))
    if draw.random() < 0.08:
        name = draw.choice(
            ("Authorization", "Content-Type", "Host", "X", "Accept", "Expect", "Cookie")
        )
        value = draw.choice(TEXTS)[:3000].encode("utf-8", "surrogatepass").decode("latin-1")
        headers[name] = "".join(c for c in value if c not in "\r\n\0")
    if draw.random() < 0.03:
        method = draw.choice(
            ("GET", "PUT", "PATCH", "TRACE", "x" * 3000, "OPTIONS", "HEAD", "DELETE")
        )
    headers["Content-Length"] = str(len(content))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return (
        f"{method} {path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode("latin-1") + content
    )


def raw(draw: random.Random) -> bytes:
    """Bytes that are almost a request."""
    data = bytearray(draw.choice(RAW))
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(data))
        kind = draw.randrange(3)
        if kind == 0:
            data[at] = draw.randrange(256)
        elif kind == 1:
            del data[at : at + draw.randrange(1, 9)]
        else:
            data[at:at] = draw.choice(
                (b"\r\n", b"\n", b" ", b"\0", b"\x80", b":", b"9" * 30, data[:at])
            )
        if not data:
            break
    return bytes(data)


def exchanged(port: int, sent: bytes, is_whole: bool = True) -> bytes:
    """What the server answers until it closes the connection; it would wait for the rest of a broken request,
    which ends soon."""
    got = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        with suppress(ConnectionError):  # refused before all was sent
            connection.sendall(sent)
            if not is_whole:
                select.select([connection], [], [], 0.1)
                connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                got += piece
    return bytes(got)


# -- the fuzz -------------------------------------------------------------------------------------


def check(report: FieldFuzzReport, sent: bytes, got: bytes, is_whole: bool) -> None:
    """Note a status of 500 or more, unless the request asked for a time limit, and other bad answers."""
    if not got:
        report.statuses["closed"] += 1
        if is_whole:
            report.fail("no answer", sent, got)
        return
    head, _, content = got.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        head, _, content = content.partition(b"\r\n\r\n")
    status = head[9:12].decode("latin-1")
    report.statuses[status] += 1
    if status >= "500" and not (status == "504" and b"timeout_s" in sent):
        report.fail(f"status {status}", sent, got)
    if b"internal error" in content or (b'"type": "server_error"' in content and status < "500"):
        report.fail("an internal error", sent, got)
    if status >= "400" and is_whole and b"application/json" in head and b" HEAD " not in sent[:5]:
        with suppress(ValueError):
            error = json.loads(content)["error"]
            message, param = error["message"], error["param"] or ""
            if len(message) > MESSAGE_CHARS + 300 or len(param) > 200:
                report.fail("a long message", sent, got)
            if printable(message + param) != message + param:
                report.fail("a message with control characters", sent, got)
            if "Traceback" in message:
                report.fail("a traceback", sent, got)


def fuzz(
    server: Live, requests: int, seed: int, tell: Callable[[str], object] = str
) -> FieldFuzzReport:
    """Send ``requests`` requests, one after another."""
    draw, report = random.Random(seed), FieldFuzzReport()
    endpoints = routes(server)
    with_body = [each for each in endpoints if each[2] is not None]
    process = psutil.Process()
    for _ in range(5):
        exchanged(server.port, made(*with_body[0], random.Random(1)))
    before = process.memory_info().rss
    for number in range(requests):
        kind = draw.random()
        is_raw = kind >= 0.92
        sent = (
            raw(draw)
            if is_raw
            else made(*draw.choice(with_body if kind < 0.8 else endpoints), draw)
        )
        began = time.perf_counter()
        got = exchanged(server.port, sent, not is_raw)
        took_s = time.perf_counter() - began
        is_done = got.startswith(b"HTTP/1.1 200")
        if is_done:
            report.longest_s = max(report.longest_s, took_s)
        else:
            report.slowest_s = max(report.slowest_s, took_s)
        report.grown_bytes = max(report.grown_bytes, process.memory_info().rss - before)
        if took_s > LIMIT_S and not is_done:
            tell(f"{took_s:.1f} s for {_ends(sent)}\n  got {_ends(got)}\n")
        check(report, sent, got, not is_raw)
        if (number + 1) % max(1, requests // 20) == 0:
            grown = f"{report.grown_bytes / 2**20:,.0f} MiB grown"
            tell(f"{number + 1:,}: {dict(report.statuses)}, slowest {report.slowest_s:.1f} s, {grown}, "
                 f"{len(report.failures)} failures\n")  # fmt: skip
    return report


@contextmanager
def fuzzed_server(root: Path) -> Iterator[Live]:
    """A tiny model that takes tools, with documents and a schema, and answers of a few tokens."""
    with scripted.engine([], root / "store", "yes", max_new_tokens=2) as engine:
        engine.ingest([tiny.document(0, 2), tiny.document(1, 2)])
        engine.add_schema(
            '<schema name="s">x <module name="a">a <param name="p" len="9"/></module></schema>'
        )
        limits = Limits(max_tokens=4, max_body_bytes=8 << 20)
        with live(engine, limits, keys=f"{KEY} write\n") as server:
            yield server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    tell = partial(print, end="", flush=True)
    with tempfile.TemporaryDirectory() as root, fuzzed_server(Path(root)) as server:
        report = fuzz(server, given.requests, given.seed, tell)
    for failure in report.failures[:20]:
        tell(f"{failure}\n")
    is_bad = report.failures or report.slowest_s > LIMIT_S or report.grown_bytes > LIMIT_BYTES
    tell(f"{given.requests:,} requests: {dict(sorted(report.statuses.items()))}; "
         f"{len(report.failures)} failures, the slowest refusal took {report.slowest_s:.1f} s, "
         f"the longest work {report.longest_s:.1f} s, "
         f"{report.grown_bytes / 2**20:,.0f} MiB more memory\n")  # fmt: skip
    return int(bool(is_bad))


if __name__ == "__main__":
    sys.exit(main())
