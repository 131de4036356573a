"""Profiles an engine's model on this machine (``blendrag profile``): measured once, then remembered.

Reading is timed in the caller's thread, so that Ctrl-C ends it at once; the scheduler runs prefills.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from blendrag.engine.kv_namespace import KVNamespace
from blendrag.errors import InvalidInputError, StoreError
from blendrag.planning.measure import Measure, TimedRounds, Watch
from blendrag.planning.profile import (
    REMOTE,
    Conditions,
    Profile,
    conditions_of,
    profiles,
    recall_profile,
)
from blendrag.serving.scheduler import Scheduler
from blendrag.store.records import Records

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartialProfile:
    """What a measurement that ended early has timed."""

    conditions: Conditions
    timed: TimedRounds


def partial_profiles(root: Path, namespace: str) -> Records[PartialProfile]:
    """The last measurement of ``namespace`` that did not reach its end, if any."""
    return Records(root, f"{namespace}.timings", "timings", PartialProfile, ())


@dataclass(frozen=True)
class ProfileReport:
    """A profile, and where it comes from."""

    profile: Profile
    is_new: bool
    """Whether something was measured now."""
    kept: bool
    """Whether it is remembered: not in a store that cannot be written."""
    replaces: str = ""
    """How the profile kept before differs, in words, if it is for other conditions."""


def profile(
    kv: KVNamespace,
    scheduler: Scheduler,
    directories: Sequence[str | Path] = (),
    again: bool = False,
    watch: Watch = lambda what, done, steps: None,
) -> ProfileReport:
    """See :meth:`BlendEngine.profile`."""
    to_time = _checked(directories)
    kv.require_writer()
    root, store = kv.root, kv.store  # makes the root, with its checks
    if kv.corpus.current is not None and len(kv.corpus.current):
        kv.corpus.require()  # refuses a corpus of another model: its prefix holds that model's ids
    conditions = scheduler.run(lambda: _conditions(kv))
    known, differs = recall_profile(root, conditions)
    remote = store.remote
    times_remote = remote is not None and (again or known is None or known.tier(REMOTE) is None)
    if known is not None and not to_time and not again and not times_remote:
        return ProfileReport(known, is_new=False, kept=True)
    partial = partial_profiles(root, conditions.namespace)
    earlier = next((each for each in partial.entries() if each.conditions == conditions), None)

    def keep(rounds: TimedRounds) -> None:
        with suppress(OSError):  # then an interrupt loses them
            if not store.read_only:
                partial.replace([PartialProfile(conditions, rounds)])

    measure = Measure(
        kv.model.adapter,
        scheduler.run(lambda: kv.model.fusor),
        kv.corpus.manifest.encoding,
        kv.corpus.prefix_ids,
        kv.corpus.manifest.chunk_tokens,
        scheduler.run,
        watch,
        None if earlier is None else earlier.timed,
        keep,
    )
    if known is None or again:
        made = measure.profile(conditions, None if store.read_only else root, to_time)
    else:
        made = replace(known, tiers=(*known.tiers, *measure.directories(to_time)))
    if remote is not None and times_remote:
        try:
            made = replace(made, tiers=(*made.tiers, measure.remote(remote)))
        except StoreError as error:
            log.warning("the remote was not measured: %s", error)
    # directories timed before keep their figures; of each tier the last one counts
    before = [t for t in known.tiers if Path(t.name).is_absolute()] if known is not None else []
    tiers = {tier.name: tier for tier in (*before, *made.tiers)}
    made = replace(made, tiers=tuple(tiers.values()))
    kept = not store.read_only
    if kept:
        try:
            profiles(root, conditions.namespace).keep(made)
            partial.clear()
        except OSError:
            kept = False
    return ProfileReport(made, True, kept, "" if again else differs)


def _conditions(kv: KVNamespace) -> Conditions:
    """On the thread that computes: torch counts threads per thread. Raises :class:`UnsupportedModelError`."""
    kv.model.adapter.require_fusing()
    return conditions_of(kv.model.adapter, kv.validity.namespace)


def _checked(directories: Sequence[str | Path]) -> list[Path]:
    """Each once. Raises :class:`InvalidInputError` for what is not a directory."""
    if isinstance(directories, str | Path):  # a text is a sequence of texts, too
        directories = [directories]
    given = {Path(directory).expanduser().resolve(): Path(directory) for directory in directories}
    for directory in given.values():
        if not directory.is_dir():
            raise InvalidInputError(
                f"--dir {directory} is not a directory, expected one in which reading can be timed; make "
                "it or name another"
            )
    return list(given.values())
