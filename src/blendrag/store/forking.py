"""What a child process must not inherit: locks held by threads that are not there to release them.

An object that has locks says how it renews them; in a child they are renewed before anything else
runs there. Objects are held weakly.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """Something that may be used on both sides of a fork."""

    def renew_locks(self) -> None:
        """Replace every lock. Called in a child, while it has one thread."""


_objects: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_after_fork(renewable: Renewable) -> None:
    """Have ``renewable`` renewed in every child from now on."""
    _objects.add(renewable)


def _renew_all() -> None:
    for renewable in list(_objects):
        renewable.renew_locks()


os.register_at_fork(after_in_child=_renew_all)
