"""Short calls go first, long ones take turns, and a model that computes lets both in between its layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from blendrag.corpus import embedding_turns
from blendrag.corpus.embedding_turns import MODEL_PER_LONG, SHORT_PER_LONG, EmbeddingTurns
from blendrag.errors import RequestCancelled
from clocks import Clock
from server.live import until

pytestmark = pytest.mark.usefixtures("pool")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as made:
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def turns(clock: Clock) -> EmbeddingTurns:
    return EmbeddingTurns(clock)


def waiting(turns: EmbeddingTurns) -> int:
    return turns.counts[0]


class Callers:
    """Callers whose batches note their names in the order in which they run."""

    def __init__(self, turns: EmbeddingTurns, pool: ThreadPoolExecutor) -> None:
        self.turns, self.pool = turns, pool
        self.ran: list[str] = []

    def queue(self, name: str, is_short: bool, batches: int = 1) -> None:
        """Returns once it waits."""
        before = waiting(self.turns)
        self.pool.submit(self._embed, name, is_short, batches)
        until(lambda: waiting(self.turns) == before + 1)

    def _embed(self, name: str, is_short: bool, batches: int) -> None:
        for _ in range(batches):
            with self.turns.turn(is_short):
                self.ran.append(name)
                if batches > 1:  # others that take turns are back in the queue
                    until(lambda: waiting(self.turns) or len(self.ran) > 5)


def test_a_short_call_goes_before_long_ones(turns, pool) -> None:
    callers = Callers(turns, pool)
    with turns.turn(is_short=False):
        callers.queue("ingest", is_short=False)
        callers.queue("question", is_short=True)
    until(lambda: len(callers.ran) == 2)
    assert callers.ran == ["question", "ingest"]


def test_long_calls_take_turns_batch_by_batch(turns, pool) -> None:
    callers = Callers(turns, pool)
    with turns.turn(is_short=False):
        callers.queue("a", is_short=False, batches=3)
        callers.queue("b", is_short=False, batches=3)
    until(lambda: len(callers.ran) == 6)
    assert "".join(callers.ran) == "ababab"


def test_many_questions_do_not_keep_a_long_call_waiting_for_ever(turns, pool) -> None:
    callers = Callers(turns, pool)
    with turns.turn(is_short=True):
        callers.queue("long", is_short=False)
        for number in range(SHORT_PER_LONG + 4):
            callers.queue(f"question {number}", is_short=True)
    until(lambda: len(callers.ran) == SHORT_PER_LONG + 5)
    assert callers.ran.index("long") == SHORT_PER_LONG - 1  # the first question is the test's


def test_a_caller_that_gives_up_leaves_nothing(turns) -> None:
    def check() -> None:
        raise RequestCancelled("gone")

    with turns.turn(is_short=False), pytest.raises(RequestCancelled), turns.turn(True, check):
        raise AssertionError("it had no turn")
    assert turns.counts == (0, 0, 0.0)
    with turns.turn(is_short=True):
        pass


def test_a_batch_runs_between_two_layers_of_the_model(turns, pool) -> None:
    callers = Callers(turns, pool)
    turns.before_step()
    callers.queue("question", is_short=True)
    assert callers.ran == [], "the model computes a layer"
    turns.before_step()
    assert callers.ran == ["question"]
    turns.rest()


def test_a_batch_runs_between_calls_of_one_step_that_follow_each_other(turns, pool) -> None:
    callers = Callers(turns, pool)
    turns.before_step()
    callers.queue("question", is_short=True)
    turns.rest()
    turns.before_step()
    ran = [*callers.ran]
    turns.rest()
    assert ran == ["question"]


def test_the_model_gets_five_times_the_time_of_long_calls(turns, pool, clock) -> None:
    def batch() -> None:
        with turns.turn(is_short=False):
            clock.now += 1.0

    turns.before_step()
    for _ in range(2):
        pool.submit(batch)
    until(lambda: waiting(turns) == 2)
    turns.before_step()
    assert waiting(turns) == 1
    for _ in range(MODEL_PER_LONG):
        turns.before_step()
        assert waiting(turns) == 1, "not yet due"
        clock.now += 1.0
    turns.before_step()
    assert waiting(turns) == 0
    turns.rest()


def test_a_batch_runs_at_once_while_the_model_rests(turns) -> None:
    turns.before_step()
    turns.rest()
    with turns.turn(is_short=False):
        pass
    assert turns.counts == (0, 0, 0.0)


def test_the_model_does_not_wait_for_a_batch_that_hangs(turns, pool, monkeypatch) -> None:
    monkeypatch.setattr(embedding_turns, "MAX_MUTUAL_WAIT_S", 0.01)
    may_end, began = threading.Event(), threading.Event()

    def hang() -> None:
        with turns.turn(is_short=False):
            began.set()
            may_end.wait()

    pool.submit(hang)
    assert began.wait(60)
    for _ in range(1000):  # it waits once
        turns.before_step()
    assert turns.counts[1] == 1
    may_end.set()
    until(lambda: turns.counts[1] == 0)
    turns.rest()


def test_a_batch_does_not_wait_for_a_model_that_lets_nobody_in(turns, pool, clock) -> None:
    callers = Callers(turns, pool)
    turns.before_step()
    callers.queue("question", is_short=True)
    assert callers.ran == []
    clock.now += embedding_turns.MAX_MUTUAL_WAIT_S + 1
    until(lambda: callers.ran == ["question"])
    turns.rest()


def test_the_thread_of_the_model_embeds_without_waiting_for_itself(turns) -> None:
    turns.before_step()
    with turns.turn(is_short=True):
        pass
    turns.rest()


def test_a_queue_that_does_not_move_says_for_how_long(turns, pool, clock) -> None:
    callers = Callers(turns, pool)
    with turns.turn(is_short=True):
        callers.queue("question", is_short=True)
        clock.now += 30
        assert turns.counts == (1, 1, 30.0)
    until(lambda: turns.counts == (0, 0, 0.0))
