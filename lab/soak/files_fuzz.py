"""Change files at random, and write hostile ones: each becomes documents, or one sentence.

A file that takes longer than :data:`LIMIT_S` of CPU time, more memory than :data:`LIMIT_BYTES`, or raises
anything else, is a failure. ``make fuzz-files`` runs it for long, and ingests a folder of hostile files
beside good ones.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import psutil

import tiny
from blendrag.errors import InvalidInputError
from blendrag.model.gguf_header import count_weights
from blendrag.text.limited_reading import read_documents
from text import hostile_files as files

#: Limits for one file of some kilobytes; the time is CPU time of the reader, which a loaded machine does not
#: stretch.
LIMIT_S, LIMIT_BYTES = 5.0, 10**9

_WORDS = "Where the river meets the sea, the company of Dover built a lighthouse. "
_ENCODINGS = (
    "latin-1",
    "utf-16",
    "utf-16-le",
    "utf-32",
    "utf-8-sig",
    "cp1251",
    "shift_jis",
    "gb18030",
)


def gguf_file() -> bytes:
    """A header with a field, lists and two tensors, and their data."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    fields = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("llama.block_count") + struct.pack("<II", 4, 2),
        text("tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("b") + text("c"),
        text("scores") + struct.pack("<IIQ4f", 9, 6, 4, 1.0, 2.0, 3.0, 4.0),
    ]
    tensors = [text(f"blk.{n}.w") + struct.pack("<IQQIQ", 2, 8, 4, 0, 128 * n) for n in range(2)]
    made = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(fields + tensors)
    return made + bytes(-len(made) % 32 + 256)


#: Good files, each of which is changed.
GOOD: dict[str, bytes] = {
    "a.txt": (_WORDS * 20).encode(),
    "a.md": f"# A title #\n\n{_WORDS}\n\n```\n# code\n```\n\n| a | b |\n|---|---|\n| c | d |\n".encode(),
    "a.html": (
        f"<!doctype html><html><head><title>T</title></head><body><h1>H</h1><p>{_WORDS}<br>x</p>"
        f"<table><tr><td>a</td><td>b</td></tr></table><pre>x\n  y</pre><ul><li>{_WORDS}</ul></body></html>"
    ).encode(),
    "a.jsonl": "".join(
        f'{{"text": "{_WORDS}", "id": {n}, "title": "T", "tags": ["a", {{"b": null}}]}}\n'
        for n in range(3)
    ).encode(),
    "a.docx": files.docx(
        files.paragraph(_WORDS) + files.table(files.cell("a", 2) + files.cell("b", 1))
    ),
    "a.pdf": files.pdf(_WORDS, "More."),
    "a.gguf": gguf_file(),
}

#: Put into text at random places, some of them many times.
PIECES = (
    "<div>", "<td>", "</td>", "<p", "<!--", "-->", "<![CDATA[", "]]>",
    "<!DOCTYPE x [<!ENTITY e 'e'>]>", "&e;", "&#0;", "&#xD800;", "<script>", "</script>",
    "<title>", "<pre>", "<br>", "<a b=", "'", '"', "[", "]", "{", "}", ":", ",", "\\u", "\\ud800",
    "\\", "9" * 50, "-", "1e999", "NaN", "null", '"text"', '"id"', "# ", "#", "```", "~~~", " ",
    "\t", "\n", "\r", "\0", "\x1b[2J", "\u202e", "\ufeff", "é", "😀", "\u0300", "漢", " obj ",
    "endobj", " stream\n", "endstream", "<<", ">>", "/Kids", "/Length 99999999", "0 R ", "(", ")",
    "BT ", "Tj ", "xref", "trailer", "%%EOF", "%PDF-", "PK\x03\x04", "word/document.xml",
)  # fmt: skip


@dataclass
class FileFuzzReport:
    outcomes: Counter[str] = field(default_factory=Counter)
    """``read``, ``read in part`` and ``refused``, by suffix."""
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""


def changed(content: bytes, draw: random.Random) -> bytes:
    """``content`` with some changes: bits, numbers, pieces that are cut, doubled, moved or put in."""
    for _ in range(draw.choice((1, 1, 2, 6))):
        i, j = sorted(draw.randrange(len(content) + 1) for _ in range(2))
        j = min(j, i + draw.choice((1, 4, 40, 400)))
        piece = draw.choice(PIECES).encode() * draw.choice((1, 1, 1, 20, 2000))
        number = draw.randrange(2**64) >> draw.randrange(64)
        content = draw.choice(
            (
                content[:i] + content[j:],
                content[:i] + piece + content[i:],
                content[:i] + piece + content[j:],
                content[:i] + content[i:j] * draw.choice((2, 50, 1000)) + content[j:],
                content[:j] + content[i:],
                content[:i] + bytes([draw.randrange(256)]) + content[i + 1 :],
                content[:i] + draw.randbytes(j - i) + content[j:],
                content[:i] + struct.pack("<Q", number) + content[i + 8 :],
            )
        )[: 48 * 1024]
    return content


def made(draw: random.Random) -> tuple[str, bytes]:
    """Name and content of a file: a good one that was changed, also inside its archive or re-encoded."""
    name = draw.choice([*GOOD])
    content, kind = GOOD[name], draw.randrange(8)
    if name == "a.docx" and kind < 4:
        body = changed(files.paragraph(_WORDS).encode() * 3, draw).decode("utf-8", "replace")
        return name, files.docx(body)
    if name == "a.pdf" and kind < 2:
        drawn = changed(b"BT /F1 12 Tf 72 700 Td (x) Tj ET", draw).decode("latin-1")
        return name, files.pdf(drawn=drawn)
    if name in ("a.txt", "a.md", "a.html", "a.jsonl") and kind < 1:
        text = changed(content, draw).decode("utf-8", "replace")
        return name, text.encode(draw.choice(_ENCODINGS), "replace")
    if kind == 7:  # one piece again and again
        piece = "".join(draw.choice(PIECES) for _ in range(draw.choice((1, 1, 2, 3)))).encode()
        content = content[: draw.randrange(len(content))] + piece * (50 * 1024 // len(piece))
    return name, changed(content, draw)


def use(path: Path, report: FileFuzzReport) -> None:
    """Read a file, or check its header."""
    documents = 0
    suffix = path.suffix
    try:
        if suffix == ".gguf":
            count_weights(path)
        else:
            for document in read_documents(path):
                document.text.encode("utf-8", "surrogatepass")
                documents += 1
        report.outcomes[f"{suffix} read"] += 1
    except (InvalidInputError, ValueError) as refused:
        said = str(refused)
        if suffix != ".gguf" and not isinstance(refused, InvalidInputError):
            raise
        assert "\n" not in said, said
        assert len(said) < 2000, said
        report.outcomes[f"{suffix} {'read in part' if documents else 'refused'}"] += 1


def fuzz(count: int, seed: int, folder: Path, limit_s: float = LIMIT_S) -> FileFuzzReport:
    """Read ``count`` files, written to ``folder`` one after another. Files that fail stay there."""
    draw, report = random.Random(seed), FileFuzzReport()
    largest_before_bytes = _largest_child_bytes()
    for number in range(count):
        name, content = made(draw)
        path = folder / f"{number}{Path(name).suffix}"
        path.write_bytes(content)
        began_s = cpu_s()
        try:
            use(path, report)
        except Exception:
            report.failures.append(f"{path}\n{traceback.format_exc()}")
            continue
        took_s = cpu_s() - began_s
        if took_s > report.slowest_s:
            report.slowest_s, report.slowest = took_s, f"{path.name} of {len(content):,} bytes"
        if took_s > limit_s:
            report.failures.append(f"{path} took {took_s:.1f} s")
        else:
            path.unlink()
    peak_bytes = _largest_child_bytes()
    if peak_bytes > max(LIMIT_BYTES, largest_before_bytes):
        report.failures.append(f"a reader took {peak_bytes:,} bytes")
    return report


def _largest_child_bytes() -> int:
    """Peak memory of the largest child that ended, those of other tests included."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def cpu_s() -> float:
    """CPU time of this process and its children, those included that ended."""
    this = psutil.Process()
    times = [this.cpu_times(), *(child.cpu_times() for child in this.children())]
    return sum(each.user + each.system for each in times) + sum(times[0][2:4])


def ingest_hostile(root: Path, good: int) -> tuple[set[str], dict[str, str], float]:
    """Ingest all hostile files beside ``good`` good ones: names of the stored ones, failures, seconds."""
    folder = root / "files"
    files.write_hostile(folder)
    contents = files.good_files(lambda number: f"Place{number} lies near the sea. " * 20)
    for name, content in islice(contents, good):
        (folder / name).write_bytes(content)
    began = time.perf_counter()
    with tiny.engine(tiny.llama(), root / "store") as engine:
        report = engine.ingest([folder])
        found = engine.corpus
        assert found is not None
        stored = {Path(each.source.partition("#")[0]).name for each in found.documents()}
    failures = [failure.partition(": ") for failure in report.failures]
    sentences = {Path(path).name: said for path, _, said in failures}
    assert len(sentences) == len(failures)
    return stored, sentences, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--good", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-files-"))
    report = fuzz(given.files, given.seed, folder)
    for outcome, count in sorted(report.outcomes.items()):
        sys.stdout.write(f"{count:>8,} {outcome}\n")
    sys.stdout.write(f"slowest: {report.slowest_s:.1f} s, {report.slowest}\n")
    stored, sentences, took_s = (
        ingest_hostile(folder / "hostile", given.good) if given.good else ((), {}, 0)
    )
    for name in sorted(sentences):
        sys.stdout.write(f"{name}: {sentences[name]}\n")
    good = sum(name.startswith("good-") for name in stored)
    if good != given.good:
        report.failures.append(f"{given.good - good} good files were not stored")
    sys.stdout.write(
        f"{good} of {given.good} good files stored in {took_s:.0f} s, "
        f"{len(sentences)} of {len(files.HOSTILE)} hostile ones refused, "
        f"{len(report.failures)} failures\n"
    )
    sys.stdout.write("\n".join(report.failures[:5]))
    shutil.rmtree(folder / "hostile", ignore_errors=True)
    if not report.failures:
        folder.rmdir()
    return min(len(report.failures), 1)


if __name__ == "__main__":
    sys.exit(main())
