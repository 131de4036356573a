"""What another process must not get: locks held by threads that are not there to release them.

An object that has locks says how it renews them; in a forked child they are renewed before anything
else runs there. Objects are held weakly. To a spawned process nothing is sent.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn, Protocol

from blendrag.errors import InvalidInputError


class Renewable(Protocol):
    """Something that may be used on both sides of a fork."""

    def renew_locks(self) -> None:
        """Replace every lock. Called in a child, while it has one thread."""


class StaysHere:
    """An open store, or a part of one: neither pickled nor copied."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidInputError(
            f"an open {type(self).__name__} cannot be copied or sent to another process, expected its "
            "path; open it there"
        )


_objects: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_after_fork(renewable: Renewable) -> None:
    """Have ``renewable`` renewed in every child from now on."""
    _objects.add(renewable)


def _renew_all() -> None:
    for renewable in list(_objects):
        renewable.renew_locks()


os.register_at_fork(after_in_child=_renew_all)
