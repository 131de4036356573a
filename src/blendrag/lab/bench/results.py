"""Results of ``blendrag bench`` read back from the JSON that it printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from blendrag.errors import InvalidInputError
from blendrag.lab.bench.auto_results import AutoResult
from blendrag.lab.bench.load import LoadResult
from blendrag.lab.bench.machine import Machine
from blendrag.lab.bench.overhead import OverheadResult
from blendrag.lab.bench.sweep import SweepResult
from blendrag.lab.bench.throughput_results import ThroughputResult
from blendrag.lab.bench.trace import TraceResult
from blendrag.lab.bench.ttft_results import TtftResult

#: Benches → what each prints beside its command and the machine.
RESULTS: dict[str, Any] = {
    "ttft": TtftResult,
    "sweep": SweepResult,
    "trace": TraceResult,
    "throughput": ThroughputResult,
    "load": LoadResult,
    "auto": AutoResult,
    "overhead": OverheadResult,
}


@dataclass(frozen=True)
class Measured:
    """One file: the result, the command that made it, and what it was made on."""

    command: str
    machine: Machine
    result: Any
    """Of the bench's type in :data:`RESULTS`."""


def read_result(path: Path, bench: str) -> Measured:
    """Raises :class:`InvalidInputError` for a file that is no whole result of that bench."""
    fields = _fields(path, bench)
    command = fields.get("command")
    if not isinstance(command, str) or command.split()[:3] != ["blendrag", "bench", bench]:
        found = f"what {command!r} printed" if isinstance(command, str) else "no command"
        raise InvalidInputError(f"{path} holds {found}, {_expected(path, bench)}")
    try:
        machine = TypeAdapter(Machine).validate_python(fields.get("machine"))
        result = TypeAdapter(RESULTS[bench]).validate_python(fields)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"])) or "machine"
        raise InvalidInputError(
            f"{path} is not whole ({where}: {first['msg']}), {_expected(path, bench)}"
        ) from exc
    return Measured(command, machine, result)


def _fields(path: Path, bench: str) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "no JSON"
        raise InvalidInputError(
            f"{path} cannot be read ({reason}), {_expected(path, bench)}"
        ) from exc
    if not isinstance(fields, dict):
        raise InvalidInputError(f"{path} holds no JSON object, {_expected(path, bench)}")
    return fields


def _expected(path: Path, bench: str) -> str:
    return (
        f"expected what blendrag bench {bench} --json prints; measure again, or remove {path.name}"
    )
