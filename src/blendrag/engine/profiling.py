"""Profiling an engine's model on this machine (``blendrag profile``): measured once, then remembered.

Owns when to measure and when not, and where each piece of work runs: reading in the caller's thread, so
that Ctrl-C ends it at once, every prefill on the worker. What is remembered is whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blendrag.controller.decide import counts_of
from blendrag.engine.resources import Resources
from blendrag.engine.worker import Worker
from blendrag.errors import InvalidInputError
from blendrag.estimates import Part, Profile, Prompt
from blendrag.estimates.profile import DISK
from blendrag.estimates.storage import Device, StorageChoice, choose_storage
from blendrag.profile import Measure, Watch, conditions_of, recall, recall_any, remember
from blendrag.profile.measure import directory_tier
from blendrag.selection import Schedule, make_policy

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
    """How the profile kept before differs, in words, where there was one for other conditions only."""


def profile(
    resources: Resources,
    worker: Worker,
    directories: Sequence[str | Path] = (),
    again: bool = False,
    watch: Watch = lambda what, done, steps: None,
) -> ProfileReport:
    """See :meth:`BlendEngine.profile`."""
    places = _paths(directories)
    for directory in places:
        if not directory.is_dir():
            raise InvalidInputError(
                f"--dir {directory} is no directory, expected one in which reading can be timed; make it "
                "or name another"
            )
    root = resources.root
    _ = resources.store  # makes the root, with its checks
    namespace = worker.run(lambda: _namespace(resources))
    conditions = conditions_of(resources.adapter, namespace)
    known = None if again else recall(root, conditions)
    missing = [d for d in places if known is None or known.tier(directory_tier(d)) is None]
    if known is not None and not missing:
        return ProfileReport(known, is_new=False, kept=True)
    other = None if again or known else recall_any(root, conditions)
    differs = ", ".join(conditions.differences(other.conditions)) if other else ""
    measure = Measure(
        resources.adapter,
        worker.run(lambda: resources.fusor),
        resources.encoding,
        resources.prefix_ids,
        resources.chunk_tokens,
        worker.run,
        watch,
    )
    if known is not None:
        found = measure.with_directories(known, missing)
    else:
        found = measure.profile(conditions, root, places)
    return ProfileReport(found, True, _keep(resources, found), differs)


def _paths(directories: Sequence[str | Path]) -> list[Path]:
    if isinstance(directories, str | Path):  # a text is a sequence of texts, too
        directories = [directories]
    return [Path(directory) for directory in directories]


def _namespace(resources: Resources) -> str:
    """Where the KV of what is loaded belongs. Raises :class:`UnsupportedModelError`."""
    resources.adapter.require_blendable()
    return resources.trust.namespace


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
    parts = tuple(
        Part(i * tokens, (i + 1) * tokens, DISK, found.layer_bytes) for i in range(chunks)
    )
    return Prompt(chunks * tokens + QUESTION_TOKENS, parts, asked.looks, asked.asks, asked.shifts)


def counts_for(
    found: Profile, policy: str, ratio: float, chunks: int
) -> Callable[[int], Sequence[float]]:
    """Tokens recomputed in layers 1…L-1 at ``ratio``, of so many candidates."""
    counts = counts_of(make_policy(policy), Schedule.parse("constant"), found.layers, chunks)
    return lambda candidates: counts(ratio, candidates)


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
