"""A small Ray cluster of this process, for tests with the marker ``ray``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import unpickling


@contextmanager
def local_ray(cpus: int = 2, folder: str = "") -> Iterator[Any]:
    """Its workers can import the modules of the tests. Ray binds functions of pickle when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        path, root = os.environ.get("PYTHONPATH", ""), Path(__file__).resolve().parents[2]
        patch.setenv("PYTHONPATH", f"{root}:{root / 'tests'}:{path}")
        # at Ray's niceness of 15, a busy machine leaves its workers next to no time
        patch.setenv("RAY_worker_niceness", "0")
        folder = folder or tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets have short names
        with unpickling.allowed():
            ray = pytest.importorskip("ray.data") and sys.modules["ray"]
            ray.init(
                "local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=200 << 20,
                _temp_dir=folder,
                log_to_driver=False,
                logging_level="error",
            )
        try:
            yield ray
        finally:
            with unpickling.allowed():
                ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
