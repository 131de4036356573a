"""From a request to its plan: may stored KV be used, which chunks, at which ratio, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from blendrag.config import CALIBRATED
from blendrag.engine.background_writer import BackgroundWriter
from blendrag.engine.exact_prefixes import ExactPrefixes
from blendrag.engine.kept_kv import KeptKV
from blendrag.engine.kv_namespace import KVNamespace
from blendrag.engine.request import ASSISTED, REFUSED, Request
from blendrag.engine.stream import AnswerStream
from blendrag.errors import ContextOverflowError, InvalidInputError
from blendrag.fusor.selection import Blending, make_policy
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.calibrate import Calibration, calibrations, policy_at
from blendrag.planning.controller import Controller, Encode
from blendrag.planning.measure import prefill_token_s
from blendrag.planning.plan import MODE_FULL, MissingKV, Plan, Reason
from blendrag.planning.profile import Profile
from blendrag.store.kv import dtype_name
from blendrag.store.records import Records

OLD_CALIBRATION = (
    "an earlier version of blendrag calibrated this model, and its result is not used; repeat blendrag "
    "calibrate"
)
PREFIX_OF_HYBRIDS = (
    "mode prefix goes on from the end of an earlier prompt, and mode blend loads chunks"
)
NO_RATIO = (
    "the ratio is not used: chunks of this model with running states are reused as they are stored"
)
NOT_AUTO = "ratio auto is not used, because it is not measured for models with running states; {:g} is used"
RUNS_ONLY = (
    "policy {} is not used: the model has layers with running states, so chunks can only be recomputed "
    "from their beginning on, by the question's attention"
)


ONE_SEQUENCE = Reason(
    "stored chunks of a model with running states are used for one sequence only; all is computed"
)
UNTRUSTED = Reason("stored KV is not used, because a check of it failed on this machine")


def _other_table(adapter: ModelAdapter, request: Request) -> Reason:
    several = " and several sequences" if adapter.has_long_table else ""
    return Reason(
        f"stored KV is not used: the prompt has {len(request.prompt.ids)} tokens{several}, and beyond "
        f"{adapter.blend_limit_tokens} this model's {adapter.beyond_blend_limit}"
    )


def check_fits(prompt_tokens: int, max_new_tokens: int, limit: int) -> None:
    """Raise :class:`ContextOverflowError` for a prompt that leaves no room for its answer."""
    if prompt_tokens + max_new_tokens > limit:
        raise ContextOverflowError(prompt_tokens, max_new_tokens, limit)


def checked(request: Request, adapter: ModelAdapter, limit: int | None = None) -> Request:
    """``request`` with its number of sequences and an answer that fits, once the model is loaded.

    ``limit``: positions for the prompt and its answer; ``None`` is the model's context. Raises
    :class:`ContextOverflowError`, :class:`InvalidInputError` for a checkpoint that asks for assisted
    decoding and for ``logprobs`` of several sequences, :class:`UnsupportedModelError` if chunks cannot be
    blended.
    """
    request = _cut_to_room(request, adapter.context_tokens if limit is None else limit)
    if request.fixed is None:
        adapter.require_mode(request.mode)
    config = adapter.model.generation_config
    for name in ASSISTED:  # those of the request's options were checked before
        value = getattr(config, name, None)
        if value is not None and value is not False:
            raise InvalidInputError(
                f"the generation config of {adapter.model_id} sets {name} to {value!r}: "
                f"{REFUSED[name]}; set model.generation_config.{name} to None"
            )
    sequences = sequences_of(request, adapter)
    if sequences > 1 and request.options.logprobs is not None:
        raise InvalidInputError(
            f"logprobs of {sequences} beams or sequences, expected one sequence; leave out one of the two"
        )
    return replace(request, sequences=sequences)


def sequences_of(request: Request, adapter: ModelAdapter) -> int:
    """Sequences that ``generate`` runs for ``request``."""
    given, config = request.options.generate_kwargs, adapter.model.generation_config
    names = ("num_beams", "num_return_sequences")
    return max(int(given.get(n) or getattr(config, n, None) or 1) for n in names)


def _cut_to_room(request: Request, limit: int) -> Request:
    """``request`` with an answer that fits into ``limit``; a note if a longer one was asked for."""
    end = request.end
    check_fits(end, 1, limit)
    room = limit - end
    if request.max_new_tokens <= room:
        return request
    notes = request.notes
    if request.options.max_new_tokens is not None:
        notes += (
            f"max_new_tokens {request.max_new_tokens} was cut to {room}: the prompt has {end} tokens, and "
            f"the model's context is {limit}",
        )
    return replace(request, max_new_tokens=room, fills_context=True, notes=notes)


class Planner:
    """Decides how requests of one engine use stored KV. Caller holds the model's lock."""

    def __init__(
        self, kv: KVNamespace, background: BackgroundWriter, prefixes: ExactPrefixes, kept: KeptKV
    ) -> None:
        self._kv = kv
        self._settings = kv.settings
        self.background = background
        self.prefixes = prefixes
        self.kept = kept
        self._is_open = False
        self.measured_token_s: float | None = None
        self._holds: dict[str, bool] = {}
        """Whether the store holds KV of other namespaces."""
        self.told: set[str] = set()
        """Namespaces for which :data:`OLD_CALIBRATION` was given."""

    @property
    def namespace(self) -> str:
        return self._kv.validity.namespace

    @property
    def profile(self) -> Profile | None:
        """What this machine needs for loading and computing, if that was measured."""
        return self._kv.profile_of(self.namespace)[0]

    def open(self) -> float:
        """Once: identify the model, check stored KV, prepare blending. Returns the seconds."""
        if self._is_open:
            return 0.0
        began = time.perf_counter()
        kv = self._kv
        if kv.model.adapter.refusal is None:  # else planning reports it
            kv.validity.is_valid(kv.validity.namespace)
            _ = kv.model.fusor if kv.model.adapter.fuses else kv.model.composer
            if kv.model.adapter.fuses and kv.validity.is_verified:
                kv.model.fusor.prepare()
            if self._settings.remote is not None:
                self._token_s()
        self._is_open = True
        return time.perf_counter() - began

    def plan(
        self,
        request: Request,
        stream: AnswerStream,
        avoid: frozenset[str] = frozenset(),
        computes_first: bool = True,
    ) -> Plan:
        """What of the stored KV ``request`` loads, what it computes, at which ratio and why.

        ``avoid``: keys of chunks whose bytes failed verification. ``computes_first``: if other requests
        wait, the beginning that they have in common with it and the chunks that it misses are computed now,
        so that they are not computed twice. ``stream`` gets notes that another plan for the request would
        not have. The caller closes the plan.
        """
        plan = self._without_chunks(request)
        if plan is not None:
            return plan
        adapter, prompt = self._kv.model.adapter, request.prompt
        validity = self._kv.validity  # opens the store
        namespace = validity.namespace
        if not validity.is_valid(namespace):
            self._kv.forget_signature()
            invalid = UNTRUSTED.text, validity.why_invalid(namespace)
            return Plan.computed(prompt, UNTRUSTED, invalid)
        is_long = adapter.is_long(len(prompt.ids))
        if is_long and not (adapter.has_long_table and request.sequences == 1):
            why = _other_table(adapter, request)
            return Plan.computed(prompt, why, (why.text,))
        known = calibrations(self._kv.root, namespace)
        found = cache(known.entries)
        calibrated = partial(_calibrated, found)
        if request.blending.is_calibrated and not found():
            stream.notes += self._old_calibration(known, namespace)
        request = replace(request, blending=calibrated(request.blending))
        if adapter.composition is not None:
            request = replace(request, blending=self._of_runs(request, stream))
        profile, notes = self._profile(request, namespace)
        controller = replace(
            self.controller(namespace, profile),
            prefixes=self.prefixes.of(request),
            scope=request.options.scope,
            is_long=is_long,
            kept=self.kept.lookup(namespace, request.options.scope),
        )
        encode: Encode | None = None
        if computes_first:
            stream.notes += self.prefixes.share(request, controller, calibrated, stream.check)
            if request.mode != "prefix":
                encode = partial(self._encode_first, request, stream)
        reserve = 1 if request.sequences == 1 else 2
        plan = controller.plan(prompt, request.mode, request.blending, avoid, reserve, encode)
        try:
            if plan.missing:
                notes += self._why_missing(namespace, is_long)
        except BaseException:
            plan.close()
            raise
        if plan.forecast is not None:  # from when the caller asked, like the measured TTFT
            ttft_s = time.perf_counter() - request.asked_at + plan.forecast.ttft_s
            plan = replace(plan, forecast=replace(plan.forecast, ttft_s=ttft_s))
        return replace(plan, notes=(*notes, *plan.notes))

    def _without_chunks(self, request: Request) -> Plan | None:
        """The plan of a request that loads no chunks, at most its beginning; ``None`` for other requests."""
        adapter, prompt = self._kv.model.adapter, request.prompt
        if request.mode == "full":
            return Plan.computed(prompt, MODE_FULL)
        only_beginnings = adapter.why_not_movable
        if adapter.composition is not None:
            if request.mode == "prefix":
                only_beginnings = PREFIX_OF_HYBRIDS
            elif prompt.chunks and request.sequences > 1:
                return Plan.computed(prompt, ONE_SEQUENCE, (ONE_SEQUENCE.text,))
        if only_beginnings:
            why = Reason(f"computed, because {only_beginnings}")
            note = f"chunks are reused only in the same beginning: {only_beginnings}"
            plan = Plan.computed(prompt, why, (note,) * bool(prompt.chunks))
        elif not prompt.chunks:
            plan = Plan.computed(prompt, MODE_FULL)
        else:
            return None
        return plan.behind(self.prefixes.join(request))

    def _of_runs(self, request: Request, stream: AnswerStream) -> Blending:
        """How hybrid models' chunks are blended: by the question's attention, at a fixed ratio."""
        blending, options = request.blending, request.options
        policy = str(blending.policy)
        if policy == "reuse" or request.mode != "blend":
            return blending.at(0.0)
        named = options.policy or self._settings.policy
        if named != CALIBRATED and policy not in ("query", "full"):
            stream.notes.append(RUNS_ONLY.format(policy))
        if not self._kv.model.composer.serves:
            if options.ratio is not None or self._settings.ratio is not None:
                stream.notes.append(NO_RATIO)
            return blending.at(0.0)
        if blending.is_auto:
            stream.notes.append(NOT_AUTO.format(blending.fixed_ratio))
        return Blending.of("query", ratio=1.0 if policy == "full" else blending.fixed_ratio)

    def _encode_first(
        self, request: Request, stream: AnswerStream, missing: Sequence[MissingKV]
    ) -> int:
        """Encode what the prompt misses, if that is due; how many chunks are stored."""
        jobs, because = self.background.due_now(request.prompt, missing, request.options)
        encoded = self.background.encode_first(jobs, stream.check)
        if encoded:
            chunks = "1 chunk was" if encoded == 1 else f"{encoded} chunks were"
            stream.notes.append(f"{chunks} encoded before the answer because {because}")
        return encoded

    def controller(self, namespace: str, profile: Profile | None = None) -> Controller:
        """The loading controller over what is stored under ``namespace``."""
        kv = self._kv
        return Controller(
            kv.model.adapter,
            kv.store,
            namespace,
            kv.corpus.manifest.prefix_ids,
            self._settings.prefix_min_tokens,
            kv.corpus.manifest.encoding,
            profile,
            token_s=self._token_s,
            undated_ids=kv.corpus.undated_ids,
            chunks_are_exact=kv.validity.recipe_of(namespace).is_exact,
        )

    def _token_s(self) -> float:
        """Seconds to compute a token, timed once."""
        if self.measured_token_s is None:
            self.measured_token_s = prefill_token_s(self._kv.model.adapter)
        return self.measured_token_s

    def _why_missing(self, namespace: str, is_long: bool) -> tuple[str, ...]:
        """Notes for chunks without KV, if there is more to say than that."""
        trouble = self._kv.validity.trouble
        unstored = f"chunks without KV are computed and not stored: {trouble}" if trouble else ""
        notes = tuple(filter(None, (self._loaded_otherwise(namespace), unstored)))
        if notes or not is_long:
            return notes
        most = self._kv.model.adapter.blend_limit_tokens
        return (
            f"the prompt has more than {most} tokens, where the rotary table changes, and some of its chunks "
            "were in none of that length before; they are encoded in the background and reused from the next "
            "request on",
        )

    def _loaded_otherwise(self, namespace: str) -> str:
        """A note for chunks without KV if the ingest loaded the model in another way; else empty.

        The store is asked once for each namespace; a remote, which takes long to list, is not.
        """
        kv, manifest = self._kv, self._kv.corpus.recorded_manifest
        if manifest is None or manifest.namespace in ("", namespace):
            return ""
        if manifest.namespace not in self._holds:
            first = next(iter(kv.store.keys(manifest.namespace)), None)
            is_shared = self._settings.remote is not None
            self._holds[manifest.namespace] = is_shared or first is not None
        if not self._holds[manifest.namespace]:
            return ""
        known = kv.validity.difference(manifest.namespace)
        dtype = dtype_name(kv.model.adapter.model.dtype)
        cause = known or f"{dtype}: its weights, dtype, attention or adapter differ"
        what_now = (
            "they are kept beside the store's, and reused from the next question on"
            if self.background.stores_missing
            else "load it as then, or ingest again"
        )
        return (
            f"chunks were computed because store {kv.root} holds the KV of {manifest.model!r} as the "
            f"ingest loaded it, not as {kv.model.name!r} is loaded here ({cause}); {what_now}"
        )

    def _old_calibration(self, known: Records[Calibration], namespace: str) -> tuple[str, ...]:
        """A note, once, if there is a calibration and it cannot be used."""
        if namespace in self.told or not known.unchecked():
            return ()
        self.told.add(namespace)
        return (OLD_CALIBRATION,)

    def _profile(self, request: Request, namespace: str) -> tuple[Profile | None, tuple[str, ...]]:
        """The machine profile; a note if ratio auto needs one and there is none."""
        profile, differences = self._kv.profile_of(namespace)
        if profile is not None or not request.blending.is_auto or request.mode != "blend":
            return profile, ()
        other = f", and the stored one is for {differences}" if differences else ""
        return None, (
            f"ratio auto needs a machine profile{other}; ratio {request.blending.fixed_ratio:g} is used; "
            f"run blendrag profile --model {self._kv.model.name} --store {self._kv.root}",
        )


def _calibrated(found: Callable[[], Sequence[Calibration]], blending: Blending) -> Blending:
    """``blending`` with what was ``found`` for the model in place of what it does not name."""
    if not blending.is_calibrated:
        return blending
    if blending.takes_calibrated_ratio:
        chosen = next((each.ratio for each in found() if each.is_chosen), blending.fixed_ratio)
        blending = replace(blending, ratio=chosen, takes_calibrated_ratio=False)
    policy = make_policy(policy_at(found(), blending.fixed_ratio))
    return replace(blending, policy=policy, is_calibrated=False)
