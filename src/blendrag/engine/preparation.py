"""A request before anything is computed for it: may it be answered, what is loaded, and how.

Owns the checks that need the loaded model, and the way through the loading controller.
"""

from __future__ import annotations

import time
from dataclasses import replace

from blendrag.engine.options import ASSISTED, REFUSED, Options
from blendrag.engine.task import Prepared, Task, check_fits
from blendrag.errors import InvalidInputError, UnsupportedModelError
from blendrag.model.adapter import ModelAdapter
from blendrag.planning.controller import Controller, PlanOptions
from blendrag.planning.plan import Plan


class Preparation:
    """Prepares tasks for one model."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter

    def checked(self, task: Task) -> Task:
        """``task``, with the number of its sequences.

        Raises :class:`ContextOverflowError`, :class:`InvalidInputError` for a checkpoint that asks for
        assisted decoding and for ``logprobs`` of several sequences, :class:`UnsupportedModelError` in
        any mode but full.
        """
        check_fits(task.plan, task.max_new_tokens, self._adapter)
        if task.mode != "full":
            self._adapter.require_blendable()
        self._refuse_assistance()
        task = replace(task, sequences=self._sequences(task.options))
        if task.sequences > 1 and task.options.logprobs is not None:
            raise InvalidInputError(
                f"logprobs of {task.sequences} beams or sequences, expected one sequence; "
                "leave one of the two out"
            )
        return task

    def _sequences(self, options: Options) -> int:
        """As asked for, else as the checkpoint's own generation config says."""
        config = self._adapter.model.generation_config
        names = ("num_beams", "num_return_sequences")
        return max(int(options.generate.get(n) or getattr(config, n, None) or 1) for n in names)

    def _refuse_assistance(self) -> None:
        """Of the checkpoint's own generation config; a request's arguments were looked at before."""
        config = self._adapter.model.generation_config
        for name in ASSISTED:
            value = getattr(config, name, None)
            if value is not None and value is not False:
                raise InvalidInputError(
                    f"the generation config of {self._adapter.model_id} sets {name} to {value!r}: "
                    f"{REFUSED[name]}; set model.generation_config.{name} to None"
                )

    def prepare(
        self, task: Task, controller: Controller | None, avoid: frozenset[str] = frozenset()
    ) -> Prepared:
        """Open what is loaded, and decide how. Without a controller nothing is loaded."""
        if controller is None:
            plan = Plan.computed(task.plan, task.why_computed)
        else:
            options = PlanOptions(
                task.mode, task.new_policy(), task.schedule_at, task.ratio, task.is_auto
            )
            plan = controller.plan(task.plan, options, avoid, 1 if task.sequences == 1 else 2)
        try:
            notes = (*task.notes, *task.calibration_notes(plan.ratio), *plan.notes)
            if plan.spans:
                self._check_length(task)
        except BaseException:
            plan.close()
            raise
        if plan.forecast is not None:  # measured from the start of the request, as the TTFT is
            ttft_s = time.perf_counter() - task.started + plan.forecast.ttft_s
            plan = replace(plan, forecast=replace(plan.forecast, ttft_s=ttft_s))
        return Prepared(replace(task, notes=notes), plan)

    def _check_length(self, task: Task) -> None:
        """Keys of a table that changes with the length cannot be mixed with stored ones."""
        tokens, limit = len(task.plan.ids), self._adapter.blend_limit_tokens
        if limit is not None and tokens + task.max_new_tokens > limit:
            raise UnsupportedModelError(
                f"prompt of {tokens} tokens passes {limit}, where {self._adapter.model_id}'s rotary "
                "table changes with the length; use mode full or a shorter prompt"
            )
