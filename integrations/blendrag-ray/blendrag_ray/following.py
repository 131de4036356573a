"""The corpus of a node that has none of its own: the one that the remote publishes."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from blendrag.config import Settings
from blendrag.corpus.shared import sharing, snapshots
from blendrag.corpus.shared.snapshots import Snapshot
from blendrag.errors import StoreUnavailableError

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine

log = logging.getLogger(__name__)

#: Longest time that a process waits while another one of its node follows.
TURN_S = 1800.0


def published(root: Path, settings: Settings) -> Snapshot | None:
    """The snapshot that :func:`follow_once` would follow; ``None`` if the store at ``root`` is used as it is.

    Raises :class:`BlendragError` as that does.
    """
    if settings.remote is None or not sharing.may_follow(root):
        return None
    with snapshots.remote_root(settings) as remote:
        try:
            found = snapshots.current(remote)
        except StoreUnavailableError:
            if not sharing.holds_corpus(root):
                raise
            return None
    return None if found is None else found[1]


def follow_once(root: Path, settings: Settings) -> bool:
    """Follow the published corpus into the store at ``root``, if it has none of its own; whether it may.

    The processes of a node take turns. Raises :class:`BlendragError` if there is neither a published corpus
    that can be read nor an earlier one.
    """
    if settings.remote is None:
        return False
    with _turn(root, settings):
        if not sharing.may_follow(root):
            return False
        with snapshots.remote_root(settings) as remote:
            try:
                sharing.follow(root, remote)
            except StoreUnavailableError as error:
                if not sharing.holds_corpus(root):
                    raise
                log.warning("the corpus is the one followed before: %s", error)
    return True


@contextmanager
def _turn(root: Path, settings: Settings) -> Iterator[None]:
    """Hold the lock of this user's processes on this node that follow into the store at ``root``."""
    name = sha256(str(root.absolute()).encode()).hexdigest()[:16]
    directory = settings.cache.expanduser()
    lock = filelock.FileLock(directory / f"follow-{name}.lock", TURN_S)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as exc:
        raise StoreUnavailableError(
            f"another process has been following the published corpus into store {root} for "
            f"{TURN_S / 60:.0f} minutes; end it, or wait and start again"
        ) from exc
    except OSError as exc:
        raise StoreUnavailableError(
            f"cache directory {directory} cannot be written ({exc.strerror}); make it writable, or name "
            "another one with BLENDRAG_CACHE"
        ) from exc
    try:
        yield
    finally:
        lock.release()


def keep_following(engine: BlendEngine) -> None:
    """Follow in the background until the process ends; processes of a node at different moments."""
    from blendrag.engine.publishing import FOLLOW_EVERY_S

    engine.keep_following(FOLLOW_EVERY_S * random.uniform(1.0, 1.5))
