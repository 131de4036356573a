"""How one request is to be answered, and which values that may have.

Owns the limits of every option and the sentence that says one is broken. Does not know what an option
is called by the frameworks' wrappers, which say it in their words (:mod:`blendrag.frameworks.fields`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from blendrag.config import AUTO, Mode, Ratio
from blendrag.errors import InvalidInputError, InvalidOptionError

_OWN = "the engine sets it itself"
_NOT_ASSISTED = "assisted decoding cannot be combined with blending"
_CACHE = "blending brings its own cache"
#: Settings of a generation config that turn on assisted decoding.
ASSISTED = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
#: Arguments of ``model.generate`` a request may not carry, and why.
REFUSED = {
    "assistant_model": _NOT_ASSISTED,
    **dict.fromkeys(ASSISTED, _NOT_ASSISTED),
    "generation_config": "its settings are given one by one, so that each can be looked at",
    "prefill_chunk_size": "a blended prompt is prefilled in one forward",
    "past_key_values": _CACHE,
    "cache_implementation": _CACHE,
    "cache_config": _CACHE,
    "use_cache": _CACHE,
    "inputs": _OWN,
    "input_ids": _OWN,
    "inputs_embeds": _OWN,
    "attention_mask": _OWN,
    "position_ids": _OWN,
    "streamer": _OWN,
    "stopping_criteria": _OWN,
    "return_dict_in_generate": _OWN,
    "max_length": "use max_new_tokens",
}

#: Alternatives that may be asked for at each place, as many as OpenAI's API gives.
MAX_LOGPROBS = 20

#: What options of a request have to be, and what that is called; numpy's numbers are numbers, too.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "max_new_tokens": (Integral, "a whole number"),
    "temperature": (Real, "a number"),
    "top_p": (Real, "a number"),
    "timeout_s": (Real, "a number of seconds"),
    "seed": (Integral, "a whole number"),
    "logprobs": (Integral, "a whole number"),
    "stop": ((str, list, tuple, set, frozenset), "a text or a list of texts"),
    "template": (Mapping, "a dictionary"),
    "generate": (Mapping, "a dictionary"),
    "apply_chat_template": (bool, "True or False"),
}

MODES: tuple[Mode, ...] = ("blend", "full", "prefix", "reuse")


def _is_nan(value: Any) -> bool:
    return isinstance(value, Real) and math.isnan(value)


def _shown(value: Any) -> str:
    return "nan" if _is_nan(value) else f"{value!r:.60} ({type(value).__name__})"


def is_number(value: Any) -> bool:
    """Whether it is a real number, and not merely ``True`` or ``False``."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_min_ratio(least: float | None) -> None:
    """Raise :class:`InvalidOptionError` unless it is in [0, 1] or left out."""
    if least is not None and not (is_number(least) and 0.0 <= least <= 1.0):
        raise InvalidOptionError(
            "min_ratio",
            f"{least!r} is outside [0, 1]; expected the least share that keeps quality",
        )


def check_ratio(ratio: Ratio | None) -> None:
    """Raise :class:`InvalidInputError` unless it is in [0, 1], ``auto`` or left out."""
    if ratio is None or (isinstance(ratio, str) and ratio == AUTO):
        return
    if not is_number(ratio):
        raise InvalidInputError(f"ratio {ratio!r} is not a number in [0, 1] or {AUTO!r}")
    if not 0.0 <= ratio <= 1.0:
        raise InvalidInputError(f"ratio {ratio} is outside [0, 1]; expected a share, or {AUTO!r}")


@dataclass(frozen=True)
class Options:
    """How to answer one request; ``None`` takes the engine's default.

    ``temperature`` 0 or ``None`` decodes greedily; ``top_p`` asks for one beside it. ``generate``
    holds further keyword arguments for ``model.generate`` (``num_beams``, ``num_return_sequences``,
    ``repetition_penalty``, …); ``do_sample`` there samples as the checkpoint's generation config says.

    Raises :class:`InvalidOptionError` (an :class:`InvalidInputError`) for a value out of range or of
    the wrong kind.
    """

    mode: Mode | None = None
    policy: str | None = None
    schedule: str | None = None
    ratio: Ratio | None = None
    """In [0, 1]; ``auto`` leaves it, and what is loaded at all, to the loading controller."""
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the answer, none of them empty; a single string is one of them."""
    temperature: float | None = None
    top_p: float | None = None
    apply_chat_template: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template (``enable_thinking``, …)."""
    generate: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    """Seconds from being asked to the whole answer, waiting for other requests included."""
    min_ratio: float | None = None
    """In [0, 1]: the least that ``auto`` takes; a ratio that is given has none."""
    seed: int | None = None
    """Makes sampling repeatable, whatever else draws from torch's global generators meanwhile."""
    logprobs: int | None = None
    """``None``: none; 0: of the chosen tokens; k: and of the k most likely at each place."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Function schemas as OpenAI writes them, for the chat template. The answer's text then keeps the
    control tokens that calls are written with (:func:`blendrag.frameworks.tools.parse`)."""
    opening: str = ""
    """What the answer begins with, put behind the rendered prompt; the answer's text goes on from it."""

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.mode is not None and self.mode not in MODES:
            raise InvalidInputError(f"mode {self.mode!r} is not one of {', '.join(MODES)}")
        check_ratio(self.ratio)
        check_min_ratio(self.min_ratio)
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InvalidOptionError("max_new_tokens", f"{self.max_new_tokens} is not 1 or more")
        if self.temperature is not None and self.temperature < 0:
            raise InvalidOptionError("temperature", f"{self.temperature} is not 0 or more")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InvalidOptionError("top_p", f"{self.top_p} is outside (0, 1]")
        if self.top_p is not None and self.temperature is None and not self.samples:
            raise InvalidOptionError(
                "top_p",
                f"{self.top_p} without a temperature, expected both, as decoding is greedy without one; "
                "add temperature=1.0 to sample from the model's own probabilities",
            )
        self._check_limits()
        object.__setattr__(self, "tools", tuple(self.tools or ()))
        object.__setattr__(self, "stop", self._stop_texts())
        for name in self.generate:
            if name in REFUSED:
                raise InvalidInputError(f"generate argument {name}: {REFUSED[name]}; leave it out")

    def _check_kinds(self) -> None:
        for name, (kind, called) in _KINDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, kind) or _is_nan(value):
                raise InvalidOptionError(
                    name, f"{_shown(value)}, expected {called}; give one or leave it out"
                )

    def _stop_texts(self) -> tuple[str, ...]:
        texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for text in texts:
            if not isinstance(text, str):
                raise InvalidOptionError(
                    "stop", f"holds {_shown(text)}, expected texts; write it as one"
                )
            if not text:
                raise InvalidOptionError(
                    "stop",
                    "holds an empty text, which stands before every answer; leave it out to let the "
                    "model end by itself",
                )
        return texts

    def _check_limits(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InvalidOptionError(
                "timeout_s",
                f"{self.timeout_s} is not more than 0; leave it out to wait for as long as it takes",
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidOptionError("seed", f"{self.seed} is not a 64-bit integer")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidOptionError("logprobs", f"{self.logprobs} is outside [0, {MAX_LOGPROBS}]")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, not the likeliest taken."""
        return bool(self.generate.get("do_sample", self.temperature))
