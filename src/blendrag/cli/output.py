"""How results and sentences are printed: JSON and results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import typer


def say(kind: str, text: str) -> None:
    """One line on stderr: ``error: …``, ``note: …``."""
    typer.echo(f"{kind}: {' '.join(str(text).split())}", err=True)


def show(as_json: bool, report: Any, text: str) -> None:
    """Print a report, which is a dataclass, as JSON or as ``text``."""
    print_json(asdict(report)) if as_json else typer.echo(text)


def print_json(fields: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """An object or a list on one line; NaN and infinity become null."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "")
    typer.echo(json.dumps(_finite(fields), ensure_ascii=encoding != "utf8", allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def count(number: int, noun: str) -> str:
    """``"1 chunk"``, ``"2,000 chunks"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"
