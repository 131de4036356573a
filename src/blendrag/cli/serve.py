"""``blendrag serve``: OpenAI's HTTP interface over one store. Needs the extra ``blendrag[server]``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendrag import __version__
from blendrag.cli import interrupt, options
from blendrag.cli.extras import ray_function
from blendrag.cli.importing import lasting_imports
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import count, say
from blendrag.cli.progress import StatusLine
from blendrag.errors import BlendragError, InvalidInputError
from blendrag.store import server_record
from blendrag.store.regular_files import MIB
from blendrag.wording import quoted, short_model

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine
    from blendrag.server.access import ApiKeys
    from blendrag.server.service import Service

#: Modules that the extra installs.
REQUIREMENTS = ("fastapi", "uvicorn")
#: Size limit of ``--api-key-file``.
MAX_KEY_FILE_BYTES = MIB
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@reporting
@options.takes(*options.NEW_CORPUS, "read_only", *options.DEFAULTS, *options.LIMITS)
def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, options.number("0 takes a free one.", 0, 65535, int)] = 8000,
    api_key_file: Annotated[
        Path | None,
        options.optional("One key a line; a line that ends in 'write' may change documents."),
    ] = None,
    writable: Annotated[
        bool,
        typer.Option(
            "--writable", help="Without keys, everybody on this machine may change documents."
        ),
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        options.optional("A further name of this machine for requests without a key; repeatable."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        options.optional(
            "A site whose pages may ask, such as https://app.example, or * for all; repeatable."
        ),
    ] = None,
    further: Annotated[
        list[str] | None,
        options.optional(
            "A further store, which requests name in the field model; repeatable.",
            "--serve",
            metavar="NAME=STORE",
        ),
    ] = None,
    schema: Annotated[
        list[Path] | None,
        options.optional("A prompt schema that chats may name in the field schema; repeatable."),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Serve with replicas on Ray: of RAY_ADDRESS, or of this machine."
        ),
    ] = False,
    replicas: Annotated[
        str | None,
        options.optional(
            "With --ray: how many, or MIN-MAX to follow the load. [default: 1]", metavar="N|MIN-MAX"
        ),
    ] = None,
    cpus_per_replica: Annotated[
        float | None,
        options.number(
            "With --ray: cores of each replica. [default: a share of this machine, else 1]", 0
        ),
    ] = None,
    gpus_per_replica: Annotated[
        float | None, options.number("With --ray: GPUs of each replica. [default: 0]", 0)
    ] = None,
    verbose: options.Verbose = False,
) -> int:
    """Answer HTTP requests in OpenAI's schema. Runs until Ctrl-C or SIGTERM, and finishes running answers."""
    begin(verbose, "the server had not begun")
    _require_extra()
    from blendrag.server.access import checked_hosts
    from blendrag.server.cross_origin import checked_origins

    hosts, origins = checked_hosts(allow_host or ()), checked_origins(cors_origin or ())
    reads_only = bool(context.params["read_only"])
    if writable:
        _check_writable(api_key_file, origins, reads_only)
    keys, text = _keys(api_key_file, writable)
    limits = options.given(context.params, options.LIMITS)
    if ray:
        _check_on_ray(writable, "max_upload_bytes" in limits, reads_only, bool(further))
        access = {"api_keys": text, "allow_hosts": hosts, "cors_origins": origins}
        serve_on_ray: Callable[..., int] = ray_function("serve")
        return serve_on_ray(context.params, limits | access)
    of_ray = {
        "--replicas": replicas, "--cpus-per-replica": cpus_per_replica,
        "--gpus-per-replica": gpus_per_replica,
    }  # fmt: skip
    for name in (name for name, value in of_ray.items() if value is not None):
        raise InvalidInputError(f"{name} without --ray, expected both; one process is one replica")
    with lasting_imports():
        from blendrag.server.app import create_app
        from blendrag.server.running import serve as serve_until_signal
        from blendrag.server.service import Limits, Service
        from blendrag.server.upload_folders import remove_left

    roots = _further(further or ())
    follows = _follow(context)
    at = _bound(host, port, writable)
    defaults = _defaults(context, len(roots))
    with at, options.engine_for(context, **defaults) as engine, ExitStack() as served:
        _check_names(roots, engine)
        _add_schemas(engine, schema or ())
        beside = {
            name: served.enter_context(options.engine_beside(engine, context, root, **defaults))
            for name, root in roots.items()
        }  # a store that is not there is refused before a model is opened
        _open(engine, needs_blending=not schema)
        if follows:
            served.enter_context(closing(engine.keep_following()))
        for name, other in beside.items():
            _open(other, name)
        address, taken, *_ = at.getsockname()
        has_keys, record = bool(keys.may_write), None
        if reached := server_record.loopback(address):
            record = server_record.ServerRecord(
                reached, taken, engine.model_name, __version__, has_keys
            )
        service = Service(engine, Limits(**limits), keys, hosts, origins, record=record)
        others = [service.beside(other, name) for name, other in beside.items()]
        at.listen()
        if record is not None and not reads_only:
            for each in (service, *others):
                of_store = replace(record, model=each.engine.model_name, name=each.name)
                served.enter_context(server_record.written(each.engine.root, of_store))
        _announce(f"http://{f'[{host}]' if ':' in host else host}:{taken}", service, others)
        warn_of_others(address, has_keys, origins)
        if left := remove_left():
            say("note", f"{count(left, 'uploaded file')} removed, left by a server that was killed")
        interrupt.expect("the server has stopped")
        serve_until_signal(create_app(service, *others), at, verbose)
        if left := sum(each.uploads.left for each in (service, *others)):
            say(
                "note", f"{count(left, 'uploaded file')} not stored yet: send what is missing again"
            )
    return DONE


# -- what the options ask for ---------------------------------------------------------------------


def _keys(file: Path | None, writable: bool) -> tuple[ApiKeys, str | None]:
    """The keys that are asked for, and the text of their file."""
    from blendrag.server.access import ApiKeys

    if file is None:
        return ApiKeys(all_may_write=writable), None
    text = options.read_text("--api-key-file", file, MAX_KEY_FILE_BYTES, "one key a line")
    return ApiKeys.parse(text, f"--api-key-file {file}"), text


def _check_on_ray(writable: bool, limits_uploads: bool, reads_only: bool, further: bool) -> None:
    """Raise :class:`InvalidInputError` for options that exclude ``--ray``."""
    for name, is_given in (("--writable", writable), ("--max-upload", limits_uploads)):
        if is_given:
            raise InvalidInputError(
                f"{name} with --ray, expected no {name}; replicas take no files"
            )
    if reads_only:
        raise InvalidInputError(
            "--read-only with --ray, expected one of them; replicas keep KV in the store"
        )
    if further:
        raise InvalidInputError("--serve with --ray, expected one of them; replicas have one store")


def _bound(host: str, port: int, writable: bool) -> socket:
    """The socket to listen on. Raises :class:`InvalidInputError` for one that must not be ``writable``."""
    from blendrag.server.access import is_loopback
    from blendrag.server.running import bound_socket

    at = bound_socket(host, port)
    if writable and not is_loopback(at.getsockname()[0]):
        at.close()
        raise InvalidInputError(
            f"--writable with --host {host}, expected an address of this machine only, such as 127.0.0.1; "
            "for others use --api-key-file with a line that ends in 'write'"
        )
    return at


def _defaults(context: typer.Context, further: int) -> dict[str, Any]:
    """Options of each engine; so many ``further`` stores share the memory of one."""
    from blendrag.config import settings

    defaults = {"max_new_tokens": None, **options.given(context.params, options.DEFAULTS)}
    if further:
        ram_bytes = context.params["ram_bytes"] or settings().ram_bytes
        defaults["ram_bytes"] = ram_bytes // (1 + further)
    return defaults


def _check_names(roots: Mapping[str, Path], engine: BlendEngine) -> None:
    for name in roots:
        if name in (short_model(engine.model_name), engine.model_name):
            raise InvalidInputError(
                f"--serve {quoted(name)} is what requests call the model of the first store, expected "
                "another name"
            )


def _add_schemas(engine: BlendEngine, files: Sequence[Path]) -> None:
    named: dict[str, Path] = {}
    for file in files:
        name = engine.add_schema(file)
        if (first := named.setdefault(name, file)) is not file:
            raise InvalidInputError(
                f"--schema {file} has the name of {first}, {name!r}, expected another name"
            )


def _open(engine: BlendEngine, name: str = "", needs_blending: bool = True) -> None:
    """Open the model of a store, which has a ``name`` if it is a further one."""
    from blendrag.server.service import open_engine

    with StatusLine(f"opening the model of {name}" if name else "opening the model"):
        refused = open_engine(engine, needs_blending)
    if refused:
        say("note", f"{name}: {refused}" if name else refused)


def _announce(url: str, service: Service, others: Sequence[Service]) -> None:
    say("serving", f"{service.model_id} at {url}/v1")
    for each in others:
        of_model = short_model(each.engine.model_name)
        say("serving", f"{each.name}: {of_model} over {each.engine.root}")
    say("page", f"{url}/")


def _further(given: Sequence[str]) -> dict[str, Path]:
    """Stores by name. Raises :class:`InvalidInputError`."""
    found: dict[str, Path] = {}
    for text in given:
        name, _, store = text.partition("=")
        if not (_NAME.fullmatch(name) and store) or name == "default":
            raise InvalidInputError(
                f"--serve {quoted(text)} must be a name of letters, digits, '.', '_' and '-', other than "
                "default, and a store, such as handbook=stores/handbook"
            )
        if name in found:
            raise InvalidInputError(
                f"--serve has the name {quoted(name)} twice, expected other names"
            )
        found[name] = Path(store)
    return found


def _check_writable(api_key_file: Path | None, origins: Sequence[str], reads_only: bool) -> None:
    """Raise :class:`InvalidInputError` for options that exclude ``--writable``."""
    from blendrag.server.cross_origin import ANY

    if api_key_file is not None:
        raise InvalidInputError(
            "--writable with --api-key-file, expected one of them; a line of the file that ends in 'write' "
            "may change documents"
        )
    if reads_only:
        raise InvalidInputError(
            "--writable with --read-only, expected one of them; leave out the other"
        )
    if ANY in origins:
        raise InvalidInputError(
            "--writable with --cors-origin '*', so that every web page could change documents; name the "
            "sites, or use --api-key-file"
        )


def warn_of_others(address: str, has_keys: bool, origins: Sequence[str]) -> None:
    """Say who else may ask a server without keys."""
    from blendrag.server.access import is_loopback
    from blendrag.server.cross_origin import ANY

    if has_keys:
        return
    if not (is_loopback(address) or address == "localhost"):
        say(
            "note",
            f"everybody who reaches {address} may ask, and read the documents; --api-key-file asks for keys",
        )
    if ANY in origins:
        say(
            "note",
            "every web page that a browser of this machine opens may ask, and read the documents; name the "
            "sites with --cors-origin, or ask for keys with --api-key-file",
        )


def _follow(context: typer.Context) -> bool:
    """Follow the corpus that the remote publishes, if the store has none of its own; whether it may."""
    from blendrag.config import settings
    from blendrag.corpus.shared import sharing, snapshots

    root = (context.params["store"] or settings().store).absolute()
    remote = context.params["remote"] or settings().remote
    if remote is None or context.params["read_only"] or not sharing.may_follow(root):
        return False
    given = replace(settings(), remote=remote)
    with StatusLine("following the published corpus"), snapshots.remote_root(given) as there:
        try:
            followed = sharing.follow(root, there)
        except BlendragError as error:
            if not sharing.holds_corpus(root):
                raise
            say("note", f"the store's corpus is served as it is: {error}")
            return True
    if followed is None and not sharing.holds_corpus(root):
        raise InvalidInputError(
            f"store {root} is empty and remote {remote} has no published corpus, expected one of them; "
            "ingest, or publish on the machine that has ingested (blendrag store publish)"
        )
    return True


def _require_extra() -> None:
    missing = [name for name in REQUIREMENTS if find_spec(name) is None]
    if missing:
        raise InvalidInputError(
            f"blendrag serve needs {', '.join(missing)}; pip install 'blendrag[server]'"
        )
