"""How far schedules are from full prefill on the prompts of a calibration, as an engine computes them.

Owns what runs on the worker: one prefill at a time, so that Ctrl-C waits for no more than one. Between two
of them somebody else may change the model: each looks whether it is still the one whose KV is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from blendrag.engine.resources import Resources
from blendrag.engine.worker import Worker
from blendrag.errors import CorruptKVError, IdentityChangedError, InvalidInputError
from blendrag.fusor.loader import SpanCorruptError
from blendrag.fusor.selection import Schedule, SelectionPolicy, make_policy
from blendrag.planning.controller import Controller
from blendrag.planning.deviation import Reference, deviation, reference
from blendrag.text.prompt import PromptPlan

T = TypeVar("T")


class Measured:
    """Deviation of one prompt after the other, each on the worker."""

    def __init__(
        self,
        resources: Resources,
        worker: Worker,
        controller: Controller,
        namespace: str,
        policy: SelectionPolicy,
        ratio: float,
    ) -> None:
        """``namespace`` is the one that ``controller`` reads from."""
        self._resources = resources
        self._worker = worker
        self._controller = controller
        self._namespace = namespace
        self._policy = policy
        self._ratio = ratio
        self._references: list[Reference] = []
        self._reused: list[float] = []
        self._known: dict[tuple[int, Schedule], float] = {}

    @property
    def prompts(self) -> int:
        return len(self._references)

    @property
    def reuse_deviation(self) -> float:
        """Mean over the prompts, with nothing recomputed."""
        return sum(self._reused) / len(self._reused)

    def expect(self, plans: Sequence[PromptPlan]) -> None:
        """Prefill ``plans`` in full; those that hold nothing to blend are left out."""
        adapter = self._resources.adapter
        for plan in plans:
            expected = self._run(partial(reference, adapter, plan))
            reused = self._deviation(expected, make_policy("reuse"), Schedule("constant"))
            if reused is not None:
                self._references.append(expected)
                self._reused.append(reused)
        if not self._references:
            raise InvalidInputError(
                f"store {self._resources.root} holds no KV of {adapter.model_id} that could be blended; "
                "expected an ingested corpus, ingest it with this model first"
            )

    def gains(self, schedule: Schedule) -> list[float]:
        """By how much ``schedule`` is closer to full prefill than recomputing nothing, prompt by prompt."""
        return [reused - self(i, schedule) for i, reused in enumerate(self._reused)]

    def __call__(self, index: int, schedule: Schedule) -> float:
        known = self._known.get((index, schedule))
        if known is not None:
            return known
        measured = self._deviation(self._references[index], self._policy, schedule)
        if measured is None:
            raise CorruptKVError("chunks were removed during the calibration; start it again")
        self._known[index, schedule] = measured
        return measured

    def _deviation(
        self, expected: Reference, policy: SelectionPolicy, schedule: Schedule
    ) -> float | None:
        def measure() -> float | None:
            fusor = self._resources.fusor
            return deviation(fusor, self._controller, expected, policy, schedule, self._ratio)

        try:
            return self._run(measure)
        except SpanCorruptError as exc:
            raise CorruptKVError(
                "stored KV failed verification and was set aside; ingest again, then calibrate"
            ) from exc

    def _run(self, call: Callable[[], T]) -> T:
        """On the worker, under the model's lock. Raises :class:`IdentityChangedError`."""
        adapter = self._resources.adapter

        def run() -> T:
            with adapter.lock:
                if self._resources.kv_validity.namespace != self._namespace:
                    raise IdentityChangedError(
                        f"the weights or adapters of {adapter.model_id} changed during the "
                        "calibration; nothing was kept, start it again"
                    )
                return call()

        return self._worker.run(run)
