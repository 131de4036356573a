"""Which of what could be loaded is loaded, and at what ratio: estimates applied to an open plan.

Owns how spans, policies and schedules become what the estimator knows, and the sentences that
explain what was decided. With a ratio that was given nothing is decided, and the time only predicted; without
a profile not even that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blendrag.config import Mode
from blendrag.fusor.loader import LoadedSpan
from blendrag.fusor.selection import Schedule, SelectionPolicy
from blendrag.planning.choice import Choice, Wish, choose
from blendrag.planning.controller import LoadPlan
from blendrag.planning.forecast import Forecast, Prompt, forecast
from blendrag.planning.parts import Part
from blendrag.planning.profile import COLD, DISK, Profile
from blendrag.store.encodings import stored_layer_bytes
from blendrag.store.kv import KVLayout


@dataclass(frozen=True)
class Asked:
    """How a prompt is to be blended, and what is left to the controller."""

    mode: Mode
    policy: SelectionPolicy
    schedule_at: Callable[[float], Schedule]
    """What spreads the budget at a ratio: each may have one that was calibrated for it."""
    ratio: float
    """Of an automatic one, the smallest that keeps quality."""
    is_auto: bool = False
    """Whether the ratio, and what is loaded, follow from estimates."""
    follows_load: bool = False
    """Whether nobody chose a schedule, so that an automatic ratio may bring its own."""


@dataclass(frozen=True)
class Decided:
    """What to blend with, what it should take, and why."""

    ratio: float
    schedule: Schedule
    forecast: Forecast | None = None
    """From here to the first token; ``None`` without a profile."""
    reason: str = ""
    notes: tuple[str, ...] = ()


def decide(
    load: LoadPlan, prompt_tokens: int, layout: KVLayout, asked: Asked, profile: Profile | None
) -> tuple[LoadPlan, Decided]:
    """``load`` without what is faster computed, whose readers are closed; and how to blend the rest."""
    kept = Decided(asked.ratio, asked.schedule_at(asked.ratio))
    if profile is None:
        return load, kept
    prompt = prompt_of(load, prompt_tokens, layout, asked.policy)

    def counts(ratio: float, candidates: int, chunks: int) -> Sequence[float]:
        schedule = asked.schedule_at(ratio)
        return asked.policy.layer_counts(schedule, ratio, candidates, profile.layers, chunks)

    try:
        if not (asked.is_auto and asked.mode == "blend"):
            blended = [part.tokens for part in prompt.parts if not part.exact]
            recomputed = counts(asked.ratio, sum(blended), len(blended))
            predicted = forecast(profile, prompt, prompt.parts, recomputed)
            return load, replace(kept, forecast=predicted)
        wish = Wish(
            asked.ratio,
            counts,
            asked.policy.budgeted,
            asked.follows_load and asked.policy.follows_schedule,
        )
        choice = choose(profile, prompt, wish)
    except KeyError as unknown:
        note = (
            f"reading from {unknown.args[0]} was never timed, so nothing is predicted and ratio auto is the "
            "smallest one; measure with blendrag profile"
        )
        return load, replace(kept, notes=(note,) * asked.is_auto)
    return _without(load, prompt, choice), _decided(asked, prompt, choice)


def prompt_of(
    load: LoadPlan, prompt_tokens: int, layout: KVLayout, policy: SelectionPolicy
) -> Prompt:
    """What estimates need to know of an open plan; its parts are the plan's spans, in order."""
    stored = layout.encoded(load.encoding)
    parts = tuple(_part(span, stored) for span in load.spans)
    scouted = policy.attention_layers(len(layout.layers)).stop
    return Prompt(prompt_tokens, parts, policy.needs_deviation, scouted)


def _part(span: LoadedSpan, stored: KVLayout) -> Part:
    sizes = tuple(
        stored_layer_bytes(stored, i, span.reader.tokens) for i in range(len(stored.layers))
    )
    return Part(span.start, span.end, _tier(span), sizes, span.exact)


def _tier(span: LoadedSpan) -> str:
    """Where its bytes are now; a disk whose file the operating system does not hold is another tier."""
    is_cached = getattr(span.reader, "is_cached", None)
    if span.reader.tier == DISK and is_cached is not None and not is_cached():
        return COLD
    return span.reader.tier


def _without(load: LoadPlan, prompt: Prompt, choice: Choice) -> LoadPlan:
    if len(choice.loaded) == len(load.spans):
        return load
    computed = {i: span for i, span in enumerate(load.spans) if i not in choice.loaded}
    why = {span.start: _why_computed(prompt.parts[i], choice.waits) for i, span in computed.items()}
    for span in computed.values():
        span.reader.close()
    decisions = tuple(
        replace(d, span=None, reason=why[d.span.start])
        if d.span is not None and d.span.start in why
        else d
        for d in load.decisions
    )
    spans = tuple(span for i, span in enumerate(load.spans) if i not in computed)
    return replace(load, spans=spans, decisions=decisions)


def _why_computed(part: Part, waits: bool) -> str:
    if not waits:
        return "computing it is faster here than blending it, however fast it is read"
    megabytes = sum(part.layer_bytes) / 1e6
    return f"computing it is faster here than waiting for its {megabytes:.3g} MB from {part.tier}"


def _decided(asked: Asked, prompt: Prompt, choice: Choice) -> Decided:
    schedule = (
        Schedule("vector", choice.shares) if choice.shares else asked.schedule_at(choice.ratio)
    )
    reason = choice.reason
    notes: tuple[str, ...] = ()
    given_up = len(prompt.parts) - len(choice.loaded)
    if given_up:
        gain = (
            f"{1e3 * choice.forecast.ttft_s:,.0f} ms predicted, against "
            f"{1e3 * choice.load_all_s:,.0f} ms with everything loaded"
        )
        afresh = f"{given_up} of {len(prompt.parts)} stored parts computed afresh ({gain})"
        reason = f"{afresh}; {reason}" if choice.loaded else afresh
        if not choice.loaded:
            what = "the store is slower" if choice.waits else "blending takes longer"
            notes = (f"{what} than computing here, so nothing was read: {gain}",)
    return Decided(choice.ratio, schedule, choice.forecast, reason, notes)
