"""OpenMP threads of one thread of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import tiny
from blendrag.openmp import SPINS, end_workers, sleep_soon
from blendrag.serving.kv_budget import KVBudget
from blendrag.serving.scheduler import Scheduler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.__config__.parallel_info().find("OpenMP") < 0,
    reason="counts the threads of a process in /proc, and needs OpenMP",
)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
    end_workers()


def threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))


def compute() -> int:
    """A parallel operator. The number of the process's threads after it."""
    torch.ones(1 << 20).exp_()
    return threads_of_process()


def falls_below(threads: int) -> bool:
    """Whether the process has fewer threads soon; one that ends is counted for a moment more."""
    until = time.monotonic() + 10
    while threads_of_process() >= threads and time.monotonic() < until:
        time.sleep(0.001)
    return threads_of_process() < threads


def on_a_thread(call: Callable[[], bool]) -> bool:
    said: list[bool] = []
    thread = threading.Thread(target=lambda: said.append(call()))
    thread.start()
    thread.join()
    return said == [True]


def test_a_thread_ends_its_own_workers_and_gets_others_when_it_computes_again() -> None:
    before = compute()
    assert on_a_thread(lambda: compute() > before), "another thread has workers of its own"
    end_workers()
    assert falls_below(before)
    assert compute() == before


def test_a_thread_that_submits_a_call_leaves_the_cores_to_the_thread_that_computes() -> None:
    scheduler = Scheduler(KVBudget(1000))
    try:
        scheduler.run(compute)
        computed = compute()
        scheduler.run(lambda: None)
        assert falls_below(computed)
    finally:
        scheduler.close()


def test_a_thread_that_embedded_leaves_the_cores_to_the_thread_that_computes() -> None:
    computed = compute()
    held = tiny.HeldEmbedder()
    held.allow()
    held.embed(["text"])
    assert falls_below(computed)


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, str(SPINS)), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_sleep_soon_unless_the_environment_says_otherwise(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    sleep_soon()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_importing_the_package_sets_it_and_loads_no_torch() -> None:
    code = "import os, sys, blendrag; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == f"{SPINS} False\n", done.stderr
