"""The weights that a model decodes with: those of the option ``decode_weights``, if the model can have them.

Packed copies (:mod:`blendrag.model.decode_weights`) are made once per model and kept in the user's cache
directory, as are the measured numbers of rows for which they are faster. A model that cannot have them
decodes with its own weights; a note in the metrics says why, unless the option is ``auto``.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from blendrag.config import cache_folder
from blendrag.fusor import Fusor
from blendrag.fusor.decode_agreement import TEXTS, TOKENS, AgreementMeasurement, DecodeAgreement
from blendrag.model import decode_weights as packing
from blendrag.model import measurements
from blendrag.model.adapter import UNNAMED, ModelAdapter
from blendrag.model.decode_weights import NATIVE, DecodeWeights, Packed, PackedWeights
from blendrag.model.sharing import is_loaded, loaded_once
from blendrag.planning.profile import processor_name
from blendrag.store.durable import readable_size
from blendrag.wording import condensed, log_step, short_model

log = logging.getLogger(__name__)

#: Counts up when copies are made in another way, so that earlier files are not used.
VERSION = 4
#: Counts up when the numbers of rows are measured in another way.
ROWS_VERSION = 3
AUTO = "auto"
#: The format of ``auto``; ``int4`` agrees less (docs/decode-weights.md).
AUTOMATIC = "int8"
#: Least size of all copies for ``auto``: smaller models are read from the processor's caches.
LEAST_BYTES = 32 * 2**20
#: Share of the available memory that copies may take.
MOST_OF_MEMORY = 0.8
#: Files that are kept of a model: its weights change with an adapter (``lora``), and two may take turns.
KEPT = 2
#: Files that are kept of all models without a name together.
KEPT_UNNAMED = 4
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
        self._measurement: AgreementMeasurement | None = None
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
        self._chosen, self._measurement, self.note = None, None, ""
        is_auto = self._wanted == AUTO
        name = AUTOMATIC if is_auto else self._wanted
        why, self.is_measurable = self._known()
        if not self.is_measurable:
            made = why or _made(self._adapter, name)
            if isinstance(made, DecodeWeights):
                self._chosen = made
            elif is_auto:
                log.info("%s decodes with its own weights: %s", self._adapter.model_id, made)
            else:
                self.note = f"decode_weights {name} is not used: {made}"
        self._is_settled = True  # not if this was interrupted

    def _known(self) -> tuple[str, bool]:
        """Why the model keeps its own weights, in a clause or empty, and whether a measurement would tell."""
        name = AUTOMATIC if self._wanted == AUTO else self._wanted
        if why := _why_not(self._adapter, name):
            return why, False
        if not self._decodes_jointly():
            return NOT_TOGETHER, False
        if measurements.recall(_slow_key(self._adapter, name), bool):
            return NOT_FASTER, False
        if self._wanted != AUTO:
            return "", False
        if packing.size_bytes(self._adapter.model) < LEAST_BYTES:
            return "the model is small", False
        known = measurements.recall(_key(self._adapter, AUTOMATIC), DecodeAgreement)
        if known is None or known.suffices:
            return "", known is None
        return f"they choose the same token in {known.share:.1%} of steps", False

    # -- auto -----------------------------------------------------------------------------------

    def expected_s(self, step_s: float) -> float:
        """Seconds of :meth:`measure_all` at most, from those of a forward of one token. Makes no copies."""
        with self._adapter.lock:
            is_measured = self._wanted == NATIVE or not self._known()[1]
        return 0.0 if is_measured else 2 * TOKENS * len(TEXTS) * step_s

    def measure_all(
        self, computed: Callable[[Callable[[], object]], object] = lambda call: call()
    ) -> None:
        """Find out whether packed weights may be used, if need be. ``computed`` calls each piece."""
        computed(self.now)
        if self.is_measurable:
            log_step(
                log,
                "measuring once whether %s chooses the same tokens with %s weights: %d tokens",
                *(short_model(self._adapter.model_id), AUTOMATIC, TOKENS * len(TEXTS)),
            )
        while self.is_measurable:
            computed(self.measure)

    def measure(self) -> None:
        """Measure the next piece: the first one makes the copies, the last one chooses the weights."""
        with self._adapter.lock:
            if self.is_measurable:
                self._measure()

    def _measure(self) -> None:
        adapter = self._adapter
        if self._measurement is None:
            made = _made(adapter, AUTOMATIC)
            if isinstance(made, DecodeWeights):
                self._measurement = AgreementMeasurement(adapter, made)
            else:
                self.is_measurable = False
                log.info("%s decodes with its own weights: %s", adapter.model_id, made)
            return
        weights = self._measurement.weights
        if not weights.are_current:
            self._is_settled, self._measurement, self.is_measurable = False, None, False
            return
        try:
            found = self._measurement.step()
        except Exception as exc:  # a model that decodes otherwise than generate lets it
            log.warning("decode weights cannot be measured, so the model's own are used: %s", exc)
            self._measurement, self.is_measurable = None, False
            return
        if found is None:
            return
        self._measurement, self.is_measurable = None, False
        measurements.remember(_key(adapter, AUTOMATIC), found)
        log.info(
            "%s chooses the same token with %s weights in %.1f%% of %d steps, KL %.4f",
            *(adapter.model_id, AUTOMATIC, 100 * found.share, found.tokens, found.kl),
        )
        self._chosen = weights if found.suffices else None


#: The format of each layer that is packed.
Formats = frozenset[tuple[str, str]]


def compare(
    adapter: ModelAdapter, name: str, measured: dict[Formats, DecodeAgreement] | None = None
) -> DecodeAgreement | str:
    """How the model decodes with ``name`` weights, measured now and remembered; or why it keeps its own.

    ``measured``: what was measured of the model before, for copies that two names have in common; grows.
    """
    measured = {} if measured is None else measured
    with adapter.lock:
        if why := _why_not(adapter, name):
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
            found = AgreementMeasurement(adapter, made).run()
            measured[formats] = replace(found, opening_s=opening_s)
        measurements.remember(_key(adapter, name), measured[formats])
        return measured[formats]


def _key(adapter: ModelAdapter, name: str) -> str:
    """The key under which the agreement of the loaded model is remembered."""
    namespace = adapter.identity.namespace
    return f"decode weights {VERSION}, {name}, {namespace}, {measurements.libraries()}"


def _slow_key(adapter: ModelAdapter, name: str) -> str:
    """The key under which is remembered whether no copy of the loaded model is faster on this machine."""
    version, namespace = f"{VERSION}.{ROWS_VERSION}", adapter.identity.namespace
    return f"slow decode weights {version}, {name}, {namespace}, {_machine()}"


def _why_not(adapter: ModelAdapter, name: str) -> str:
    """Why the model keeps its own weights instead of ``name``, in a clause, or empty."""
    if adapter.refusal is not None:
        return NOT_TOGETHER
    if adapter.is_compiled:
        return "it is compiled"
    if why := packing.why_not(adapter.model):
        return why
    if is_loaded(_file(adapter, name)):  # by another engine
        return ""
    needed, free = packing.size_bytes(adapter.model), available_bytes()
    if needed > free * MOST_OF_MEMORY:
        return f"packed copies need {readable_size(needed)} of memory, and {readable_size(free)} are free"
    return ""


def _made(adapter: ModelAdapter, name: str) -> DecodeWeights | str:
    """The model's copies of that name, or why it keeps its own weights."""
    began = time.perf_counter()
    try:
        made = DecodeWeights(adapter.model, name, _packed(adapter, name))
        is_steady = _limit_rows(made)
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


def available_bytes() -> int:
    """Memory that new allocations may take without swapping, in the machine and in this container."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        available = int(found.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min([available, *_left_by_groups()])


class ControlGroups(NamedTuple):
    """A version of Linux' control groups, which limit the memory of containers."""

    root: Path
    controller: str
    """Its name among the groups of a process."""
    limit: str
    used: str
    droppable: str
    """The page cache in ``used``, by its name in ``memory.stat``."""


CONTROL_GROUPS = (
    ControlGroups(Path("/sys/fs/cgroup"), "", "memory.max", "memory.current", "inactive_file"),
    ControlGroups(
        Path("/sys/fs/cgroup/memory"), "memory",
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
    ),
)  # fmt: skip
#: The groups of this process: ``number:controllers:path`` a line.
OWN_GROUPS = Path("/proc/self/cgroup")


def _left_by_groups() -> list[int]:
    """Bytes that each control group of this process lets it take."""
    left: list[int] = []
    with suppress(OSError, ValueError):
        lines = OWN_GROUPS.read_text(encoding="utf-8").splitlines()
        paths = dict(line.split(":", 2)[1:] for line in lines)
        for groups in CONTROL_GROUPS:
            path = groups.root / paths.get(groups.controller, "").lstrip("/")
            for directory in (path, *path.parents):
                if directory.is_relative_to(groups.root):
                    with suppress(OSError, ValueError, KeyError):  # "max" is no number
                        left.append(_left_by_group(directory, groups))
    return left


def _left_by_group(directory: Path, names: ControlGroups) -> int:
    limit, used = (int((directory / name).read_text()) for name in (names.limit, names.used))
    stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    return max(0, limit - used + int(stat[names.droppable]))


# -- rows for which copies are faster -------------------------------------------------------------


def _limit_rows(weights: DecodeWeights) -> bool:
    """Give each layer the most rows for which its copy is faster, and forget copies that never are.

    Returns whether all numbers of rows are certain; others are measured again by the next process.
    """
    is_steady = True
    by_shape: dict[tuple[str, int, int, bool], list[str]] = defaultdict(list)
    for name, each in weights.layers.items():
        sizes = each.layer.out_features, each.layer.in_features
        by_shape[each.kind.name, *sizes, each.is_head].append(name)
    for shape, names in by_shape.items():
        key = f"decode rows {ROWS_VERSION}, {shape}, {_machine()}"
        rows = measurements.recall(key, int)
        if rows is None:
            found = packing.most_rows([weights.layers[name] for name in names])
            rows = found.most
            if found.is_steady:
                measurements.remember(key, rows)
            else:
                is_steady = False
                log.info("times of %s weights vary, so they are measured again later", shape)
        weights.limit_rows(names, rows)
    return is_steady


def _machine() -> str:
    """What computes products."""
    return f"{processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


# -- copies on disk -------------------------------------------------------------------------------


def _packed(adapter: ModelAdapter, name: str) -> PackedWeights:
    """The packed weights of the model: those of another engine over the same weights, from the user's cache
    if they are there, or made and kept there."""
    file = _file(adapter, name)

    def load() -> PackedWeights:
        found = _read(file, packing.linear_layers(adapter.model))
        if found is None:
            found = packing.pack(adapter.model, name)
            _keep(file, found, partial(_remove_earlier, file, adapter, name))
        return found

    return loaded_once(file, load)


def _of_model(adapter: ModelAdapter, name: str) -> str:
    """What the names of all files of a model begin with."""
    return f"{xxhash.xxh3_64_hexdigest(adapter.model_id.encode())}-{name}"


def _remove_earlier(file: Path, adapter: ModelAdapter, name: str) -> None:
    """Remove the files of earlier weights of the model but the ones written last, to make room for ``file``.

    Models without a name look like one, so more of their files stay.
    """
    kept = (KEPT_UNNAMED if adapter.model_id == UNNAMED else KEPT) - 1
    with suppress(FileNotFoundError):  # another process removes one; the rest goes the next time
        files = file.parent.glob(f"{_of_model(adapter, name)}-*")
        earlier = [each for each in files if each.stem != file.stem]  # not what one writes now
        earlier.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for each in earlier[kept:]:
            each.unlink(missing_ok=True)


def _file(adapter: ModelAdapter, name: str) -> Path:
    """Where the copies of the model's weights are kept."""
    folder = cache_folder("decode-weights")
    fingerprint = adapter.identity.tensors_fingerprint
    return folder / f"{_of_model(adapter, name)}-{VERSION}-{fingerprint}.safetensors"


def _digest(packed: Mapping[str, Packed]) -> str:
    """xxh3-128 over names, shapes and bytes."""
    found = xxhash.xxh3_128()
    for name in sorted(packed):
        for part in packed[name]:
            found.update(f"{name}|{part.dtype}|{tuple(part.shape)}|".encode())
            found.update(part.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _read(file: Path, layers: Iterable[str]) -> PackedWeights | None:
    """What :func:`_keep` wrote; ``None`` if it is missing or damaged."""
    if not file.is_file():
        return None
    try:
        with safe_open(str(file), framework="pt") as opened:
            found = PackedWeights(
                (at, (_copy(opened, f"{at}.0"), _copy(opened, f"{at}.1"))) for at in layers
            )
            digest = (opened.metadata() or {}).get("xxh3")
    except (OSError, SafetensorError, ValueError) as exc:
        log.warning(
            "the packed weights in %s cannot be read (%s), so they are made again", file, exc
        )
        return None
    if _digest(found) != digest:
        log.warning("the packed weights in %s are damaged, so they are made again", file)
        return None
    return found


def _copy(opened: Any, name: str) -> torch.Tensor:
    """A tensor of the file, in memory of its own: the file aligns tensors to 8 bytes, and torch's product in
    8 bits (2.13) crashes for 4 rows and more on weights that are not aligned to 16."""
    tensor: torch.Tensor = opened.get_tensor(name)
    return tensor.clone()


def _keep(file: Path, packed: Mapping[str, Packed], remove_earlier: Callable[[], None]) -> None:
    """Write ``packed``. Raises nothing: they would be made again."""
    tensors = {
        f"{name}.{i}": part for name, parts in packed.items() for i, part in enumerate(parts)
    }
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_earlier()
        save_file(tensors, str(temporary), {"xxh3": _digest(packed)})
        temporary.chmod(0o600)
        os.replace(temporary, file)
    except (OSError, SafetensorError) as exc:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        measurements.warn_unwritable(exc)
