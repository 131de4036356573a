"""A call on the model, until it has ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from blendrag.serving.kv_budget import KVShare

T = TypeVar("T")


class GaveWay(BaseException):
    """Ends a background call, because a request waits. The call is begun again later."""


def never() -> bool:
    return False


@dataclass(eq=False)
class Pending(Generic[T]):
    """A call that was submitted. Its result or its error arrives in ``future``."""

    call: Callable[[], T]
    joins: Callable[[], bool] = never
    """Whether it may begin while others run, asked on the thread that computes."""
    is_over: Callable[[], bool] = never
    """Whether it would end at once; then it waits for none of those before it."""
    share: Callable[[], KVShare] | None = None
    """The memory that a request needs; ``None`` for work that keeps no KV."""
    cost: Callable[[], float] | None = None
    """Tokens that it computes before its first one, about. Without it, a call keeps its place."""
    future: Future[T] = field(default_factory=Future)
    overtaken: int = 0
    """How many calls that came later have begun before it."""
    number: int = 0
    """The number of its submission, whose calls begin in order."""
    is_background: bool = False
    """Whether it gives way to every other call, and is begun again after it."""

    def settle(self) -> bool:
        """Run the call; ``False`` if it gave way. Raises nothing."""
        if self.is_background:  # can be cancelled until it has ended
            if self.future.done():
                return True
        elif not self.future.set_running_or_notify_cancel():
            return True
        try:
            result = self.call()
        except GaveWay:
            return False
        except BaseException as exc:
            with suppress(InvalidStateError):
                self.future.set_exception(exc)
        else:
            with suppress(InvalidStateError):
                self.future.set_result(result)
        return True
