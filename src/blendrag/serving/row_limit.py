"""How many requests one forward decodes: fewer after a forward has failed, more again after others have not.

A forward may have failed because memory was short for a moment, or because it always fails for so many
requests. So a higher limit is tried, and each time that fails, the next trial comes later.
"""

from __future__ import annotations

import sys

#: Steps after which twice as many requests are tried, the first time.
STEPS_TO_TRIAL = 64


class RowLimit:
    """The most requests of one forward that decodes, none at first."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all failures."""
        self.rows = sys.maxsize
        """0: requests use their own forwards."""
        self._steps = 0
        self._steps_to_trial = STEPS_TO_TRIAL
        self._is_trial = False

    def failed(self, rows: int) -> None:
        """A forward for ``rows`` requests has failed: from now on half as many."""
        if self._is_trial:
            self._steps_to_trial *= 2
        self.rows, self._steps, self._is_trial = rows // 2, 0, False

    def step_ended(self) -> None:
        """A token of each request was decoded."""
        if self.rows == sys.maxsize:
            return
        self._steps += 1
        if self._steps >= self._steps_to_trial:
            self.rows = min(2 * self.rows or 1, sys.maxsize)
            self._steps, self._is_trial = 0, True
