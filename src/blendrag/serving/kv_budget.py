"""Memory for the KV of running requests, and how it grows with their answers.

An answer may go on to the model's context, so room for all of it is not allocated at once: a request begins
with room for its prompt and :data:`FIRST_TOKENS` more, and grows in steps that get longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

#: Tokens of an answer that room is allocated for before its first one, and the shortest step of growth.
FIRST_TOKENS = 128
#: A longer step is this part of what is held. All steps together copy an answer's KV less than this often.
STEP_PART = 8


def first_room(max_new_tokens: int) -> int:
    """New tokens that room is allocated for at first."""
    return min(max_new_tokens, FIRST_TOKENS)


@dataclass(eq=False)
class KVShare:
    """The KV of one running request."""

    prompt_tokens: int
    max_new_tokens: int
    token_bytes: int
    """Bytes for one token of all its sequences; 0 for a model whose requests run one after another."""
    check: Callable[[], None] = lambda: None
    """Raises if the request is over."""
    state_bytes: int = 0
    """Bytes of its running states, which do not grow."""
    is_aside: bool = False
    """Whether its KV was moved to where it takes none of this memory."""
    pinned_tokens: int = 0
    """Room that it no longer uses, in buffers that it shares with others."""
    room: int = field(init=False)
    """Tokens that it has room for."""
    used: int = field(init=False)
    """Tokens that it has, with the one to be decoded next."""

    def __post_init__(self) -> None:
        self.used = self.prompt_tokens
        self.room = self.prompt_tokens + first_room(self.max_new_tokens) + 1

    @property
    def has_room(self) -> bool:
        return self.used <= self.room and not self.is_aside

    @property
    def size_bytes(self) -> int:
        held = self.token_bytes * self.pinned_tokens
        return held if self.is_aside else held + self.state_bytes + self.token_bytes * self.room

    @property
    def next_room(self) -> int:
        """Tokens that it has room for after one more step of growth."""
        step = max(FIRST_TOKENS, self.room // STEP_PART)
        return min(self.room + step, self.prompt_tokens + self.max_new_tokens + 1)

    @property
    def needed_room(self) -> int:
        """Tokens that it must have room for to go on."""
        return self.room if self.used <= self.room else self.next_room

    @property
    def step_bytes(self) -> int:
        return self.token_bytes * (self.next_room - self.room)

    @property
    def needed_bytes(self) -> int:
        """Memory that it must get to go on."""
        more = self.token_bytes * self.needed_room
        return more + self.state_bytes if self.is_aside else more - self.token_bytes * self.room


class KVBudget:
    """What running requests hold together. Used on one thread."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._keepers: list[Callable[[int], int]] = []
        self._shares: list[KVShare] = []
        self.is_short = False
        """Whether a request waits for memory: then none should begin."""

    def add_keeper(self, kept: Callable[[int], int]) -> None:
        """``kept(n)`` drops KV that is kept for later until at most ``n`` bytes of it are left, as far as it
        can, and returns how many are left."""
        self._keepers.append(kept)

    @property
    def keepers(self) -> int:
        return len(self._keepers)

    def _kept(self, most_bytes: int) -> int:
        """The same for all keepers, which then have equal shares."""
        left = sum(kept(most_bytes) for kept in self._keepers)
        if left > most_bytes and len(self._keepers) > 1:
            left = sum(kept(most_bytes // len(self._keepers)) for kept in self._keepers)
        return left

    @property
    def size_bytes(self) -> int:
        return sum(share.size_bytes for share in self._shares)

    @property
    def kept_bytes(self) -> int:
        return self._kept(self.limit_bytes)

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.size_bytes - self.kept_bytes

    def hold(self, share: KVShare) -> None:
        """The request has KV from now on. Idempotent."""
        if share not in self._shares:
            self._shares.append(share)
            self._kept(max(0, self.limit_bytes - self.size_bytes))

    def release(self, share: KVShare) -> None:
        """The request has no KV any more. Idempotent."""
        if share in self._shares:
            self._shares.remove(share)

    def admits(self, share: KVShare) -> bool:
        """Whether the request may begin: it fits, and so does the next step of all that run."""
        if self.is_short:
            return False
        more = 0 if share in self._shares else share.size_bytes + share.step_bytes
        return self.fits(more + sum(each.step_bytes for each in self._shares))

    def fits(self, more_bytes: int) -> bool:
        """Whether so much more may be allocated."""
        left = self.limit_bytes - self.size_bytes - more_bytes
        return left >= 0 and self._kept(left) <= left
