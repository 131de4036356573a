"""Kill the driver of an ingest on Ray, with its cluster, once its workers have stored something.

``python -m lab.soak.ray_driver MODEL STORE DOCS PLACE`` is the driver.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from blendrag_ray.ingest import ingest_on_ray
from lab.soak.local_ray import local_ray
from lab.soak.ray_stores import digests, engine, payloads, rows, write_documents

ROOT = Path(__file__).resolve().parents[2]
#: Payloads that are stored when the driver is killed, and how long that may take on a busy machine.
STORED, PATIENCE_S = 3, 240.0


def crash_driver(folder: Path, model: Path, documents: int) -> int:
    """An ingest whose driver is killed, then one without Ray; payloads that were kept."""
    docs = write_documents(folder / "docs", documents)
    with engine(model, folder / "one") as one:
        one.ingest([docs]).whole()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "lab.soak.ray_driver",
        str(model),
        str(folder / "ray"),
        str(docs),
    ]
    place = tempfile.mkdtemp(prefix="r", dir="/tmp")  # which the driver cannot remove
    driver = subprocess.Popen([*command, place], env={**os.environ, "PYTHONPATH": paths})
    try:
        until = time.monotonic() + PATIENCE_S
        while len(payloads(folder / "ray")) < STORED:
            assert driver.poll() is None, "it ended before it was killed"
            assert time.monotonic() < until, "its workers store nothing"
            time.sleep(0.02)
    finally:
        started = psutil.Process(driver.pid)
        processes = [started, *started.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        driver.wait()
        psutil.wait_procs(processes)  # until then their locks say that somebody writes
        shutil.rmtree(place, ignore_errors=True)
    with engine(model, folder / "ray") as made:
        kept = payloads(folder / "ray")
        report = made.ingest([docs]).whole()
        now = payloads(folder / "ray")
    assert all(now[key] == put for key, put in kept.items())
    assert report.documents == documents
    assert digests(folder / "ray") == digests(folder / "one")
    assert [len(table) for table in rows(folder / "ray")] == [
        len(table) for table in rows(folder / "one")
    ]
    return len(kept)


if __name__ == "__main__":
    model, store, docs, place = map(Path, sys.argv[1:])
    with local_ray(folder=str(place)), engine(model, store) as made:
        ingest_on_ray(made, [docs], workers=1)
