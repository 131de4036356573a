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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from blendrag.corpus.corpus import Corpus, check_corpus
from blendrag.corpus.database import FILE_NAME, TABLES
from blendrag.errors import BlendragError
from blendrag.text.chunking import chunk_id_of
from corpus.small_corpus import MANIFEST, Truth, change, make_corpus, text_of, vector_of

# -- damage -------------------------------------------------------------------------------------


def damage_bytes(path: Path, rng: random.Random) -> str:
    """Flip, overwrite, move or cut bytes of a file; returns what was done."""
    data = bytearray(path.read_bytes())
    used = [at for at in range(0, len(data), 64) if any(data[at : at + 64])]
    at, other = (min(rng.choice(used) + rng.randrange(64), len(data) - 1) for _ in range(2))
    kind = rng.choice(["bit", "bit", "bit", "zero", "copy", "cut"])
    size = min(rng.choice([16, 512, 4096]), len(data) - max(at, other))
    if kind == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "zero":
        data[at : at + size] = bytes(size)
    elif kind == "copy":
        data[at : at + size] = data[other : other + size]
    else:
        del data[at:]
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


# -- reading ------------------------------------------------------------------------------------


def raised_nothing(_: object) -> tuple[str, ...]:
    """No wrong answers: a check or a change has only errors to tell."""
    return ()


def wrong_answers(root: Path, truth: Truth, read_only: bool) -> Iterator[str]:
    """Use a corpus in every way."""
    with Corpus.open(root, read_only=read_only) as corpus:
        if corpus.manifest != MANIFEST:
            yield f"manifest {corpus.manifest}"
        documents = {source for source in corpus.sources() if not source.startswith("entry:")}
        if not documents <= {source for _, source, *_ in truth.places}:
            yield f"sources {documents}"
        for text in truth.texts:
            for found, _ in corpus.nearest(vector_of(text), 3):
                if (found.text, found.source, found.title, found.start) not in truth.places:
                    yield f"chunk {found}"
            for hit in (found.entry for found in corpus.entries.nearest(vector_of(text), 3)):
                is_chunk = (hit.text, hit.parent, hit.title, hit.start) in truth.places
                if truth.entries.get(hit.id) != hit and (hit.id in truth.entries or not is_chunk):
                    yield f"hit {hit}"
        for match in corpus.chunk_index.find("\n\n".join(truth.texts)):
            if corpus.text(match.chunk_id) not in truth.texts:
                yield f"match {match}"
        for entry in corpus.entries.all():
            if truth.entries.get(entry.id) != entry:
                yield f"entry {entry}"
        for i in range(5):
            texts = [text_of(i, j) for j in range(3)]
            chunks = corpus.unchanged(f"doc{i}.md", f"digest {i}")
            if chunks is not None and [chunk.text for chunk in chunks] != texts:
                yield f"document {chunks}"
            if not {chunk.text for chunk in corpus.chunks_of(f"doc{i}.md")} <= set(texts):
                yield f"chunks of {i}"
            for vector in corpus.known_vectors(f"Title {i}", [chunk_id_of(texts[0])]).values():
                if not np.array_equal(vector, vector_of(texts[0])):
                    yield f"vector of {i}"
        if not set(corpus.dropped.texts().values()) <= set(truth.texts):
            yield "dropped"


class CorpusFuzzing:
    """Copies of one corpus, damaged at random."""

    def __init__(self, place: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.place = place
        self.truth = make_corpus(place / "sound")
        self.refused = 0
        self.failures: list[str] = []

    def run(self, copies: int) -> None:
        for _ in range(copies):
            root = self.place / "copy"
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(self.place / "sound", root)
            self._damage_and_read(root)

    def _damage_and_read(self, root: Path) -> None:
        database, kind = root / "corpus" / FILE_NAME, self.rng.random()
        forged = kind > 0.85
        if kind < 0.75:
            what = damage_bytes(database, self.rng)
        else:
            what = damage_row(database, self.rng, forged)
        for read in (
            lambda: wrong_answers(root, self.truth, read_only=True),
            lambda: wrong_answers(root, self.truth, read_only=False),
            lambda: raised_nothing(check_corpus(root)),
            lambda: raised_nothing(change(root)),
            lambda: raised_nothing(check_corpus(root, repair=True)),
            lambda: wrong_answers(root, self.truth, read_only=False),
        ):
            try:
                for wrong in read():
                    if not forged:  # a forged row may say anything, in proper types
                        self.failures.append(f"{what}: {wrong}")
            except BlendragError:
                self.refused += 1
            except Exception as exc:
                if not (isinstance(exc, KeyError) and len(str(exc.args[0])) == 64):  # a lost chunk
                    self.failures.append(f"{what}: {traceback.format_exc()}")


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="make fuzz-corpus", description=__doc__)
    parser.add_argument("--copies", type=int, default=20_000, help="damaged copies")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="blendrag-fuzz-") as place:
        fuzzing = CorpusFuzzing(Path(place), given.seed)
        sys.stdout.write(f"fuzzing with seed {given.seed}\n")
        for done in range(0, given.copies, 100):
            failed = len(fuzzing.failures)
            fuzzing.run(copies := min(100, given.copies - done))
            sys.stdout.writelines(f"{failure}\n" for failure in fuzzing.failures[failed:])
            counts = f"{fuzzing.refused} refused, {len(fuzzing.failures)} failed"
            sys.stdout.write(f"{done + copies} copies, {counts}\n")
            sys.stdout.flush()
    return bool(fuzzing.failures)


if __name__ == "__main__":
    sys.exit(main())
