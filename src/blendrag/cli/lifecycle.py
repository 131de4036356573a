"""How every command begins and ends: library logs, checks of the environment, exit statuses.

:func:`begin` runs before anything large is imported. :func:`reporting` maps exceptions to exit statuses and
one sentence; a traceback means a defect in blendrag, never bad input.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import ParamSpec

import typer

from blendrag.cli import interrupt
from blendrag.cli.options import flag
from blendrag.cli.output import confirmed, echo, say
from blendrag.config import settings
from blendrag.errors import (
    BlendragError,
    ContextOverflowError,
    CorruptKVError,
    InvalidInputError,
    InvalidOptionError,
    NoThreadError,
    RequestCancelled,
    StoreFullError,
    UnsupportedModelError,
    is_out_of_memory,
    is_out_of_space,
    is_out_of_threads,
    starting_thread,
)
from blendrag.store.durable import readable_size
from blendrag.wording import is_step

DONE = 0
#: Some inputs failed, or there was no room for all of them.
FAILED = 1
USER_ERROR = 2
REFUSED_MODEL = 3
INTERRUPTED = interrupt.STATUS

#: Importing torch and transformers fails in a smaller address space. Measured: torch 2.13 (CPU) and
#: transformers 5.17 work under 2,000 MiB, and fail or crash under 1,800 MiB.
MIN_ADDRESS_SPACE_BYTES = 1792 * 1024**2
#: Threads of one command: the scheduler, the loader and the progress display.
OWN_THREADS = 3

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
_NOISY_LOGGERS = (
    "transformers", "sentence_transformers", "huggingface_hub", "peft", "torch", "faiss",
    "pypdf",
    "torchao", "torch.utils._pytree",  # torchao 0.18 warns at every import about GPU kernels and enums
)  # fmt: skip

P = ParamSpec("P")


def begin(
    verbose: bool, if_interrupted: str, loads_torch: bool = True, shows_downloads: bool = False
) -> None:
    """Set up logs and Ctrl-C, and check the environment, before anything large is imported.

    ``shows_downloads``: with the bars of the hub's library.

    Raises :class:`InvalidInputError` for an environment that cannot be used, and :class:`NoThreadError`.
    """
    set_up_logging(verbose, shows_downloads)
    settings()  # refuses BLENDRAG_* variables with invalid values
    if loads_torch:
        _check_address_space()
        _check_threads()
    interrupt.expect(if_interrupted)


class _Echo(logging.Handler):
    """Prints blendrag's own warnings as sentences, and ordinary steps as notes; with ``verbose`` all."""

    def __init__(self, verbose: bool) -> None:
        super().__init__()
        self._verbose = verbose

    def emit(self, record: logging.LogRecord) -> None:
        if is_step(record):
            say("note", record.getMessage())
        elif self._verbose or record.levelno >= logging.WARNING:
            say(record.levelname.lower(), record.getMessage())


def set_up_logging(verbose: bool, shows_downloads: bool = False) -> None:
    """Silence other libraries unless ``verbose``. They read these variables when they are imported."""
    ours = logging.getLogger("blendrag")
    ours.handlers[:] = [_Echo(verbose)]
    ours.propagate = False
    ours.setLevel(logging.INFO)
    if verbose:
        return
    for name, value in _QUIET.items():
        if not (shows_downloads and name == "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, value)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def _check_address_space() -> None:
    """Refuse a limit (``ulimit -v``) under which torch and transformers cannot be imported.

    Depending on the limit, the import raises, crashes or never ends: OpenBLAS before 0.3.30, which is part
    of scipy 1.17, retries a failing mmap forever (https://github.com/OpenMathLib/OpenBLAS/issues/5289).
    """
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY and limit_bytes < MIN_ADDRESS_SPACE_BYTES:
        raise InvalidInputError(
            f"the address space is limited to {readable_size(limit_bytes)} (ulimit -v), expected at least "
            f"{readable_size(MIN_ADDRESS_SPACE_BYTES)} to load torch and transformers; raise the limit, or "
            "limit resident memory instead, with a cgroup"
        )


def _check_threads() -> None:
    """Refuse a limit (``ulimit -u``, ``pids.max``) under which a request cannot start its threads.

    numpy's OpenBLAS (0.3.30) sends SIGINT to the process if it cannot start a thread while it is loaded.
    """
    over = threading.Event()
    try:
        with starting_thread():
            for _ in range(OWN_THREADS):
                threading.Thread(target=over.wait, daemon=True).start()
    finally:
        over.set()


def reporting(command: Callable[P, int]) -> Callable[P, None]:
    """Turn a command's result or error into an exit status and at most one sentence."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            status = command(*args, **kwargs)
        except KeyboardInterrupt:
            status = interrupted()
        except Exception as error:
            if interrupt.requested():  # the error is a consequence of Ctrl-C
                status = interrupted()
            else:
                status = _status_of(error, kwargs)
        raise typer.Exit(status)

    return run


def removal_confirmed(what: str) -> bool:
    """Ask for confirmation to remove that. Raises :class:`InvalidInputError` if stdin has no answer."""
    try:
        return confirmed(f"Remove {what}?")
    except typer.Abort as exc:
        if interrupt.requested():
            raise KeyboardInterrupt from exc
        echo(err=True)  # end the line of the question
        raise InvalidInputError(
            f"removing {what} needs confirmation, and stdin gave none; add --yes to skip it"
        ) from exc


def interrupted() -> int:
    """Print what Ctrl-C left behind."""
    say("interrupted", interrupt.sentence())
    return INTERRUPTED


def by_its_option(error: BlendragError, given: Mapping[str, object]) -> BlendragError:
    """The same error, naming the option that led to it, of the command with these options ``given``."""
    if isinstance(error, ContextOverflowError):
        return error.by("--top-k")
    if not isinstance(error, InvalidOptionError):
        return error
    if error.name == "filter":
        return error.called("--only" if given.get("only") and not given.get("where") else "--where")
    return error.called(flag(error.name)) if given.get(error.name) is not None else error


def _status_of(error: Exception, given: Mapping[str, object]) -> int:
    """The exit status for an error, after printing its sentence. Raises defects again."""
    if isinstance(error, BlendragError):
        say("error", str(by_its_option(error, given)))
        if isinstance(error, UnsupportedModelError):
            return REFUSED_MODEL
        if isinstance(error, RequestCancelled):
            return INTERRUPTED
        is_limit = isinstance(error, StoreFullError | CorruptKVError | NoThreadError)
        return FAILED if is_limit else USER_ERROR
    if is_out_of_threads(error):
        say("error", str(NoThreadError()))
    elif is_out_of_memory(error):
        say(
            "error", "out of memory; use a smaller model, another --dtype or fewer chunks (--top-k)"
        )
    elif is_out_of_space(error):
        filename = getattr(error, "filename", None)
        where = f" writing {filename}" if filename else ""
        say("error", f"no space left{where}; free some, what was stored before is intact")
    else:
        raise error
    return FAILED
