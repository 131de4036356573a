"""How long a run still takes: no guess is better than a wild one."""

from __future__ import annotations

from blendrag.cli.progress import TimeLeft


def guesses(seconds: list[float], total: int, kept: int = 0) -> list[float | None]:
    """Before the first step, and after each of ``seconds``."""
    left, now = TimeLeft(), 0.0
    made = [left(kept, total, now)]
    for done, step in enumerate(seconds, kept + 1):
        now += step
        made.append(left(done, total, now))
    return made


def test_the_first_step_warms_up_and_is_no_measure() -> None:
    assert guesses([60.0, 1.0, 1.0, 1.0], total=10) == [None, None, None, 7.0, 6.0]


def test_steps_that_begin_a_context_count_as_often_as_they_come() -> None:
    assert guesses([9.0, 1.0, 5.0, 1.0, 5.0], total=11)[-1] == 6 * 3.0


def test_what_an_earlier_run_kept_is_no_step() -> None:
    assert guesses([60.0, 2.0, 2.0], total=200, kept=100) == [None, None, None, 194.0]


def test_nothing_is_left_at_the_end() -> None:
    assert guesses([9.0, 1.0, 1.0], total=3)[-1] is None
