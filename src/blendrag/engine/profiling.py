"""Profiling an engine's model on this machine (``blendrag profile``): measured once, then remembered.

Owns when to measure and when not, and where each piece of work runs: reading in the caller's thread, so
that Ctrl-C ends it at once, every prefill on the worker. What is remembered is whole or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blendrag.engine.resources import Resources
from blendrag.engine.worker import Worker
from blendrag.errors import InvalidInputError, StoreError
from blendrag.fusor.selection import Schedule, make_policy
from blendrag.planning.forecast import Prompt
from blendrag.planning.measure import Measure, Watch, directories_of, directory_tiers
from blendrag.planning.parts import Part
from blendrag.planning.profile import DISK, Conditions, Profile
from blendrag.planning.profile_record import conditions_of, differing, recall, remember
from blendrag.planning.storage import Device, StorageChoice, choose_storage

log = logging.getLogger(__name__)

#: Fresh tokens of a usual prompt: a question in its template.
QUESTION_TOKENS = 32


@dataclass(frozen=True)
class ProfileReport:
    """A profile, and how it came about."""

    profile: Profile
    is_new: bool
    """Whether something was measured now."""
    kept: bool
    """Whether it is remembered: not in a store that cannot be written."""
    replaces: str = ""
    """How the profile kept before differs, in words, where none that can be read is for these conditions and
    nobody asked to measure again."""


def profile(
    resources: Resources,
    worker: Worker,
    directories: Sequence[str | Path] = (),
    again: bool = False,
    watch: Watch = lambda what, done, steps: None,
) -> ProfileReport:
    """See :meth:`BlendEngine.profile`."""
    named = _paths(directories)
    for directory in named:
        if not directory.is_dir():
            raise InvalidInputError(
                f"--dir {directory} is no directory, expected one in which reading can be timed; make it "
                "or name another"
            )
    places = list({directory_tiers(path): path for path in named}.values())
    root = resources.root
    store = resources.store  # makes the root, with its checks
    _refuse_foreign(resources)
    conditions = worker.run(lambda: _conditions(resources))
    known = recall(root, conditions)
    missing = [d for d in places if known is None or known.tier(directory_tiers(d)[0]) is None]
    if known is not None and not missing and not again:
        return ProfileReport(known, is_new=False, kept=True)
    differs = "" if known is not None or again else differing(root, conditions)
    measure = Measure(
        resources.adapter,
        worker.run(lambda: resources.fusor),
        resources.encoding,
        resources.prefix_ids,
        resources.chunk_tokens,
        worker.run,
        watch,
    )
    if known is not None and not again:
        found = measure.with_directories(known, missing)
    else:
        found = _anew(measure, conditions, None if store.read_only else root, places, known)
    return ProfileReport(found, True, _keep(resources, found), differs)


def _paths(directories: Sequence[str | Path]) -> list[Path]:
    if isinstance(directories, str | Path):  # a text is a sequence of texts, too
        directories = [directories]
    return [Path(directory) for directory in directories]


def _refuse_foreign(resources: Resources) -> None:
    """Raise :class:`InvalidInputError` where the store holds another model's chunks: their prefix is made of
    ids of its vocabulary, and no request could use the profile."""
    corpus = resources.corpus
    if corpus is not None and len(corpus):
        resources.require_corpus()


def _conditions(resources: Resources) -> Conditions:
    """What a profile holds for, as seen from the thread that computes: torch counts threads for each of
    its own. Raises :class:`UnsupportedModelError`."""
    resources.adapter.require_blendable()
    return conditions_of(resources.adapter, resources.kv_validity.namespace)


def _anew(
    measure: Measure,
    conditions: Conditions,
    root: Path | None,
    places: Sequence[Path],
    known: Profile | None,
) -> Profile:
    """All of it, of ``places`` and of directories measured before. Those that cannot be measured now (a
    device that is away, for instance) keep what is known of them."""
    named = {directory_tiers(place) for place in places}
    before = [
        d for d in (directories_of(known) if known else ()) if directory_tiers(d) not in named
    ]
    found = measure.profile(conditions, root, places)
    for directory in before:
        assert known is not None
        names = directory_tiers(directory)
        try:
            if not directory.is_dir():
                raise StoreError(f"{directory} is away")
            found = measure.with_directories(found, [directory])
        except (InvalidInputError, StoreError, OSError) as exc:
            log.info("%s keeps the figures of before: %s", directory, exc)
            kept = [tier for tier in known.tiers if tier.name in names]
            found = replace(found, tiers=(*found.tiers, *kept))
    return found


def _keep(resources: Resources, found: Profile) -> bool:
    if resources.store.read_only:
        return False
    try:
        remember(resources.root, found)
    except OSError:
        return False
    return True


# -- what follows for a usual prompt ----------------------------------------------------------------


def usual_prompt(found: Profile, policy: str, chunks: int) -> Prompt:
    """``chunks`` stored chunks as long as the corpus makes them, and a question."""
    asked, tokens = make_policy(policy), found.chunk_tokens
    tier = found.tier(DISK) or found.tiers[0]  # of a store that cannot be written it was not timed
    parts = tuple(
        Part(i * tokens, (i + 1) * tokens, tier.name, found.layer_bytes) for i in range(chunks)
    )
    scouted = asked.attention_layers(found.layers).stop
    return Prompt(chunks * tokens + QUESTION_TOKENS, parts, asked.needs_deviation, scouted)


def counts_for(
    found: Profile, policy: str, ratio: float, chunks: int
) -> Callable[[int], Sequence[float]]:
    """Tokens recomputed in layers 1…L-1 at ``ratio``, of so many candidates."""
    chosen, schedule = make_policy(policy), Schedule.parse("constant")
    return lambda candidates: chosen.layer_counts(schedule, ratio, candidates, found.layers, chunks)


def storage_choice(
    found: Profile,
    devices: Sequence[Device],
    corpus_bytes: float,
    policy: str,
    ratio: float,
    chunks: int,
) -> StorageChoice:
    """The cheapest of ``devices`` that adds no latency to a usual prompt at that ratio."""
    prompt = usual_prompt(found, policy, chunks)
    counts = counts_for(found, policy, ratio, chunks)
    return choose_storage(found, prompt, counts, devices, corpus_bytes)
