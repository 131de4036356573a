"""How many requests one forward decodes after forwards have failed."""

from __future__ import annotations

import sys

from blendrag.serving.row_limit import STEPS_TO_TRIAL, RowLimit


def stepped(limit: RowLimit, steps: int) -> int:
    for _ in range(steps):
        limit.step_ended()
    return limit.rows


def test_more_requests_are_tried_after_steps_that_did_not_fail():
    limit = RowLimit()
    assert stepped(limit, 3 * STEPS_TO_TRIAL) == sys.maxsize
    for rows in (3, 1):
        limit.failed(rows)
    assert stepped(limit, STEPS_TO_TRIAL - 1) == 0
    assert [stepped(limit, 1), *(stepped(limit, STEPS_TO_TRIAL) for _ in range(2))] == [1, 2, 4]


def test_each_trial_that_fails_delays_the_next_one():
    limit = RowLimit()
    limit.failed(8)
    assert stepped(limit, STEPS_TO_TRIAL) == 8
    limit.failed(8)
    assert stepped(limit, 2 * STEPS_TO_TRIAL - 1) == 4
    assert stepped(limit, 1) == 8
    limit.reset()
    assert limit.rows == sys.maxsize
    limit.failed(8)
    assert stepped(limit, STEPS_TO_TRIAL) == 8
