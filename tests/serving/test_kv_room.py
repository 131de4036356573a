"""Which running calls get room for their next token if memory is short, the oldest first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blendrag.errors import RequestTimeout
from blendrag.serving import kv_budget
from blendrag.serving.coroutine import Coroutine
from blendrag.serving.kv_budget import KVBudget, KVShare
from blendrag.serving.kv_room import KVRoom
from blendrag.serving.pending import Pending
from blendrag.serving.scheduler import Scheduler


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "FIRST_TOKENS", 10)


class Room(KVRoom):
    """Its pool only notes what it is asked to do."""

    def __init__(self, limit_tokens: int) -> None:
        super().__init__(KVBudget(limit_tokens))
        self.log: list[str] = []
        self.running: list[Coroutine] = []
        self.failing = ""

    def add(self, name: str, check: Any = lambda: None, prompt_tokens: int = 9) -> Coroutine:
        """A call that has room for its prompt and 11 tokens, and needs more for its next one."""
        call = Coroutine(Scheduler(), Pending(lambda: None))
        call.kv = SimpleNamespace(name=name, is_part=False)  # type: ignore[assignment]
        call.step = object()  # type: ignore[assignment]
        call.share = KVShare(prompt_tokens, 1000, 1, check)
        call.share.used = call.share.room + 1
        self.budget.hold(call.share)
        self.running.append(call)
        return call

    def tried(self) -> tuple[str, dict[str, Exception]]:
        """Names of the calls that are ready, and errors of those that end."""
        ready, failed = self.ready(self.running)
        names = {call: call.kv.name for call in self.running}  # type: ignore[union-attr]
        return "".join(names[call] for call in ready), {
            names[call]: why for call, why in failed.items()
        }

    def end(self, call: Coroutine) -> None:
        assert call.share is not None
        self.running.remove(call)
        self.budget.release(call.share)

    def pool_of(self, call: Coroutine) -> Any:
        return SimpleNamespace(**{
            name: lambda kv, room=0, name=name: self._note(f"{name} {kv.name}")
            for name in ("reserve", "put_aside", "take_back")
        })  # fmt: skip

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what == self.failing:
            raise OSError("no space left")


def test_every_call_grows_while_there_is_memory():
    room = Room(60)  # each has 20 tokens and needs 10 more
    room.add("a")
    room.add("b")
    assert room.tried() == ("ab", {})
    assert room.log == ["reserve a", "reserve b"]
    assert room.budget.size_bytes == 60
    assert not room.budget.is_short


def test_the_newest_is_put_aside_and_comes_back_once_there_is_room():
    room = Room(65)
    a = room.add("a")
    room.add("b")
    room.add("c")
    assert room.tried() == ("ab", {})
    assert room.log == ["put_aside c", "reserve a", "reserve b"]
    assert room.budget.is_short
    assert not room.budget.admits(KVShare(1, 1, 1))
    assert room.tried() == ("ab", {})
    room.end(a)
    assert room.tried() == ("bc", {})
    assert room.log[3:] == ["take_back c"]
    assert not room.budget.is_short


def test_none_comes_back_before_an_older_one_that_waits():
    room = Room(245)
    room.add("a")
    room.add("b", prompt_tokens=189)  # its next step takes 25 tokens
    c = room.add("c", prompt_tokens=1)
    assert c.share is not None
    c.share.used = 5  # it has room
    for _ in range(2):
        assert room.tried() == ("a", {})
        assert room.log == ["reserve a", "put_aside c"]
        assert room.budget.fits(c.share.needed_bytes)


def test_one_call_goes_on_whatever_it_takes():
    room = Room(1)
    room.add("a")
    assert room.tried() == ("a", {})
    assert room.budget.size_bytes == 30


def test_nobody_exceeds_the_memory_while_a_prefill_is_paused():
    room = Room(1)
    room.add("a")
    room.add("b").is_paused = True
    assert room.tried() == ("", {})


def test_a_call_that_cannot_be_put_aside_stays_where_it_is():
    room = Room(45)
    room.add("a")
    b = room.add("b")
    room.failing = "put_aside b"
    assert room.tried() == ("a", {})  # beyond the limit: one always goes on
    assert not b.is_aside


def test_a_call_whose_room_cannot_be_allocated_fails_alone():
    room = Room(1000)
    room.add("a")
    room.add("b")
    room.failing = "reserve a"
    ready, failed = room.tried()
    assert ready == "b"
    assert isinstance(failed["a"], OSError)


def test_the_time_limit_of_a_call_that_waits_ends_it():
    def late() -> None:
        raise RequestTimeout(1.0)

    room = Room(50)
    room.add("a")
    room.add("b", check=late)
    ready, failed = room.tried()
    assert ready == "a"
    assert isinstance(failed["b"], RequestTimeout)
