"""The corpus of a node that has none of its own: the one that the remote publishes."""

from __future__ import annotations

import logging
import random
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from blendrag.config import Settings
from blendrag.corpus import sharing, snapshots
from blendrag.corpus.database import DIRECTORY, FILE_NAME
from blendrag.errors import StoreUnavailableError

if TYPE_CHECKING:
    from blendrag.engine.resources import Resources

log = logging.getLogger(__name__)


def follow_once(root: Path, settings: Settings) -> bool:
    """Follow the published corpus into the store at ``root``, if it has none of its own; whether it may.

    The processes of a node take turns. Raises :class:`BlendragError` if there is neither a published corpus
    that can be read nor an earlier one.
    """
    if settings.remote is None:
        return False
    name = sha256(str(root.absolute()).encode()).hexdigest()[:16]
    with filelock.FileLock(Path(tempfile.gettempdir()) / f"blendrag-follow-{name}.lock"):
        if not sharing.may_follow(root):
            return False
        with snapshots.remote_root(settings) as remote:
            try:
                sharing.follow(root, remote)
            except StoreUnavailableError as error:
                if not (root / DIRECTORY / FILE_NAME).exists():
                    raise
                log.warning("the corpus is the one followed before: %s", error)
    return True


def keep_following(resources: Resources) -> None:
    """Follow in the background until the process ends; processes of a node at different moments."""
    from blendrag.engine.publishing import FOLLOW_EVERY_S, Follower

    Follower(resources, FOLLOW_EVERY_S * random.uniform(1.0, 1.5))
