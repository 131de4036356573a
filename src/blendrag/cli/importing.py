"""Imports of torch and transformers without Python's garbage collector."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Within this context torch and transformers are imported for this process.

    They make half a million objects that stay until the process ends. The collector looks at none of them,
    neither while they are imported nor later: that takes a second of a short command, and pauses a server.
    Does nothing if torch is imported: some of the objects are then those of others, and may be garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
