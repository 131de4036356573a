"""Calls on the threads of one queue: counted, cancelled in the queue, abandoned while they run."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from blendrag.errors import NoThreadError, RequestCancelled
from blendrag.serving.thread_queue import QueueState, ThreadQueue
from clocks import Clock
from server.live import until


class Payload:
    """What a call works on."""


async def until_async(is_so) -> None:
    await asyncio.to_thread(until, is_so)


async def test_a_cancelled_call_leaves_the_queue_and_what_it_holds() -> None:
    queue, release = ThreadQueue("x", 1), threading.Event()
    running = asyncio.ensure_future(queue.run(lambda check: release.wait()))
    await until_async(lambda: queue.state.running == 1)
    payload = Payload()
    held = weakref.ref(payload)
    waiting = asyncio.ensure_future(queue.run(lambda check, held=payload: held))
    await until_async(lambda: queue.state.waiting == 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    del payload, waiting
    gc.collect()
    left = queue.state, held()
    release.set()
    assert await running
    assert (left[0].waiting, left[0].running, left[1]) == (0, 1, None)
    assert queue.state == QueueState("x", 0, 0, 0.0)


def test_a_closed_queue_ends_its_threads_after_their_calls() -> None:
    queue, release = ThreadQueue("x", 1), threading.Event()
    threads = [queue.submit(lambda: release.wait() and threading.current_thread())]
    queue.close()
    threads.append(queue.submit(threading.current_thread))
    release.set()
    assert len({each.result() for each in threads}) == 2
    queue.close()
    queue.close()
    for each in threads:
        each.result().join(60)
        assert not each.result().is_alive()
    assert queue.state == QueueState("x", 0, 0, 0.0)


async def test_a_running_call_is_told_that_its_caller_has_left() -> None:
    queue, left, ended = ThreadQueue("x", 1), threading.Event(), []

    def work(check) -> None:
        left.wait()
        try:
            check()
        except RequestCancelled:
            ended.append(True)

    running = asyncio.ensure_future(queue.run(work))
    await until_async(lambda: queue.state.running == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    left.set()
    await until_async(lambda: queue.state.running == 0)
    assert ended == [True]


async def test_a_caller_learns_when_its_call_begins_unless_it_has_left() -> None:
    queue, begun = ThreadQueue("x", 1), []
    assert await queue.run(lambda check: 3, lambda: begun.append(1)) == 3
    await asyncio.sleep(0)
    assert begun == [1]


def test_a_queue_tells_since_when_nothing_has_moved() -> None:
    clock, release = Clock(), threading.Event()
    queue = ThreadQueue("x", 1, clock)
    first = queue.submit(release.wait)
    until(lambda: queue.state.running == 1)
    second = queue.submit(lambda: None)
    clock.now += 200
    assert queue.state == QueueState("x", 1, 1, 200.0)
    release.set()
    first.result()
    second.result()
    until(lambda: queue.state == QueueState("x", 0, 0, 0.0))


def test_long_calls_count_as_moving_while_they_make_progress() -> None:
    clock, release = Clock(), threading.Event()
    queue = ThreadQueue("x", 1, clock, progress_at=lambda: 290.0)
    running = queue.submit(release.wait)
    until(lambda: queue.state.running == 1)
    clock.now = 300.0
    assert queue.state.still_s == 10.0
    release.set()
    running.result()


def test_a_call_that_finds_no_thread_is_never_run(monkeypatch) -> None:
    queue, ran = ThreadQueue("x", 1), []

    def fail(*given) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(NoThreadError):
            queue.submit(lambda: ran.append("refused"))
    assert queue.state.waiting == 0
    queue.submit(lambda: ran.append("run")).result()
    assert ran == ["run"]
