"""The worker's thread: requests first, background work in between."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

import tiny
from blendrag.engine.worker import Worker
from blendrag.errors import BlendragError, InvalidInputError


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("test")
    yield made
    made.close()


def test_requests_run_before_background_work(worker: Worker) -> None:
    order: list[str] = []
    gate = threading.Event()
    worker.submit(gate.wait)
    for i in range(2):
        worker.submit(lambda i=i: order.append(f"back{i}"), background=True)
    for i in range(2):
        worker.submit(lambda i=i: order.append(f"front{i}"))
    gate.set()
    worker.drain()
    assert order == ["front0", "front1", "back0", "back1"]


def test_work_may_call_work_and_errors_come_back(worker: Worker) -> None:
    assert worker.run(lambda: worker.run(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        worker.run(lambda: 1 // 0)
    assert worker.run(lambda: 8) == 8


def test_background_work_of_a_request_waits_for_its_answer(worker: Worker) -> None:
    order: list[str] = []

    def request() -> None:
        worker.submit(lambda: order.append("encoded"), background=True)
        order.append("answered")

    worker.run(request)
    worker.drain()
    assert order == ["answered", "encoded"]


def test_closing_finishes_the_running_request_and_drops_background_work(worker: Worker) -> None:
    gate, started = threading.Event(), threading.Event()

    def request() -> tuple[str, bool]:
        started.set()
        assert gate.wait(5)
        return "answered", worker.submit(lambda: None, background=True).cancelled()

    running = worker.submit(request)
    assert started.wait(5)
    queued = worker.submit(lambda: None, background=True)
    closing = threading.Thread(target=worker.close)
    closing.start()
    while not worker.closed:
        time.sleep(0.001)
    gate.set()
    assert running.result(5) == ("answered", True)
    closing.join(5)
    assert not closing.is_alive()
    assert queued.cancelled()
    worker.close()
    with pytest.raises(BlendragError, match="closed"):
        worker.submit(lambda: None)


def test_draining_ignores_a_cancelled_request(worker: Worker) -> None:
    gate, started = threading.Event(), threading.Event()
    worker.submit(lambda: (started.set(), gate.wait(5)))
    assert started.wait(5)
    queued = worker.submit(lambda: None)
    threading.Timer(0.1, lambda: (queued.cancel(), gate.set())).start()
    worker.drain()


def test_an_idle_worker_keeps_nothing_of_a_failed_call(worker: Worker) -> None:
    class Computed:
        pass

    made: list[weakref.ref[Computed]] = []

    def fail() -> None:
        computed = Computed()
        made.append(weakref.ref(computed))
        raise MemoryError("none left")

    with pytest.raises(MemoryError):
        worker.run(fail)
    worker.drain()
    gc.collect()
    assert made[0]() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_is_refused_in_a_sentence_and_does_not_hang(worker: Worker) -> None:
    worker.run(lambda: None)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            worker.run(lambda: None)
        except InvalidInputError as exc:
            code = 0 if tiny.one_sentence(str(exc)) and "spawn" in str(exc) else 2
        finally:
            worker.close()
            sys.stdout.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.run(lambda: 7) == 7
