"""Every call on the model, from :meth:`Scheduler.submit` to its end.

One thread computes. It repeats :meth:`Scheduler.step`:

- admit: if those that run had their share of time since the last prefill, and if it may run beside them, the
  call that waits and has least to compute begins;
- make room: each that runs gets room for its next token, or waits (:mod:`blendrag.serving.kv_room`);
- decode: one forward computes a token of each (:mod:`blendrag.serving.decode_step`);
- resume: each goes on to its next token or its end, and a paused prefill to its next pause.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from blendrag.corpus.embedding_turns import EmbeddingTurns
from blendrag.errors import InvalidInputError, NoThreadError, starting_thread
from blendrag.model.decode_weights import DecodeWeights
from blendrag.openmp import end_workers
from blendrag.serving.coroutine import Coroutine, JointForward
from blendrag.serving.decode_step import DecodeStep, decoded_together, may_decode_together
from blendrag.serving.kv_budget import KVBudget
from blendrag.serving.kv_pool import KVPool
from blendrag.serving.kv_room import KVRoom
from blendrag.serving.open_requests import OpenRequests
from blendrag.serving.pending import Pending, never
from blendrag.serving.row_limit import RowLimit
from blendrag.serving.thread_queue import QueueState

T = TypeVar("T")

log = logging.getLogger(__name__)

CLOSED = "this engine is closed; make a new BlendEngine"
#: A prefill computes this many times as long as the others decoded before it lets them decode again, so they
#: delay its first token by a sixth, and by the step that runs when it arrives.
PREFILL_PER_STEP = 6
#: After a prefill the running answers go first for this part of the time that it took.
ANSWERS_SHARE = 0.3
#: How many later calls that have less to compute may begin before one that waits.
MAX_OVERTAKEN = 2


def shortest(waiting: Sequence[Pending[Any]]) -> Sequence[Pending[Any]]:
    """The one of ``waiting`` that begins next, if there is any: the oldest that was overtaken too often, else
    the one that has least to compute. What has no cost, and what was submitted together, keeps its order."""
    starved = [each for each in waiting if each.overtaken >= MAX_OVERTAKEN]
    first = next(iter(starved or waiting), None)
    if first is None or starved or first.cost is None:
        return () if first is None else (first,)
    heads: dict[int, Pending[Any]] = {}
    for each in waiting:
        heads.setdefault(each.number, each)
    priced = [(each.cost(), each) for each in heads.values() if each.cost is not None]
    return (min(priced, key=lambda pair: pair[0])[1],)


class Scheduler:
    """Begins calls, the shortest first, and decodes for all that run. Background calls begin only while there
    are no others.

    Its thread starts with the first call. Thread-safe.
    """

    def __init__(
        self,
        budget: KVBudget | None = None,
        embedding: EmbeddingTurns | None = None,
        max_running: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``embedding``: batches of an embedder that computes on the same cores, let in between layers and
        tokens. ``max_running``: requests that decode together at most."""
        self.budget = budget or KVBudget(0)
        self.room = KVRoom(self.budget)
        self.embedding = embedding or EmbeddingTurns()
        self.max_running = max_running
        self._joint_forwards = WeakKeyDictionary[nn.Module, JointForward]()
        self.requests = OpenRequests(clock)
        """The clients whose requests these calls belong to, used on their event loop only."""
        self.closed = False
        self._clock = clock
        self._waiting: deque[Pending[Any]] = deque()
        self._background: deque[Pending[Any]] = deque()
        self._running: list[Coroutine] = []
        """The oldest first."""
        self._changed = threading.Condition()
        self._stepping: int | None = None
        """The thread that computes a step now."""
        self._is_held = False
        self._submitted_at = 0.0
        """When there was something to do after there was nothing."""
        self._steps_s = 0.0, 0.0
        """How long the last two steps took; one that begins to share chunks takes far longer than others."""
        self._stepped_at = 0.0
        """When the last step began or, once it has ended, ended."""
        self._answers_until = 0.0
        """When the running answers have had their share of time, and another call may begin."""
        self._submissions = 0
        self._limit = RowLimit()
        self._warned = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    # -- any thread -----------------------------------------------------------------------------

    def submit(self, *calls: Pending[Any], background: bool = False) -> None:
        """Queue ``calls``, all before the first begins.

        Those from within a call begin at once, and have ended when this returns. Background calls are
        cancelled once the scheduler is closed. Raises :class:`NoThreadError` if its thread cannot be started.
        """
        if not calls:
            return
        self._check_process()
        if self._stepping == threading.get_ident() and not background:
            for pending in calls:
                pending.settle()
            return
        end_workers()  # those of the thread that computes are to be the only ones
        with self._changed:
            if self.closed and not background:
                raise InvalidInputError(CLOSED)
            if self.closed:  # from a request that is being finished
                for pending in calls:
                    pending.future.cancel()
                return
            self._start()
            if not (self._waiting or self._running):
                self._submitted_at = self._clock()
            self._submissions += 1
            for pending in calls:
                pending.is_background, pending.number = background, self._submissions
            (self._background if background else self._waiting).extend(calls)
            self._changed.notify_all()

    def run(self, call: Callable[[], T], joins: Callable[[], bool] = never) -> T:
        pending = Pending(call, joins)
        self.submit(pending)
        return pending.future.result()

    def joint_forward(self, model: nn.Module) -> JointForward:
        """Where the calls on ``model`` decode together."""
        return self._joint_forwards.setdefault(model, JointForward())

    @property
    def waiting(self) -> Sequence[Pending[Any]]:
        """What has not begun, without background calls."""
        with self._changed:
            return tuple(self._waiting)

    @property
    def running(self) -> Sequence[Pending[Any]]:
        """What has begun and not ended, the oldest first."""
        with self._changed:
            return tuple(call.pending for call in self._running)

    @property
    def is_waited_for(self) -> bool:
        """Whether a call waits that is not in the background."""
        return bool(self._waiting)

    @property
    def state(self) -> QueueState:
        """How many wait and run, and since when nothing has moved."""
        with self._changed:
            waiting, running = len(self._waiting), len(self._running)
            moved_at = max(self._submitted_at, self.embedding.stepped_at)
        still_s = max(0.0, self._clock() - moved_at) if waiting or running else 0.0
        return QueueState("model", waiting, running, still_s)

    def drain(self) -> None:
        """Block until everything queued so far is done, background calls included."""
        self._check_process()
        with self._changed:
            running = (call.pending for call in self._running)
            queued = [*running, *self._waiting, *self._background]
        for pending in queued:
            with suppress(CancelledError):
                pending.future.exception()
        last = Pending(lambda: None)
        self.submit(last)
        last.future.result()
        with self._changed:  # a call is settled shortly before it is taken out
            self._changed.wait_for(lambda: all(call.pending is not last for call in self._running))

    def close(self) -> None:
        """Finish what waits and runs, drop background calls, end the thread. Idempotent."""
        if self._is_elsewhere:
            self.closed = True
            return
        with self._changed:
            self.closed = True
            for pending in self._background:
                pending.future.cancel()
            self._background.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within this context the scheduler's thread does nothing, and the caller may :meth:`step`, unless
        calls run that began on that thread. What begins here also ends here."""
        with self._changed:
            self._is_held = True
            self._changed.wait_for(lambda: self._stepping is None)
            may_step = not self._running
        try:
            yield
        finally:
            while may_step and self._running:
                self.step()
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    # -- the thread that computes ---------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._work, name="blendrag-engine", daemon=True)
        self._pid = os.getpid()
        try:
            with starting_thread():
                self._thread.start()
        except NoThreadError:
            self._thread = None
            raise

    def _check_process(self) -> None:
        """Refuse to work in a fork: it has no such thread and may hold a lock that is never released."""
        if self._is_elsewhere:
            raise InvalidInputError(
                f"this engine belongs to process {self._pid}, and this is its fork {os.getpid()}; make a new "
                "BlendEngine here, or start processes by spawn"
            )

    @property
    def _is_elsewhere(self) -> bool:
        return self._thread is not None and self._pid != os.getpid()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._is_held and (self._has_work or self.closed)
                )
                if not self._has_work:
                    self.room.close()
                    return
                self._stepping = threading.get_ident()  # before anybody can hold
            self.step()

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._background or self._running)

    def step(self) -> None:
        """Begin a call, decode a token of each that runs, and run each until its next one."""
        self._stepping = threading.get_ident()
        try:
            begun = self._admit()
            if begun is not None or self._running:
                self.embedding.before_step()
                was_over = begun is not None and begun.pending.is_over()
                if begun is not None:
                    self._prefill(begun)
                if not was_over:
                    self._decode_for_all()
        finally:
            if not self._running:
                self.embedding.rest()
                self._limit.reset()
            with self._changed:
                self._stepping = None
                self._changed.notify_all()

    def _decode_for_all(self) -> None:
        """Decode a token of each call that has room for it, then go on with prefills that paused for that."""
        paused = [call for call in self._running if call.is_paused]
        self._stepped_at = began = self._clock()
        ready, failed = self.room.ready(self._running)
        for call, why in failed.items():
            self._resume(call, why)
        steps = {call: call.step for call in ready if call.step is not None}
        outputs = self._decoded(steps) if steps else {}
        for call in ready:
            self._resume(call, outputs.get(call))
        self._stepped_at = self._clock()
        self._steps_s = self._steps_s[1], self._stepped_at - began
        for call in paused:
            self._prefill(call)

    def _prefill(self, call: Coroutine) -> None:
        """Begin ``call``, or go on with it, until it has its first token, pauses or ends."""
        began = self._clock()
        self._resume(call)
        now = self._clock()
        call.prefill_s += now - began
        if not call.is_paused:
            until = now + ANSWERS_SHARE * call.prefill_s
            self._answers_until = max(self._answers_until, until)  # a call that is over takes none

    def is_step_due(self, prefill: Coroutine) -> bool:
        """Whether other calls should decode before ``prefill`` computes its next layer."""
        waits = any(not call.is_paused for call in self._running if call is not prefill)
        due_s = PREFILL_PER_STEP * min(self._steps_s)
        return waits and self._clock() - self._stepped_at >= due_s

    def _admit(self) -> Coroutine | None:
        """The next call, about to begin; ``None`` if those that run must go on first.

        One that is over makes no other wait. None begins while a prefill is paused.
        """
        queue = self._waiting or self._background
        if self._running and (queue is self._background or any(c.is_paused for c in self._running)):
            return None
        with self._changed:
            candidates = list(queue)
        chosen: Iterable[Pending[Any]] = shortest(candidates)
        answers_first = self._clock() < self._answers_until
        if self._running and (answers_first or not all(map(self._may_join, chosen))):
            chosen = (pending for pending in candidates if pending.is_over())
        for pending in chosen:
            with self._changed:
                if pending in queue:  # closing clears background calls; no other thread takes any
                    if not pending.is_over():
                        for earlier in candidates[: candidates.index(pending)]:
                            earlier.overtaken += 1
                    queue.remove(pending)
                    self._running.append(Coroutine(self, pending))
                    return self._running[-1]
        return None

    def put_back(self, pending: Pending[Any]) -> None:
        """Queue a background call again that gave way, before the others."""
        with self._changed:
            if self.closed:
                pending.future.cancel()
            else:
                self._background.appendleft(pending)

    def leave(self, call: Coroutine) -> None:
        """Give back the KV of ``call``, which decodes no more."""
        self.room.leave(call)

    def _may_join(self, pending: Pending[Any]) -> bool:
        """Whether it may begin while others run: a request also needs memory for its KV."""
        if not pending.joins():
            return False
        if pending.share is None:
            return True
        requests = sum(call.pending.share is not None for call in self._running)
        return requests < self.max_running and self.budget.admits(pending.share())

    def _resume(self, call: Coroutine, output: Any = None) -> None:
        call.resume(output)
        if call.dead:
            with self._changed:
                self._running.remove(call)

    def _decoded(self, steps: dict[Coroutine, DecodeStep]) -> dict[Coroutine, Any]:
        """The output of each step that was computed, or its error if it cannot be computed alone."""
        outputs: dict[Coroutine, Any] = {}
        by_pool: dict[KVPool[Any], dict[Coroutine, DecodeStep]] = defaultdict(dict)
        for call, step in steps.items():
            by_pool[self.room.pool_of(call)][call] = step
        for pool, of_model in by_pool.items():
            try:
                with torch.inference_mode():
                    pool.share([step.kv for step in of_model.values()])
            except Exception as exc:
                self._decode_fewer(len(of_model), exc)
            by_weights: dict[DecodeWeights | None, dict[Coroutine, DecodeStep]] = defaultdict(dict)
            # those that began before the weights changed keep theirs
            for call, step in of_model.items():
                by_weights[step.weights][call] = step
            for alike in by_weights.values():
                outputs |= self._decoded_alike(alike, pool)
        self._limit.step_ended()
        return outputs

    def _decoded_alike(
        self, steps: dict[Coroutine, DecodeStep], pool: KVPool[Any]
    ) -> dict[Coroutine, Any]:
        """The same for steps that decode with the same weights."""
        outputs: dict[Coroutine, Any] = {}
        left = [*steps]
        while left:
            group = left[: self._limit.rows or 1]
            can_be_alone = len(group) > 1 or not steps[group[0]].kv.running
            joins = self._limit.rows and may_decode_together(pool, len(group))
            if can_be_alone and not joins:  # by its own forward
                del left[0]
                continue
            try:
                with torch.inference_mode():
                    made = decoded_together([steps[call] for call in group], pool)
            except Exception as exc:
                if can_be_alone:
                    self._decode_fewer(len(group), exc)
                    continue
                made = [exc]
            outputs |= zip(group, made, strict=True)
            del left[: len(group)]
        return outputs

    def _decode_fewer(self, rows: int, why: Exception) -> None:
        """A forward for ``rows`` requests has failed, and may fail again for the next token."""
        self._limit.failed(rows)
        if not self._warned:
            self._warned = True
            log.warning("a step of %d requests failed, so fewer decode together: %s", rows, why)
