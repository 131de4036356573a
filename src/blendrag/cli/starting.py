"""How a command begins: who may speak, what Ctrl-C will say, which engine it works with."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendrag.cli import interrupt, options, quiet
from blendrag.errors import InvalidInputError, starting_thread

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine

#: Address space below which importing torch and transformers fails (measured: the CPU build of torch
#: 2.13 and transformers 5.17 work under 2,000 MiB, and fail or crash under 1,800 MiB).
MIN_ADDRESS_SPACE_BYTES = 1792 * 1024**2

#: Threads of one command at a time: the worker, the loader and the progress display.
OWN_THREADS = 3


def begin(verbose: bool, if_interrupted: str) -> None:
    """Before anything heavy is imported. Raises :class:`InvalidInputError` for an environment that cannot be
    used, and :class:`NoThreadError`."""
    quiet.set_up(verbose)
    options.check_environment()
    _check_address_space()
    _check_threads()
    interrupt.expect(if_interrupted)


def _check_address_space() -> None:
    """Refuse a limit (``ulimit -v``) that torch and transformers cannot be imported under.

    Depending on the limit, the import raises, crashes or never ends: OpenBLAS before 0.3.30, which scipy
    1.17 carries, retries a failing mmap forever while it is loaded
    (https://github.com/OpenMathLib/OpenBLAS/issues/5289).
    """
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY and limit_bytes < MIN_ADDRESS_SPACE_BYTES:
        raise InvalidInputError(
            f"the address space is limited to {limit_bytes / 1e6:,.0f} MB (ulimit -v), expected at least "
            f"{MIN_ADDRESS_SPACE_BYTES / 1e6:,.0f} MB to load torch and transformers; raise the limit, or "
            "limit resident memory instead, with a cgroup"
        )


def _check_threads() -> None:
    """Refuse a limit (``ulimit -u``, ``pids.max``) under which a request cannot start its threads.

    numpy's OpenBLAS (0.3.30) sends the process a SIGINT where it cannot start one while it is loaded.
    """
    over = threading.Event()
    started = [threading.Thread(target=over.wait, daemon=True) for _ in range(OWN_THREADS)]
    try:
        with starting_thread():
            for thread in started:
                thread.start()
    finally:
        over.set()


def engine_for(
    model: str | None,
    store: Path | None,
    lora: Path | None = None,
    for_ingest: bool = False,
    trust_remote_code: bool = False,
    **given: Any,
) -> BlendEngine:
    """An engine with the model asked for, else with the store's own."""
    from blendrag.engine import BlendEngine

    adapter = str(lora) if lora else None
    model = options.model_for(model, store, for_ingest, trust_remote_code)
    return BlendEngine(model, store, lora=adapter, trust_remote_code=trust_remote_code, **given)
