"""What an option is: which values it takes, how it is written as text, its help, and who may set it.

:mod:`blendrag.config` is the table of all options. A wrong value gets the same sentence wherever it is given:
in Python, in a variable, on the command line, in the body of a request.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from blendrag.errors import InvalidInputError, InvalidOptionError
from blendrag.wording import quoted

T = TypeVar("T")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)
#: Least likeness of a misspelled name: "mdoe" is meant for "mode", and "template" not for "temperature".
_NEAR = 0.75
#: The same among the few names of a template or schema: "enable_thoughts" is meant for "enable_thinking".
ALIKE = 0.6
_SWITCH = {"true": True, "1": True, "yes": True, "on": True,
           "false": False, "0": False, "no": False, "off": False}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Option:
    """One row of the table. ``None`` is no value: the default, the store or the model decides."""

    name: str
    help: str
    where: str
    """Who may set it, of: env engine request wrapper cli server ray."""
    expected: str
    """What follows "must be" in an error."""
    accepts: Callable[[Any], bool]
    parse: Callable[[str], Any] = str
    """A text of a variable or the command line → the value; raises :class:`ValueError`, :class:`KeyError`."""
    metavar: str = "TEXT"
    unless_given: str = ""
    """What is taken instead of ``None``."""
    flags: str = ""
    """How the command line spells it, if not as ``--its-name``."""

    def check(self, value: Any, called: str = "") -> None:
        """Raise :class:`InvalidOptionError` for a value of the wrong type or out of range, where the option
        is ``called`` by another name than its own."""
        if value is not None and not self.accepts(value):
            raise self._wrong(value).called(called or self.name)

    def read(self, text: str) -> Any:
        """The value that ``text`` stands for. Raises :class:`InvalidOptionError`."""
        try:
            value = self.parse(text)
        except (ValueError, KeyError, RecursionError):
            raise self._wrong(text) from None
        if not self.accepts(value):
            raise self._wrong(value if is_number(value) else text)
        return value

    def _wrong(self, value: Any) -> InvalidOptionError:
        return InvalidOptionError(self.name, f"{quoted(value, 60)} must be {self.expected}")

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Fields of pydantic models that are annotated with an option check it before their type."""
        from pydantic_core import PydanticCustomError, core_schema

        def check(value: Any) -> Any:
            try:
                self.check(value)
            except InvalidOptionError as exc:
                given = {"name": exc.name, "wrong": exc.wrong}
                raise PydanticCustomError("option", "{name} {wrong}", given) from exc
            return value

        return core_schema.no_info_before_validator_function(check, handler(source))


def near_names(
    unknown: Iterable[str], known: Iterable[str], similarity: float = _NEAR
) -> list[str]:
    """The ``known`` names that are spelled almost like one of the ``unknown``, the nearest first.

    ``similarity``: how alike they are at least, as :func:`difflib.get_close_matches` counts it.
    """
    names = sorted(known)
    return [near for name in unknown for near in get_close_matches(name, names, 2, similarity)]


def did_you_mean(near: Iterable[str], otherwise: str) -> str:
    """A question about ``near`` names, or ``otherwise`` if there are none."""
    names = " or ".join(dict.fromkeys(near))
    return f"did you mean {names}?" if names else otherwise


class Elsewhere(NamedTuple):
    """Options of something else, which are given to the wrong call."""

    names: Collection[str]
    owner: str
    remedy: str


def refuse_unknown(
    given: Iterable[str],
    known: Iterable[str],
    what: str,
    otherwise: str = "",
    elsewhere: Elsewhere | None = None,
) -> None:
    """Raise :class:`InvalidInputError` for a name that is not ``known``, with the remedy if it is one of
    ``elsewhere``, else with those that are near it or longer by some words, else with what to do
    ``otherwise``, by default with all."""
    names = sorted(known)
    if unknown := sorted(set(given).difference(names)):
        if elsewhere is not None and {*unknown} <= {*elsewhere.names}:
            raise InvalidInputError(
                f"{', '.join(unknown)}: not {what}, but of {elsewhere.owner}; {elsewhere.remedy}"
            )
        near = near_names(unknown, names) or [
            name for name in names if any(f"_{each}_" in f"_{name}_" for each in unknown)
        ]
        meant = did_you_mean(near, otherwise or f"expected {', '.join(names)}")
        raise InvalidInputError(f"{', '.join(unknown)}: not {what}; {meant}")


def refuses_unknown(
    what: str, otherwise: str = "", elsewhere: Elsewhere | None = None
) -> Callable[[type[T]], type[T]]:
    """Decorator of a dataclass that users make: :func:`refuse_unknown` for other keywords than its fields."""

    def decorate(cls: type[T]) -> type[T]:
        init, names = cls.__init__, cls.__annotations__

        @wraps(init)
        def checked(self: T, *args: Any, **given: Any) -> None:
            refuse_unknown(given, names, what, otherwise, elsewhere)
            init(self, *args, **given)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate


# -- kinds of options -----------------------------------------------------------------------------


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite one; a whole number may be of any length."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and -sys.float_info.max <= value <= sys.float_info.max


def parse_number(given: str) -> float:
    """A whole number stays one, so that messages repeat it as it is written."""
    with suppress(ValueError):
        return int(given)
    return float(given)


def whole(
    name: str, help: str, where: str, low: int, high: int | None = None, **more: Any
) -> Option:
    """A whole number from ``low`` to ``high``."""
    limits = f"of at least {low}" if high is None else f"in [{low}, {high}]"
    limits = "of at most 64 bits" if low == -(2**63) else limits
    return Option(
        name, help, where, f"a whole number {limits}",
        lambda v: is_whole(v) and low <= v and (high is None or v <= high), int,
        f"{low}..{'' if high is None else high}", **more,
    )  # fmt: skip


def number(
    name: str, help: str, where: str, expected: str, fits: Callable[[float], bool], **more: Any
) -> Option:
    """A finite number, or what else ``fits``."""
    return Option(
        name,
        help,
        where,
        expected,
        lambda v: is_number(v) and fits(v),
        parse_number,
        "NUMBER",
        **more,
    )


def share(name: str, help: str, where: str, word: str = "", **more: Any) -> Option:
    """A number in [0, 1], or ``word``."""
    return Option(
        name, help, where, f"a number in [0, 1]{f' or {word!r}' if word else ''}",
        lambda v: (bool(word) and v == word) or (is_number(v) and 0 <= v <= 1),
        lambda text: text if word and text == word else parse_number(text),
        f"0..1|{word}" if word else "0..1", **more,
    )  # fmt: skip


def one_of(name: str, help: str, where: str, values: tuple[str, ...]) -> Option:
    named = f"one of {', '.join(values)}"
    return Option(name, help, where, named, lambda v: isinstance(v, str) and v in values)


def text(name: str, help: str, where: str, **more: Any) -> Option:
    return Option(name, help, where, "a text", lambda v: isinstance(v, str), **more)


def path(name: str, help: str, where: str, **more: Any) -> Option:
    def accepts(value: Any) -> bool:
        return isinstance(value, str | os.PathLike)

    return Option(name, help, where, "a path", accepts, Path, "PATH", **more)


def switch(name: str, help: str, where: str, **more: Any) -> Option:
    return Option(
        name, help, where, "True or False", lambda v: isinstance(v, bool),
        lambda given: _SWITCH[given.strip().lower()], "", **more,
    )  # fmt: skip


def size(name: str, help: str, where: str, **more: Any) -> Option:
    """A number of bytes."""
    return Option(
        name, help, where, "a number of bytes; as text also 500MB or 2GiB",
        lambda v: is_whole(v) and v >= 0, parse_size, "SIZE", **more,
    )  # fmt: skip


def parse_size(given: str) -> int:
    """``2GiB``, ``500MB``, ``1048576`` → bytes; raises :class:`ValueError` for other texts."""
    match = _SIZE.fullmatch(given)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(given)
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def mapping(name: str, help: str, where: str, **more: Any) -> Option:
    return Option(
        name, help, where, "a dictionary; as text NAME=VALUE or a JSON object",
        lambda v: isinstance(v, Mapping), parse_arguments, "NAME=VALUE", **more,
    )  # fmt: skip


#: Python's spellings, which are no JSON. As texts all three would be true.
_PYTHON = {"True": True, "False": False, "None": None}


def parse_arguments(given: str) -> dict[str, Any]:
    """``enable_thinking=false`` or a JSON object → arguments; raises :class:`ValueError` for other texts."""
    name, equals, value = given.partition("=")
    if given.lstrip().startswith("{"):
        return dict(json.loads(given))
    if not (name.strip() and equals):
        raise ValueError(given)
    made: Any = _PYTHON.get(value, value)
    with suppress(ValueError, RecursionError):
        made = json.loads(value)
    return {name.strip(): made}
