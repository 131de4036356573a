"""The scheduler: which call begins when, and how calls share one thread. Tests drive its steps."""

from __future__ import annotations

import gc
import math
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from greenlet import getcurrent

import tiny
from blendrag.engine.decoding import SeededDraws
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.serving import scheduler as scheduling
from blendrag.serving.coroutine import pause
from blendrag.serving.kv_budget import KVBudget, KVShare
from blendrag.serving.pending import Pending
from blendrag.serving.scheduler import Scheduler
from clocks import Clock
from loops import BLOCKED_S


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler(clock: Clock) -> Iterator[Scheduler]:
    """Its own thread does nothing until the test ends."""
    made = Scheduler(KVBudget(1000), clock=clock)
    with made.held():
        yield made
    made.close()


@pytest.fixture
def order() -> list[str]:
    """What happened, in order."""
    return []


def noted(order: list[str], name: str, **given: Any) -> Pending[None]:
    """A call that does nothing else."""
    return Pending(lambda: order.append(name), **given)


def decoding(
    order: list[str], name: str, tokens: int, size: int = 0, over: Callable[[], bool] | None = None
) -> Pending[None]:
    """A request that decodes so many tokens and needs ``size`` bytes for its KV."""

    def call() -> None:
        for _ in range(tokens):
            getcurrent().wait(None)
            order.append(name)

    share = KVShare(size, 0, 1)
    return Pending(call, lambda: True, over or (lambda: False), lambda: share)


def prefilling(
    order: list[str], name: str, layers: int, tick: Callable[[], object], **given: Any
) -> Pending[None]:
    """A request that computes a prefill of so many layers and decodes nothing."""

    def call() -> None:
        for _ in range(layers):
            pause()
            tick()
            order.append(name)

    return Pending(call, lambda: True, **given)


def costing(order: list[str], name: str, tokens: float) -> Pending[None]:
    """A request whose prefill computes so many tokens."""
    return noted(order, name, cost=lambda: tokens)


def stepped(scheduler: Scheduler) -> None:
    """Step until nothing waits or runs."""
    while scheduler.waiting or scheduler.running:
        scheduler.step()


# -- which call begins ----------------------------------------------------------------------------


def test_calls_run_in_order_each_to_its_end(scheduler, order):
    scheduler.submit(*(noted(order, name) for name in "abc"))
    for expected in ("a", "ab", "abc"):
        scheduler.step()
        assert "".join(order) == expected


def test_one_request_begins_between_two_steps(scheduler, order):
    scheduler.submit(*(decoding(order, name, 3) for name in "abc"))
    steps = []
    while scheduler.waiting or scheduler.running:
        scheduler.step()
        steps.append("".join(order))
        order.clear()
    assert steps == ["a", "ab", "abc", "bc", "c"]


def test_other_work_waits_until_no_request_runs(scheduler, order):
    scheduler.submit(decoding(order, "a", 3), noted(order, "alone"), decoding(order, "b", 1))
    stepped(scheduler)
    assert order == ["a", "a", "a", "alone", "b"]


def test_work_that_joins_runs_beside_requests(scheduler, order):
    scheduler.submit(decoding(order, "a", 2), noted(order, "beside", joins=lambda: True))
    stepped(scheduler)
    assert order == ["a", "beside", "a"]


def test_background_calls_run_when_nothing_else_waits_or_runs(scheduler, order):
    def request() -> None:
        scheduler.submit(noted(order, "later"), background=True)
        getcurrent().wait(None)
        order.append("request")

    scheduler.submit(noted(order, "background"), background=True)
    scheduler.submit(Pending(request), noted(order, "next"))
    for _ in range(5):
        scheduler.step()
    assert order == ["request", "next", "background", "later"]


def test_a_background_call_gives_way_before_its_next_layer_and_begins_again(scheduler, order):
    request = noted(order, "r")

    def call() -> None:
        for layer in range(3):
            pause()
            order.append(f"layer {layer}")
            if len(order) == 1:  # from another thread
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(scheduler.submit, request).result(BLOCKED_S)

    background = Pending(call)
    scheduler.submit(background, noted(order, "later"), background=True)
    for _ in range(4):
        scheduler.step()
    assert order == ["layer 0", "r", "layer 0", "layer 1", "layer 2", "later"]
    assert background.future.done()


def test_a_background_call_gives_way_to_another_engine_over_the_same_model(scheduler, order):
    wanted = [False, True]

    def call() -> None:
        order.append("begun")
        pause(lambda: wanted.pop() if wanted else False)
        order.append("done")

    scheduler.submit(Pending(call), background=True)
    for _ in range(3):
        scheduler.step()
    assert order == ["begun", "begun", "done"]


def test_all_calls_of_one_submission_wait_before_the_first_begins(scheduler):
    waiting: list[int] = []
    scheduler.submit(*(Pending(lambda: waiting.append(len(scheduler.waiting))) for _ in range(3)))
    stepped(scheduler)
    assert waiting == [2, 1, 0]


def test_at_most_max_running_requests_run(scheduler, order):
    scheduler.max_running = 2
    scheduler.submit(*(decoding(order, name, 3) for name in "abc"))
    scheduler.step()
    scheduler.step()
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 1)
    stepped(scheduler)
    assert "".join(order) == "a" + "ab" + "ab" + "bc" + "c" + "c"


def test_a_request_waits_until_its_kv_fits_and_those_after_it_wait_too(scheduler, order):
    small, large = decoding(order, "s", 1, 10), decoding(order, "l", 1, 800)
    running = decoding(order, "r", 3, 300)
    scheduler.budget.hold(running.share())
    running.future.add_done_callback(lambda _: scheduler.budget.release(running.share()))
    scheduler.submit(running, large, small)
    stepped(scheduler)
    assert order == ["r", "r", "r", "l", "s"]


def test_a_request_that_is_over_leaves_the_queue_and_holds_nobody_up(scheduler, order):
    over: list[str] = []
    scheduler.max_running = 1
    left, first = decoding(order, "left", 0, over=lambda: "left" in over), decoding(order, "a", 4)
    scheduler.submit(first, decoding(order, "b", 1), left)
    scheduler.step()
    over.append("left")
    scheduler.step()  # the one that is over takes no turn from the others
    assert left.future.done()
    assert not first.future.done()
    stepped(scheduler)
    assert order == ["a"] * 4 + ["b"]


def test_the_request_with_least_to_compute_begins_next(scheduler, order):
    for name, tokens in (("c", 30), ("a", 10), ("d", 40), ("b", 20)):
        scheduler.submit(costing(order, name, tokens))
    stepped(scheduler)
    assert "".join(order) == "abcd"


def test_a_long_request_is_overtaken_by_a_bounded_number_of_later_ones(scheduler, order):
    scheduler.submit(costing(order, "long", 1000))
    for number in range(3 * scheduling.MAX_OVERTAKEN):  # a short one arrives before each step
        scheduler.submit(costing(order, "s", number))
        scheduler.step()
    assert order.index("long") == scheduling.MAX_OVERTAKEN
    stepped(scheduler)


def test_of_long_requests_that_were_overtaken_the_oldest_begins_first(scheduler, order):
    scheduler.submit(costing(order, "old", 2000))
    scheduler.submit(costing(order, "young", 1000))
    for _ in range(4 * scheduling.MAX_OVERTAKEN):
        scheduler.submit(costing(order, "s", 1))
        scheduler.step()
    assert [name for name in order if name != "s"] == ["old", "young"]
    assert order.index("young") == scheduling.MAX_OVERTAKEN + 1
    stepped(scheduler)


def test_requests_of_one_submission_and_work_of_unknown_cost_keep_their_order(scheduler, order):
    scheduler.submit(costing(order, "batch 1", 90), costing(order, "batch 2", 5))
    scheduler.submit(noted(order, "work"))
    scheduler.submit(costing(order, "short", 10))
    stepped(scheduler)
    assert order == ["short", "batch 1", "batch 2", "work"]


# -- answers that run, and prefills that wait ------------------------------------------------------


def test_after_a_prefill_answers_go_first_for_a_part_of_its_time(scheduler, clock, order):
    """By a clock that ticks once a layer and once a step: what waits begins after three steps."""

    def ticking() -> None:
        for _ in range(12):
            getcurrent().wait(None)
            clock.now += 1
            order.append("t")

    scheduler.submit(Pending(ticking, lambda: True))
    scheduler.step()

    def tick() -> None:
        clock.now += 1

    for name in "AB":
        scheduler.submit(prefilling(order, name, 10, tick))
    stepped(scheduler)
    between = "".join(order).partition("A" * 4)[2].rpartition("A")[2].partition("B")[0]
    assert between == "t" * round(10 * scheduling.ANSWERS_SHARE)


def test_a_request_that_is_over_costs_the_answers_none_of_their_share_of_time(
    scheduler, clock, order
):
    def tick() -> None:
        clock.now += 1

    scheduler.submit(decoding(order, "t", 40))
    scheduler.step()
    scheduler.submit(prefilling(order, "A", 10, tick))
    while order.count("A") < 10:
        scheduler.step()
    scheduler.submit(prefilling(order, "B", 1, tick), decoding(order, "over", 0, over=lambda: True))
    for _ in range(4):  # no time passes
        scheduler.step()
    assert "B" not in order
    stepped(scheduler)


def test_requests_that_are_over_do_not_count_as_overtaking(scheduler, order):
    scheduler.submit(decoding(order, "t", 12))
    scheduler.step()
    scheduler.submit(costing(order, "long", 1000))
    for _ in range(scheduling.MAX_OVERTAKEN):
        scheduler.submit(decoding(order, "over", 0, over=lambda: True))
        scheduler.step()
    scheduler.submit(costing(order, "short", 1))
    stepped(scheduler)
    assert [name for name in order if name != "t"] == ["short", "long"]


def test_what_waits_begins_at_once_if_no_answer_runs(scheduler, clock, order):
    def tick() -> None:
        clock.now += 1

    scheduler.submit(prefilling(order, "A", 10, tick), prefilling(order, "B", 1, tick))
    for _ in range(2):
        scheduler.step()
    assert "".join(order) == "A" * 10 + "B"


class Users:
    """Users who ask again when they have an answer, by a clock. Prefills and answers have mixed lengths."""

    LAYERS, STEP_S, ROW_S = 8, 0.1, 0.01

    def __init__(self, asks: int, prefill_s: Sequence[float], tokens: Sequence[int]) -> None:
        self._clock, self._random = Clock(), random.Random(0)
        self._scheduler = Scheduler(KVBudget(0), clock=self._clock)
        self._prefill_s, self._tokens = prefill_s, tokens
        self._left = [asks] * 8
        self._asking = [*range(8)]
        self.ttft_s: list[float] = []
        self.token_s: list[float] = []
        self.total_s: list[float] = []
        ready = self._scheduler.room.ready

        def step(running: Sequence[Any]) -> Any:
            found = ready(running)
            rows = sum(not call.is_paused for call in found[0])
            self._clock.now += (self.STEP_S + rows * self.ROW_S) * bool(rows)
            return found

        self._scheduler.room.ready = step  # type: ignore[method-assign]

    def _request(self, user: int) -> Pending[None]:
        prefill_s, tokens = self._random.choice(self._prefill_s), self._random.choice(self._tokens)
        asked_at, clock = self._clock.now, self._clock

        def call() -> None:
            for _ in range(self.LAYERS):
                pause()
                clock.now += prefill_s / self.LAYERS
            first_at = clock.now
            for _ in range(tokens - 1):
                getcurrent().wait(None)
            self.ttft_s.append(first_at - asked_at)
            self.token_s.append((clock.now - first_at) / (tokens - 1))
            self.total_s.append(clock.now - asked_at)
            self._left[user] -= 1
            if self._left[user]:
                self._asking.append(user)

        share = KVShare(0, 0, 0)
        return Pending(call, lambda: True, share=lambda: share, cost=lambda: prefill_s)

    def run(self) -> Users:
        with self._scheduler.held():
            while self._asking or self._scheduler.running or self._scheduler.waiting:
                for user in self._asking:
                    self._scheduler.submit(self._request(user))
                self._asking.clear()
                self._scheduler.step()
        self._scheduler.close()
        return self


def p95(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


@pytest.mark.parametrize(
    ("prefill_s", "tokens"),
    [((12,), (8, 20, 40)), ((3.5,), (16, 32, 64)), ((1, 2, 3.5, 6, 12), (8, 16, 32, 64))],
    ids=["full prefills", "blended", "mixed"],
)
def test_eight_users_wait_little_longer_than_under_the_better_extreme(
    monkeypatch, prefill_s, tokens
):
    """One extreme computes all prefills first, the other begins none while an answer runs. No policy is near
    both in each: this one is near the better one in the time to the last token, and far from the worse one in
    TTFT and in the time per token."""

    def under(per_step: float, share: float, overtaken: int) -> Users:
        monkeypatch.setattr(scheduling, "PREFILL_PER_STEP", per_step)
        monkeypatch.setattr(scheduling, "ANSWERS_SHARE", share)
        monkeypatch.setattr(scheduling, "MAX_OVERTAKEN", overtaken)
        return Users(4, prefill_s, tokens).run()

    ours = scheduling.PREFILL_PER_STEP, scheduling.ANSWERS_SHARE, scheduling.MAX_OVERTAKEN
    chosen, prefills, answers = under(*ours), under(math.inf, 0, 0), under(6, math.inf, 0)
    assert p95(chosen.total_s) <= 1.3 * min(p95(prefills.total_s), p95(answers.total_s))
    assert p95(chosen.ttft_s) < p95(answers.ttft_s) * 1.01
    assert p95(chosen.token_s) < 0.5 * p95(prefills.token_s)


def test_a_call_within_a_call_begins_at_once(scheduler):
    outer = Pending(lambda: scheduler.run(lambda: scheduler.run(lambda: 7)))
    scheduler.submit(outer)
    scheduler.step()
    assert outer.future.result(0) == 7


# -- prefills that pause --------------------------------------------------------------------------


def test_a_prefill_computes_for_a_multiple_of_the_time_of_a_step(
    scheduler, clock, order, monkeypatch
):
    """By a clock that ticks once a layer and twice a step; a single step that takes longer does not count."""
    monkeypatch.setattr(scheduling, "PREFILL_PER_STEP", 5)

    def decode() -> None:
        while order.count("L") < 40:
            getcurrent().wait(None)
            clock.now += 30 if order.count("t") == 3 else 2
            order.append("t")

    def tick() -> None:
        clock.now += 1

    scheduler.submit(Pending(decode, lambda: True))
    for _ in range(2):
        scheduler.step()
    scheduler.submit(prefilling(order, "L", 40, tick))
    stepped(scheduler)
    assert "".join(order) == "tt" + ("L" * 10 + "t") * 4


def test_no_request_begins_while_a_prefill_is_paused(scheduler, order, monkeypatch):
    monkeypatch.setattr(scheduling, "PREFILL_PER_STEP", 0)
    scheduler.submit(decoding(order, "t", 9), prefilling(order, "L", 3, int))
    scheduler.submit(decoding(order, "n", 1))
    stepped(scheduler)
    assert "".join(order) == "t" + "tL" * 3 + "tn" + "t" * 4


def test_nobody_draws_from_the_seed_of_a_call_that_could_pause(scheduler, order, monkeypatch):
    """Function modes of torch are the thread's, so a call that has one does not pause."""
    monkeypatch.setattr(scheduling, "PREFILL_PER_STEP", 0)

    def seeded() -> None:
        with SeededDraws(3, torch.device("cpu")):
            pause()
            order.append("drew")
        pause()
        order.append("went on")

    scheduler.submit(decoding(order, "decoded", 3), Pending(seeded, lambda: True))
    stepped(scheduler)
    assert order == ["decoded", "drew", "decoded", "went on", "decoded"]


def test_texts_may_be_embedded_between_layers_and_tokens(scheduler, order, monkeypatch):
    monkeypatch.setattr(scheduler.embedding, "before_step", lambda: order.append("let in"))
    monkeypatch.setattr(scheduler.embedding, "rest", lambda: order.append("rests"))
    scheduler.submit(decoding(order, "t", 2), prefilling(order, "L", 2, int))
    stepped(scheduler)
    assert order == ["let in", "t", "let in", "let in", "t", "L", "let in", "L", "rests"]


# -- how calls end --------------------------------------------------------------------------------


def test_an_error_arrives_in_its_future_and_disturbs_nobody(scheduler, order):
    def fails() -> None:
        getcurrent().wait(None)
        raise ZeroDivisionError

    failing = Pending(fails, lambda: True)
    scheduler.submit(decoding(order, "a", 3), failing, decoding(order, "b", 2))
    stepped(scheduler)
    assert isinstance(failing.future.exception(0), ZeroDivisionError)
    assert sorted(order) == ["a"] * 3 + ["b"] * 2


def test_nothing_is_kept_of_a_failed_call(scheduler):
    made: list[weakref.ref[Any]] = []

    def fail() -> None:
        computed = torch.zeros(1)
        made.append(weakref.ref(computed))
        raise MemoryError("none left")

    scheduler.submit(Pending(fail))
    scheduler.step()
    gc.collect()
    assert made[0]() is None


def test_a_call_whose_future_was_cancelled_is_not_run(scheduler, order):
    cancelled = noted(order, "cancelled")
    scheduler.submit(cancelled, noted(order, "a"))
    cancelled.future.cancel()
    stepped(scheduler)
    assert order == ["a"]


def test_the_state_tells_what_waits_and_runs_and_since_when_nothing_moved(scheduler, clock, order):
    scheduler.embedding.stepped_at = clock.now
    scheduler.submit(decoding(order, "a", 2), noted(order, "b"))
    monitored = Pending(lambda: None)
    scheduler.submit(monitored)
    clock.now += 30
    state = scheduler.state
    assert (state.waiting, state.running, state.still_s) == (3, 0, 30.0)
    stepped(scheduler)
    clock.now += 30
    assert scheduler.state.still_s == 0.0


# -- its thread -----------------------------------------------------------------------------------


@pytest.fixture
def threaded() -> Iterator[Scheduler]:
    made = Scheduler()
    yield made
    made.close()


def test_one_thread_computes_and_errors_are_raised(threaded):
    assert len({threaded.run(threading.get_ident) for _ in range(3)} - {threading.get_ident()}) == 1
    with pytest.raises(ZeroDivisionError):
        threaded.run(lambda: 1 // 0)
    assert threaded.run(lambda: 8) == 8


def test_draining_waits_for_background_calls_and_ignores_cancelled_ones(threaded, order):
    cancelled = noted(order, "cancelled")
    with threaded.held():
        threaded.submit(noted(order, "background"), background=True)
        threaded.submit(noted(order, "a"), cancelled)
        cancelled.future.cancel()
    threaded.drain()
    assert order == ["a", "background"]


def test_closing_finishes_what_waits_and_drops_background_calls(threaded, order):
    dropped, late = noted(order, "background"), noted(order, "late")
    request = Pending(partial(threaded.submit, late, background=True))
    with ThreadPoolExecutor(1) as pool, threaded.held():
        threaded.submit(dropped, background=True)
        threaded.submit(noted(order, "a"), request)
        closing = pool.submit(threaded.close)
        while not dropped.future.cancelled():
            time.sleep(0.001)
    closing.result(BLOCKED_S)
    assert order == ["a"]
    assert request.future.done()
    assert late.future.cancelled()
    threaded.close()
    threaded.submit()  # nothing is refused
    with pytest.raises(BlendragError, match="closed"):
        threaded.run(lambda: None)


def test_closing_ends_a_background_call_before_its_next_layer(threaded, order):
    begun = threading.Event()

    def call() -> None:
        begun.set()
        while True:
            pause()

    endless = Pending(call)
    threaded.submit(endless, background=True)
    assert begun.wait(BLOCKED_S)
    threaded.close()
    assert endless.future.cancelled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_is_refused(threaded):
    threaded.run(lambda: None)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            threaded.run(lambda: None)
        except InvalidInputError as exc:
            code = 0 if tiny.one_sentence(str(exc)) and "spawn" in str(exc) else 2
        finally:
            threaded.close()
            sys.stdout.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert threaded.run(lambda: 7) == 7
