"""Entry point of the console script; handles Ctrl-C before anything large is imported."""

from __future__ import annotations

import atexit
import os
import sys

from blendrag.cli import interrupt


def main() -> None:
    """Run the command line; never returns normally."""
    status: int | str | None = None

    @atexit.register  # first, so that it is called last
    def skip_teardown() -> None:
        """Freeing the objects of torch and transformers one by one takes a second."""
        if isinstance(status, int):
            interrupt.leave(status)

    interrupt.install()
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        from blendrag.cli.output import Guarded

        sys.stderr = Guarded(sys.stderr)
        from blendrag.cli.app import app

        app(prog_name="blendrag")
        status = 0
    except SystemExit as leaving:
        status = leaving.code
    except KeyboardInterrupt:
        os.write(2, f"interrupted: {interrupt.sentence()}\n".encode())
        status = interrupt.STATUS
    if interrupt.requested():
        interrupt.leave(interrupt.STATUS)
    sys.exit(status)


if __name__ == "__main__":
    main()
