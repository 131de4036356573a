"""Whether an event loop turns while a model works: the model waits for it, and no clock is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

from torch import nn

#: A loop that has not turned by then is blocked.
BLOCKED_S = 20.0


async def turns_while(model: nn.Module, asked: Awaitable[Any]) -> bool:
    """Whether the loop came to release the first forward of ``model`` while ``asked`` was awaited."""
    entered, released = threading.Event(), threading.Event()
    waited: list[bool] = []

    def wait(*_: Any) -> None:
        entered.set()
        if not waited:
            waited.append(released.wait(BLOCKED_S))

    hook = model.register_forward_pre_hook(wait)
    task = asyncio.ensure_future(asked)
    try:
        while not (entered.is_set() or task.done()):
            await asyncio.sleep(0.005)
        released.set()
        await task
    finally:
        hook.remove()
    return bool(waited) and waited[0]
