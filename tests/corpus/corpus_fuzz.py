"""Damage copies of a small corpus at random and record wrong answers and unexpected exceptions.

Whatever bytes are damaged, a corpus returns what was put into it, less of it, or raises a
:class:`BlendragError`. ``make fuzz-corpus`` runs it for long.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blendrag.corpus.corpus import Corpus, check_corpus
from blendrag.corpus.database import FILE_NAME, TABLES
from blendrag.corpus.documents import Entry, NewEntry
from blendrag.corpus.manifest import Manifest
from blendrag.corpus.vectors import FILE_NAME as VECTORS
from blendrag.errors import BlendragError
from blendrag.text.chunking import Chunk, chunk_id_of
from blendrag.text.readers import Document

DIM = 8
MANIFEST = Manifest("m", "sig", "tok", "ns", 512, (1, 2), "<s>\n", "minilm-offline")


def vector_of(text: str) -> np.ndarray:
    """A unit vector that depends on the text alone."""
    rng = np.random.default_rng(int(chunk_id_of(text)[:8], 16))
    vector = rng.standard_normal(DIM).astype(np.float32)
    return vector / np.linalg.norm(vector)


def text_of(i: int, j: int) -> str:
    return f"Paragraph {j} of document {i}: " + f"the keeper of lamp {i * 7 + j} wrote a log. " * 3


def chunk_of(text: str, start: int = 0) -> Chunk:
    return Chunk(text, start, start + len(text), len(text.split()), chunk_id_of(text))


@dataclass
class Truth:
    """What was put."""

    places: set[tuple[str, str, str, int]] = field(default_factory=set)
    """Text, source, title and start of every chunk."""
    entries: dict[str, Entry] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)


def make_corpus(root: Path) -> Truth:
    """A corpus of documents and entries, closed again."""
    truth = Truth()
    with Corpus.open(root, create=True) as corpus:
        corpus.begin(MANIFEST)
        for i in range(5):
            texts = [text_of(i, j) for j in range(3)]
            source, title = f"doc{i}.md", f"Title {i}"
            starts = [100 * j for j in range(3)]
            chunks = [chunk_of(text, at) for text, at in zip(texts, starts, strict=True)]
            vectors = np.stack([vector_of(text) for text in texts])
            document = Document(source, "".join(texts), title, {"year": 1800 + i})
            corpus.put_document(document, f"digest {i}", chunks, vectors)
            truth.sources.add(source)
            truth.texts += texts
            truth.places |= {
                (text, source, title, at) for text, at in zip(texts, starts, strict=True)
            }
        for i in range(4):
            entry = Entry(f"id{i}", text_of(9, i), {"n": i}, parent="p", title=f"E{i}")
            vector = np.zeros(0, np.float32) if i == 3 else vector_of(entry.text)
            corpus.entries.put([NewEntry(entry, chunk_of(entry.text), f"e{i}", vector)])
            truth.entries[entry.id] = entry
            truth.texts.append(entry.text)
            truth.places.add((entry.text, entry.source, entry.title, 0))
        corpus.nearest(vector_of("x"), 1)
    return truth


# -- damage ---------------------------------------------------------------------------------------


def damage_bytes(path: Path, rng: random.Random) -> str:
    """Flip, zero, move or cut bytes of a file; returns what was done."""
    data = bytearray(path.read_bytes())
    used = [at for at in range(0, len(data), 64) if any(data[at : at + 64])]
    kind = rng.choice(["bit", "bit", "bit", "byte", "byte", "zero", "swap", "cut", "grow"])
    at = min(rng.choice(used) + rng.randrange(64), len(data) - 1)
    if kind == "bit":
        for _ in range(rng.choice([1, 1, 4])):
            data[at] ^= 1 << rng.randrange(8)
            at = min(rng.choice(used) + rng.randrange(64), len(data) - 1)
    elif kind == "byte":
        data[at] = rng.randrange(256)
    elif kind == "zero":
        size = rng.choice([16, 512, 4096])
        data[at : at + size] = bytes(min(size, len(data) - at))
    elif kind == "swap":
        size = rng.choice([64, 4096])
        other = rng.choice(used)
        one, two = data[at : at + size], data[other : other + size]
        size = min(len(one), len(two))
        data[at : at + size], data[other : other + size] = two[:size], one[:size]
    elif kind == "cut":
        del data[at:]
    else:
        data += rng.randbytes(rng.choice([1, 4096]))
    path.write_bytes(data)
    return f"{kind} at {at} of {path.name}"


def damage_row(path: Path, rng: random.Random, forge: bool) -> str:
    """Change a column of a row; with ``forge``, write a fitting digest, too."""
    table = rng.choice(TABLES)
    with sqlite3.connect(path) as connection:
        rows = connection.execute(f"SELECT {table.selected} FROM {table.name}").fetchall()
        if not rows:
            return f"no row of {table.name}"
        row = list(rng.choice(rows)[:-1])
        column = rng.randrange(1, len(row))
        name = list(table.columns)[column]
        strange: list[Any] = [0, 7, -(2**62), 1.5, "", "x", "[1]", "[" * 5000, b"", b"\0" * 33]
        row[column] = rng.choice(strange)
        digest = table.digest(row) if forge else rows[0][-1]
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(
            f"UPDATE OR IGNORE {table.name} SET {name} = ?, row_digest = ? WHERE {table.key} = ?",
            (row[column], digest, row[0]),
        )
    connection.close()
    return f"{'forged' if forge else 'changed'} {table.name}.{name} = {row[column]!r:.20}"


# -- reading --------------------------------------------------------------------------------------


def read_all(root: Path, truth: Truth, read_only: bool) -> Iterator[str]:
    """Use a corpus in every way; yields wrong answers."""
    with Corpus.open(root, read_only=read_only) as corpus:
        if corpus.manifest != MANIFEST:
            yield f"manifest {corpus.manifest}"
        sources = {source for source in corpus.sources() if not source.startswith("entry:")}
        if not sources <= truth.sources:
            yield f"sources {corpus.sources()}"
        for text in truth.texts:
            for found, _ in corpus.nearest(vector_of(text), 3):
                if (found.text, found.source, found.title, found.start) not in truth.places:
                    yield f"chunk {found}"
            for hit, _ in corpus.entries.nearest(vector_of(text), 3):
                entry = hit.entry
                known = truth.entries.get(entry.id)
                if known is None and (entry.text, entry.parent, entry.title, entry.start) not in (
                    truth.places
                ):
                    yield f"hit {entry}"
                if known is not None and entry != known:
                    yield f"entry {entry}"
        for match in corpus.chunk_index.find("\n\n".join(truth.texts)):
            if corpus.text(match.chunk_id) not in truth.texts:
                yield f"match {match}"
        for entry in corpus.entries.all():
            if truth.entries.get(entry.id) != entry:
                yield f"entry {entry}"
        for i in range(5):
            chunks = corpus.unchanged(f"doc{i}.md", f"digest {i}")
            if chunks is not None and [chunk.text for chunk in chunks] != [
                text_of(i, j) for j in range(3)
            ]:
                yield f"document {chunks}"
            if not {chunk.text for chunk in corpus.chunks_of(f"doc{i}.md")} <= set(truth.texts):
                yield f"chunks of {i}"
            known_vectors = corpus.known_vectors(f"Title {i}", [chunk_id_of(text_of(i, 0))])
            for vector in known_vectors.values():
                if not np.array_equal(vector, vector_of(text_of(i, 0))):
                    yield f"vector of {i}"
        if not set(corpus.dropped.texts().values()) <= set(truth.texts):
            yield "dropped"


def change(root: Path) -> None:
    """Put a document again, as an ingest would."""
    with Corpus.open(root) as corpus:
        texts = [text_of(1, j) for j in range(3)]
        document = Document("doc1.md", "".join(texts), "Title 1", {"year": 1801})
        chunks = [chunk_of(text, 100 * j) for j, text in enumerate(texts)]
        corpus.put_document(document, "digest 1", chunks, np.stack([vector_of(t) for t in texts]))
        corpus.remove_source("doc0.md")


class Fuzzing:
    """Copies of one corpus, damaged at random."""

    def __init__(self, place: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.place = place
        self.truth = make_corpus(place / "sound")
        self.done = self.refused = 0
        self.failures: list[str] = []

    def run(self, copies: int) -> None:
        for _ in range(copies):
            self.one()

    def one(self) -> None:
        root = self.place / "copy"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.place / "sound", root)
        database, forged = root / "corpus" / FILE_NAME, False
        kind = self.rng.random()
        if kind < 0.65:
            what = damage_bytes(database, self.rng)
        elif kind < 0.75:
            what = damage_bytes(root / "corpus" / VECTORS, self.rng)
        else:
            forged = kind > 0.85
            what = damage_row(database, self.rng, forged)
        self.done += 1
        reads: tuple[Callable[[], Any], ...] = (
            lambda: self._true(read_all(root, self.truth, True), what, forged),
            lambda: self._true(read_all(root, self.truth, False), what, forged),
            lambda: check_corpus(root),
            lambda: change(root),
            lambda: check_corpus(root, repair=True),
            lambda: self._true(read_all(root, self.truth, False), what, forged),
        )
        for read in reads:
            try:
                read()
            except BlendragError:
                self.refused += 1
            except KeyError as exc:  # a chunk that is gone
                if not isinstance(exc.args[0], str) or len(exc.args[0]) != 64:
                    self._failed(what)
            except Exception:
                self._failed(what)

    def _true(self, wrong: Iterator[str], what: str, forged: bool) -> None:
        for each in wrong:
            if not forged:  # a forged row may say anything, in proper types
                self.failures.append(f"{what}: {each}")

    def _failed(self, what: str) -> None:
        self.failures.append(f"{what}: {traceback.format_exc()}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="make fuzz-corpus", description=__doc__)
    parser.add_argument("--copies", type=int, default=20_000, help="damaged copies")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="blendrag-fuzz-") as place:
        fuzzing = Fuzzing(Path(place), given.seed)
        _say(f"fuzzing with seed {given.seed}")
        while fuzzing.done < given.copies:
            failed = len(fuzzing.failures)
            fuzzing.run(min(100, given.copies - fuzzing.done))
            for failure in fuzzing.failures[failed:]:
                _say(failure)
            failed = len(fuzzing.failures)
            _say(f"{fuzzing.done} copies, {fuzzing.refused} refused, {failed} failed")
    return bool(fuzzing.failures)


if __name__ == "__main__":
    sys.exit(main())
