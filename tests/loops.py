"""Checks that an event loop runs while a model works, without clocks: the model waits for the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

from torch import nn

#: A loop that has not run by then is blocked.
BLOCKED_S = 60.0


async def turns_while(model: nn.Module, asked: Awaitable[Any]) -> bool:
    """Whether the loop released the first forward of ``model`` while ``asked`` was awaited."""
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
