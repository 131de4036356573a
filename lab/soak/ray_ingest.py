"""Kill workers of an ingest on Ray at random moments; nothing acknowledged may be lost or computed again.

``make crash-ray KILLS=100``; the tests run :func:`crash` with a few kills.
"""

from __future__ import annotations

import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import typer

from blendrag_ray.ingest import ingest_on_ray
from lab.soak.local_ray import local_ray
from lab.soak.ray_driver import crash_driver
from lab.soak.ray_stores import digests, engine, payloads, rows, save_model, write_documents

#: What kills strike, by the titles of Ray's processes.
VICTIMS = ("EncodeChunks", "EmbedChunks", "read_file")


class Killer(threading.Thread):
    """Kills workers of this process's cluster at moments that ``wait`` chooses."""

    def __init__(self, root: Path, kills: int, wait: Callable[[], float], seed: int) -> None:
        super().__init__(daemon=True)
        self.kills = 0
        self.acknowledged: dict[str, tuple[str, str]] = {}
        self._root, self._wanted, self._wait = root, kills, wait
        self._random = random.Random(seed)
        self._over = threading.Event()

    def run(self) -> None:
        while self.kills < self._wanted and not self._over.wait(self._wait()):
            victims = [p for p in psutil.Process().children(recursive=True) if _is_victim(p)]
            if victims:
                self.acknowledged |= payloads(self._root)
                self._random.choice(victims).send_signal(signal.SIGKILL)
                self.kills += 1

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.kills


def _is_victim(process: psutil.Process) -> bool:
    try:
        return any(name in "".join(process.cmdline()) for name in VICTIMS)
    except psutil.Error:
        return False


def crash(
    folder: Path,
    model: Path,
    documents: int,
    workers: int,
    kills: int,
    wait: Callable[[], float],
    seed: int,
) -> int:
    """One ingest during which workers are killed, compared with one of one process; the kills."""
    docs = write_documents(folder / "docs", documents, begin=1000 * seed)
    with engine(model, folder / "one") as one:
        expected = one.ingest([docs]).whole()
    killer = Killer(folder / "ray", kills, wait, seed)
    killer.start()
    with engine(model, folder / "ray") as made:
        report = ingest_on_ray(made, [docs], workers=workers).whole()
        kills = killer.stop()
        now = payloads(folder / "ray")
        lost = {key for key, put in killer.acknowledged.items() if now.get(key) != put}
        assert not lost, f"{len(lost)} chunks that were acknowledged are lost or put again"
        again = made.ingest([docs]).whole()
    assert report.chunks == expected.chunks == again.chunks_skipped
    assert (again.chunks_computed, again.documents_unchanged) == (0, documents)
    assert digests(folder / "ray") == digests(folder / "one")
    assert rows(folder / "ray") == rows(folder / "one")
    return kills


def main(
    kills: int = 100, per_run: int = 10, documents: int = 200, layers: int = 12, seed: int = 1
) -> None:
    """Runs of ``--per-run`` kills each, until there were ``--kills``."""
    with tempfile.TemporaryDirectory(prefix="crash-") as name:
        kept = crash_driver(Path(name), save_model(Path(name) / "model"), documents=30)
        typer.echo(f"driver killed; {kept} payloads kept, and the next ingest completed")
    with tempfile.TemporaryDirectory(prefix="crash-") as name, local_ray():
        model = save_model(
            Path(name) / "model", num_hidden_layers=layers, hidden_size=256, intermediate_size=512
        )
        done, moments = 0, random.Random(seed)
        while done < kills:
            began = time.perf_counter()
            wanted = min(per_run, kills - done)
            folder = Path(name) / f"run{seed}"
            folder.mkdir()
            how = documents, 2, wanted, lambda: moments.uniform(0, 5), seed
            done += crash(folder, model, *how)
            seed += 1
            typer.echo(
                f"{done} kills; nothing lost, nothing computed twice; {time.perf_counter() - began:.0f} s"
            )


if __name__ == "__main__":
    typer.run(main)
