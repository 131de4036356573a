"""The weights that a model decodes with: those of the option ``decode_weights``, if the model can have them.

Packed copies (:mod:`blendrag.model.decode_weights`) are made once per model and kept (:mod:`.packed_files`),
as are the measured numbers of rows for which they are faster. A model that cannot have them decodes with its
own weights; a note in the metrics says why, unless the option is ``auto``.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import torch

from blendrag.engine.packed_files import VERSION, file_of, forget, no_room, packed_weights
from blendrag.fusor import Fusor
from blendrag.fusor.decode_agreement import TEXTS, TOKENS, AgreementMeasurement, DecodeAgreement
from blendrag.model import decode_weights as packing
from blendrag.model import measurements
from blendrag.model.adapter import ModelAdapter
from blendrag.model.decode_weights import HEAD, NATIVE, DecodeWeights
from blendrag.model.sharing import is_loaded
from blendrag.planning.machine import processor_name
from blendrag.store.durable import readable_size
from blendrag.wording import condensed, log_step, short_model

log = logging.getLogger(__name__)

#: Counts up when the numbers of rows are measured in another way.
ROWS_VERSION = 4
AUTO = "auto"
#: The format of ``auto``, which packs the LM head alone if that agrees too little; ``int4`` agrees still less
#: (docs/decode-weights.md).
AUTOMATIC = "int8"
#: Least size of all copies for ``auto``: smaller models are read from the processor's caches.
LEAST_BYTES = 32 * 2**20
NOT_FASTER = "packed weights are not faster on this machine"
NOT_TOGETHER = "its requests are not decoded together"


class DecodeWeightsChoice:
    """The weights that one engine's requests decode with. Its methods take the model's lock."""

    def __init__(
        self, adapter: ModelAdapter, wanted: str, decodes_jointly: Callable[[], bool]
    ) -> None:
        self._adapter = adapter
        self._wanted = wanted
        self._decodes_jointly = decodes_jointly
        self._chosen: DecodeWeights | None = None
        self._is_settled = wanted == NATIVE
        self._pieces: Iterator[None] | None = None
        """What is left of the measurement."""
        self._share = 0.0
        """How much of the tokens is measured."""
        self.is_measurable = False
        """Whether :meth:`measure` would find out whether packed weights may be used."""
        self.note = ""
        """Why the model decodes with its own weights, although others were asked for."""

    def now(self) -> DecodeWeights | None:
        """The packed weights, made now if need be; ``None``: the model's own."""
        with self._adapter.lock:
            if self._chosen is not None and not self._chosen.are_current:
                self._is_settled = False
            if not self._is_settled:
                self._settle()
            return self._chosen

    def _settle(self) -> None:
        self._chosen, self._pieces, self._share, self.note = None, None, 0.0, ""
        is_auto = self._wanted == AUTO
        name, why, self.is_measurable = self._known()
        if not self.is_measurable:
            made = why or _made(self._adapter, name)
            if isinstance(made, DecodeWeights):
                self._chosen = made
            elif is_auto:
                log.info("%s decodes with its own weights: %s", self._adapter.model_id, made)
            else:
                self.note = f"decode_weights {name} is not used: {made}"
        self._is_settled = True  # not if this was interrupted

    def _known(self) -> tuple[str, str, bool]:
        """The name of the packed weights, why the model keeps its own, in a clause or empty, and whether a
        measurement would tell."""
        if self._wanted != AUTO:
            return self._wanted, self._why_not_now(self._wanted), False
        if why := self._why_not(AUTOMATIC):
            return AUTOMATIC, why, False
        if packing.size_bytes(self._adapter.model, AUTOMATIC) < LEAST_BYTES:
            return AUTOMATIC, "the model is small", False
        known = measurements.recall(_key(self._adapter, AUTOMATIC), DecodeAgreement)
        name = AUTOMATIC if known is None else _sufficient(known)
        if known is not None and name == NATIVE:
            return AUTOMATIC, f"they choose the same token in {known.share:.1%} of steps", False
        why = self._why_not_now(name)
        return name, why, known is None and not why

    def _why_not_now(self, name: str) -> str:
        """As :meth:`_why_not`, or that there is no memory for the copies."""
        return self._why_not(name) or _no_room(self._adapter, name)

    def _why_not(self, name: str) -> str:
        """Why the model keeps its own weights instead of ``name``, whatever they choose, or empty."""
        if why := _why_not(self._adapter):
            return why
        if not self._decodes_jointly():
            return NOT_TOGETHER
        if measurements.recall(_slow_key(self._adapter, name), bool):
            return NOT_FASTER
        return ""

    # -- auto -----------------------------------------------------------------------------------

    def expected_s(self, step_s: float) -> float:
        """Seconds of :meth:`measure_all` at most, from those of a forward of one token. Makes no copies."""
        with self._adapter.lock:
            is_measured = self._wanted == NATIVE or not self._known()[2]
        return 0.0 if is_measured else 2 * TOKENS * len(TEXTS) * step_s

    def measure_all(
        self,
        computed: Callable[[Callable[[], object]], object] = lambda call: call(),
        watch: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Find out whether packed weights may be used, if need be. ``computed`` calls each piece;
        ``watch`` is called before each, with the share of the tokens that is measured, and with 1 after the
        last one, also if that was interrupted once the result was kept."""
        computed(self.now)
        if not self.is_measurable:
            return
        log_step(
            log,
            "measuring once whether %s chooses the same tokens with %s weights: %d tokens",
            *(short_model(self._adapter.model_id), AUTOMATIC, TOKENS * len(TEXTS)),
        )
        try:
            while self.is_measurable:
                watch(self._share)
                computed(self.measure)
        finally:
            if not self.is_measurable:
                watch(1.0)
        computed(self._say_chosen)  # the caller's thread would wait for requests that run

    def _say_chosen(self) -> None:
        with self._adapter.lock:
            why = self._known()[1]
            name = NATIVE if self._chosen is None else self._chosen.name
        own = {NATIVE: "its own weights", HEAD: "its own weights and a packed LM head"}
        model = short_model(self._adapter.model_id)
        weights = own.get(name, f"{name} weights")
        log_step(log, "%s decodes with %s%s", model, weights, f": {why}" * bool(why))

    def measure(self) -> None:
        """Measure the next piece: the first ones make the copies, the last ones choose the weights."""
        with self._adapter.lock:
            if not self.is_measurable:
                return
            pieces, self._pieces = self._pieces or self._measured(), None  # again if interrupted
            try:
                next(pieces)
                self._pieces = pieces
            except StopIteration:
                self.is_measurable = False
            except BaseException:
                self.is_measurable = self._share < 1.0  # else the result was kept
                raise

    def _measured(self) -> Iterator[None]:
        """The measurement. Requests may run wherever it yields."""
        adapter = self._adapter
        weights = yield from _making(adapter, AUTOMATIC)
        if isinstance(weights, str):
            log.info("%s decodes with its own weights: %s", adapter.model_id, weights)
            return
        measurement, found = AgreementMeasurement(adapter, weights), None
        while found is None:
            yield
            if not weights.are_current:
                self._is_settled = False
                return
            try:
                found = measurement.step()
            except Exception as exc:  # a model that decodes otherwise than generate lets it
                log.warning(
                    "decode weights cannot be measured, so the model's own are used: %s", exc
                )
                return
            self._share = measurement.share
        measurements.remember(_key(adapter, AUTOMATIC), found)
        log.info(
            "%s chooses the same token with %s weights in %.1f%% of %d steps, KL %.4f",
            *(adapter.model_id, AUTOMATIC, 100 * found.share, found.tokens, found.kl),
        )
        self._chosen = weights if found.suffices else None
        if not found.suffices:
            forget(adapter, AUTOMATIC)
        del weights, measurement  # their memory may be needed for other copies
        if _sufficient(found) == HEAD:
            made = yield from _making(adapter, HEAD)
            self._chosen = made if isinstance(made, DecodeWeights) else None


def _sufficient(found: DecodeAgreement) -> str:
    """The weights that ``auto`` uses after that measurement of :data:`AUTOMATIC`."""
    return AUTOMATIC if found.suffices else HEAD if found.head_suffices else NATIVE


#: The format of each layer that is packed.
Formats = frozenset[tuple[str, str]]


def compare(
    adapter: ModelAdapter,
    name: str,
    measured: dict[Formats, DecodeAgreement] | None = None,
    watch: Callable[[float], None] = lambda share: None,
) -> DecodeAgreement | str:
    """How the model decodes with ``name`` weights, measured now and remembered; or why it keeps its own.

    ``measured``: what was measured of the model before, for copies that two names have in common; grows.
    ``watch`` is called before each token, with the share of them that is measured.
    """
    measured = {} if measured is None else measured
    with adapter.lock:
        if why := _why_not(adapter) or _no_room(adapter, name):
            return why
        if adapter.composition is None and not Fusor(adapter).packs:
            return NOT_TOGETHER
        made = _made(adapter, name)
        if isinstance(made, str):
            return made
        del made
        began = time.perf_counter()
        made = _made(adapter, name)  # as the next process does
        opening_s = time.perf_counter() - began
        if isinstance(made, str):
            return made
        formats = frozenset((at, layer.kind.name) for at, layer in made.layers.items())
        if formats not in measured:
            found = AgreementMeasurement(adapter, made).run(watch)
            measured[formats] = replace(found, opening_s=opening_s)
        if not measured[formats].suffices:
            forget(adapter, name)
        measurements.remember(_key(adapter, name), measured[formats])
        return measured[formats]


def _key(adapter: ModelAdapter, name: str) -> str:
    """The key under which the agreement of the loaded model is remembered."""
    what = f"decode weights {VERSION}, {name}"
    return measurements.key_of(what, adapter.identity.namespace, adapter.device)


def _slow_key(adapter: ModelAdapter, name: str) -> str:
    """The key under which is remembered whether no copy of the loaded model is faster on this machine."""
    version, namespace = f"{VERSION}.{ROWS_VERSION}", adapter.identity.namespace
    return f"slow decode weights {version}, {name}, {namespace}, {_machine()}"


def _why_not(adapter: ModelAdapter) -> str:
    """Why the model keeps its own weights, whatever others there are, in a clause, or empty."""
    if adapter.refusal is not None:
        return NOT_TOGETHER
    if adapter.is_compiled:
        return "it is compiled"
    return packing.why_not(adapter.model)


def _no_room(adapter: ModelAdapter, name: str) -> str:
    """That copies of that ``name`` need more memory than there is, in a clause, or empty."""
    if is_loaded(file_of(adapter, name)):  # by another engine
        return ""
    return no_room(packing.size_bytes(adapter.model, name))


def _made(adapter: ModelAdapter, name: str) -> DecodeWeights | str:
    """The model's copies of that name, or why it keeps its own weights."""
    making = _making(adapter, name)
    while True:
        try:
            next(making)
        except StopIteration as end:
            made: DecodeWeights | str = end.value
            return made


def _making(adapter: ModelAdapter, name: str) -> Generator[None, None, DecodeWeights | str]:
    """:func:`_made` in pieces."""
    began = time.perf_counter()
    try:
        made = DecodeWeights(adapter.model, name, packed_weights(adapter, name))
        is_steady = yield from _limit_rows(made)
    except Exception as exc:  # memory ran out, or a layer is unlike others of its class
        log.warning("%s weights of %s cannot be made: %s", name, adapter.model_id, exc)
        return f"they cannot be made: {condensed(str(exc))}"
    if is_steady:
        measurements.remember(_slow_key(adapter, name), not made.layers)
    if not made.layers:
        return NOT_FASTER
    log.info(
        "decode weights of %s: %s (layers: %s), %s of memory, made in %.1f s",
        *(adapter.model_id, name, made.layers_by_format),
        *(readable_size(made.size_bytes), time.perf_counter() - began),
    )
    return made


# -- rows for which copies are faster -------------------------------------------------------------


def _limit_rows(weights: DecodeWeights) -> Generator[None, None, bool]:
    """Give each layer the most rows for which its copy is faster, and forget copies that never are. Each
    shape of layers is timed in a piece of its own. Weights that changed meanwhile stay so.

    Returns whether all numbers of rows are certain; others are measured again by the next process.
    """
    is_steady, most = True, dict[str, int]()
    by_shape: dict[tuple[str, tuple[int, ...], int, bool], list[str]] = defaultdict(list)
    for name, each in weights.layers.items():
        outputs = tuple(layer.out_features for layer in each.layers)
        by_shape[each.kind.name, outputs, each.layer.in_features, each.is_head].append(name)
    for shape, names in by_shape.items():
        key = f"decode rows {ROWS_VERSION}, {shape}, {_machine()}"
        rows = measurements.recall(key, int)
        if rows is None:
            yield
            found = packing.most_rows([weights.layers[name] for name in names])
            rows = found.most
            if found.is_steady:
                measurements.remember(key, rows)
            else:
                is_steady = False
                log.info("times of %s weights vary, so they are measured again later", shape)
        most |= dict.fromkeys(names, rows)
    if weights.are_current:
        for rows in {*most.values()}:
            weights.limit_rows([name for name in most if most[name] == rows], rows)
    return is_steady


def _machine() -> str:
    """What computes products."""
    return f"{processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
