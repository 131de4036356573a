"""Options that several benches share, as one parameter: a dataclass whose fields are options.

Owns how a command's signature grows by those fields, which is what typer reads. Knows no option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, TypeVar, get_type_hints

R = TypeVar("R")


def spread(command: Callable[..., R]) -> Callable[..., R]:
    """``command``, with the fields of every parameter that is a dataclass in place of that parameter."""
    own = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        p.name: p.annotation for p in own.parameters.values() if is_dataclass(p.annotation)
    }
    grown = [
        each
        for parameter in own.parameters.values()
        for each in (_fields(groups[parameter.name]) if parameter.name in groups else [parameter])
    ]

    @wraps(command)
    def run(**given: Any) -> R:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        return command(**given)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=Parameter.KEYWORD_ONLY) for p in grown]
    )
    run.__annotations__ = {p.name: p.annotation for p in grown}
    return run


def _fields(group: Any) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = Parameter.empty if field.default is MISSING else field.default
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )
