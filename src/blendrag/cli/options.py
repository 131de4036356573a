"""What commands share: options of the table (:mod:`blendrag.config`), and the engine that they describe.

An option that is not given is ``None``, and the settings or the store decide.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer
from typer.models import ArgumentInfo

from blendrag import option
from blendrag.cli.importing import lasting_imports
from blendrag.config import OPTIONS, EngineOptions, RequestDefaults, Settings, settings
from blendrag.errors import CorpusError, InvalidInputError, InvalidOptionError
from blendrag.option import Option
from blendrag.store import regular_files
from blendrag.store.durable import readable_size

if TYPE_CHECKING:
    from blendrag.corpus.filters import Filter
    from blendrag.engine import BlendEngine, Options

F = TypeVar("F", bound=Callable[..., int])

#: Longest answer on a terminal, unless an option or a variable says otherwise.
ANSWER_TOKENS = 1024
#: Options that are given as often as one likes.
_REPEATABLE = ("stop", "chat_template_kwargs", "generate_kwargs")

# -- groups of options ----------------------------------------------------------------------------

MODEL = ("model", "store", "dtype", "device", "lora", "writer", "encode_after", "trust_remote_code")
#: An engine over a corpus that is there.
ENGINE = (*MODEL, "embedder", "ram_bytes", "disk_bytes", "remote", "decode_weights")
#: An engine that may make a corpus.
NEW_CORPUS = (*ENGINE, "chunk_tokens", "kv_encoding")
#: How chunks are found: options of an engine, not of a request.
SEARCH = ("search", "reranker")
#: Defaults of requests.
DEFAULTS = (*RequestDefaults.__annotations__, "top_k", *SEARCH)
#: What a server takes.
LIMITS = ("max_requests", "max_body_bytes", "max_upload_bytes", "max_tokens")
#: How the tokens of one answer are chosen, and what ends it.
SAMPLING = (
    "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "generate_kwargs", "stop",
)  # fmt: skip
#: A question.
REQUEST = (*DEFAULTS, *SAMPLING)


def read_text(option: str, path: Path, max_bytes: int, content: str) -> str:
    """The text of a file named by ``option``, which should hold ``content``."""
    try:
        # utf-8-sig: Windows editors begin files with a mark.
        text = regular_files.read_text(path, max_bytes, follow=True, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidInputError(
            f"{option} {path} cannot be read ({reason}); expected a text file with {content}"
        ) from exc
    if not text.strip():
        raise InvalidInputError(f"{option} {path} is empty; expected {content}, or no {option}")
    return text


def require_place(option: str, path: Path, suffix: str) -> None:
    """Raise :class:`InvalidInputError` unless a file of that kind can be written to ``path``."""
    folder = path.absolute().parent
    is_place = folder.is_dir() and os.access(folder, os.W_OK) and not path.is_dir()
    if path.suffix.lower() != suffix or not is_place:
        raise InvalidInputError(
            f"{option} {path} cannot be written, expected a file that ends in {suffix} in a directory that "
            "exists and is writable"
        )


def require_plot(path: Path | None) -> None:
    """Raise :class:`InvalidInputError` if ``--plot`` was given and its figure cannot be drawn."""
    if path is None:
        return
    require_place("--plot", path, ".png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise InvalidInputError(
            f"--plot {path} needs matplotlib, which is not installed; pip install 'blendrag[plots]'"
        ) from exc


# -- options --------------------------------------------------------------------------------------


def optional(text: str, *names: str, **more: Any) -> Any:
    """An option that is ``None`` if it is not given; ``text`` is its help."""
    return typer.Option(*names, help=text, show_default=False, **more)


def number(
    text: str,
    low: float,
    high: float | None = None,
    kind: type[float] = float,
    above: bool = False,
) -> Any:
    """An option that takes a finite number of at least ``low``, or ``above`` it, and at most ``high``."""
    most = math.inf if high is None else high
    limits = (
        f"of at least {low:g}" if high is None else f"in {'(' if above else '['}{low:g}, {high:g}]"
    )
    if kind is int:
        made = option.whole("", "", "", int(low), None if high is None else int(high))
    else:
        made = option.number(
            "",
            "",
            "",
            f"a number {limits}",
            lambda value: low <= value <= most and not (above and value == low),
        )
    metavar = f"{low:g}..{'' if high is None else f'{high:g}'}"
    return typer.Option(help=text, parser=_parser(made), metavar=metavar)


def size(text: str, *names: str) -> Any:
    return optional(text, *names, parser=_parser(option.size("", "", "")), metavar="SIZE")


def one_of(text: str, kind: Any) -> Any:
    """An option that takes one of the texts of a ``Literal``."""
    values = get_args(kind)
    parser = _parser(option.one_of("", "", "", values))
    return optional(text, parser=parser, metavar="|".join(values))


def _parser(made: Option) -> Callable[[str], Any]:
    def parse(text: object) -> Any:
        try:
            return made.read(str(text))  # a default is no text
        except InvalidOptionError as exc:
            raise typer.BadParameter(exc.wrong) from None

    return parse


def shared(name: str, default: Any = None) -> Any:
    """An option of the table; ``default`` is what help says instead of the settings'."""
    row = OPTIONS[name]
    if default is None:
        default = row.unless_given or getattr(Settings(), name, None)
    if name.endswith("_bytes") and isinstance(default, int):
        default = readable_size(default)
    text = f"{row.help} [default: {default}]" if default else row.help
    if row.metavar:
        return optional(text, *row.flags.split(), parser=_parser(row), metavar=row.metavar)
    return optional(text, *row.flags.split())


def flag(name: str) -> str:
    """How the command line spells an option."""
    row = OPTIONS.get(name)
    return (row and row.flags) or f"--{name.replace('_', '-')}"


def takes(*names: str, **defaults: Any) -> Callable[[F], F]:
    """Decorator: a command has these options of the table; their values are in ``context.params``.

    ``defaults``: what help says of an option that this command has another default for.
    """

    def decorate(command: F) -> F:
        signature = inspect.signature(command, eval_str=True)
        own = [each.replace(kind=each.KEYWORD_ONLY) for each in signature.parameters.values()]
        added = []
        for name in names:
            kind: Any = list[str] if name in _REPEATABLE else str if OPTIONS[name].metavar else bool
            info = shared(name, defaults.get(name))
            annotation = Annotated[kind | None, info]
            added.append(
                inspect.Parameter(name, own[0].KEYWORD_ONLY, default=None, annotation=annotation)
            )
        is_option = [
            each.name != "context"
            and not any(isinstance(x, ArgumentInfo) for x in get_args(each.annotation))
            for each in own
        ]
        first = is_option.index(True)

        @functools.wraps(command)
        def run(**given: Any) -> int:
            return command(**{name: given[name] for name in signature.parameters})

        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own[:first], *added, *own[first:]]
        )
        return run  # type: ignore[return-value]

    return decorate


Store = Annotated[Path | None, shared("store")]
Remote = Annotated[str | None, shared("remote")]
Dtype = Annotated[str | None, shared("dtype")]
Device = Annotated[str | None, shared("device")]
DiskBytes = Annotated[int | None, shared("disk_bytes")]
MaxBytes = Annotated[int | None, size("Size to reach: 2GiB, 500MB, … [default: the store's limit]")]
TrustRemoteCode = Annotated[bool, shared("trust_remote_code")]
FixedRatio = Annotated[float | None, number("Share of tokens recomputed. [default: 0.3]", 0, 1)]
Sources = Annotated[
    bool, typer.Option("--sources/--no-sources", help="Show the passages that were read.")
]
Only = Annotated[
    list[str] | None,
    optional(
        "Search these documents only: a pattern as in .gitignore, such as '*.pdf' or reports/; repeatable.",
        metavar="GLOB",
    ),
]
Where = Annotated[
    list[str] | None,
    optional(
        "Search documents with this metadata only: also !=, >, >=, <, <=, ~ (contains); repeatable.",
        metavar="FIELD=VALUE",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show library logs.")]


# -- what they describe ---------------------------------------------------------------------------


def given(parameters: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The parameters of a command that are among ``names`` and not ``None``."""
    values = {name: parameters.get(name) for name in names}
    for name in ("chat_template_kwargs", "generate_kwargs"):
        merged: dict[str, Any] = {}
        for arguments in values.get(name) or ():
            merged |= arguments
        values[name] = merged or None
    return {name: value for name, value in values.items() if value is not None}


def request_options(context: typer.Context, **more: Any) -> Options:
    """The request options of a command."""
    with lasting_imports():
        from blendrag.engine import Options

    values = given(context.params, REQUEST)
    of_retrieval = ("top_k", *SEARCH)
    kept = {name: value for name, value in values.items() if name not in of_retrieval}
    return Options(**kept, **more)


def most_tokens(context: typer.Context) -> int:
    """The longest answer of a command."""
    given: int | None = context.params["max_new_tokens"]
    return given or settings().max_new_tokens or ANSWER_TOKENS


def filter_of(only: Sequence[str] | None, where: Sequence[str] | None) -> Filter | None:
    """The filter of ``--only`` and ``--where``."""
    from blendrag.corpus.filters import chosen

    return chosen(only, where, ("--only", "--where"))


def require_documents(store: Path | None, filter: Filter | None = None) -> None:
    """Refuse a corpus without documents, and a filter on a field that no document has, before anything large
    is imported. A corpus that cannot be opened is left to the engine, which knows why.

    Raises :class:`InvalidInputError`, :class:`InvalidOptionError`.
    """
    from blendrag.corpus.corpus import Corpus

    try:
        corpus = Corpus.open(store or settings().store, read_only=True)
    except CorpusError:
        return
    with corpus:
        corpus.require_documents()
        corpus.allowed(filter)


def engine_beside(
    engine: BlendEngine, context: typer.Context, store: Path, **more: Any
) -> BlendEngine:
    """An engine over another store of the same server: with the model that this store names, and the options
    that are not those of one store or model."""
    from blendrag.corpus.recorded_model import model_of_store
    from blendrag.engine import BlendEngine

    values = given(context.params, ("dtype", "device", "decode_weights", "read_only", *DEFAULTS))
    return BlendEngine(model_of_store(store), store, beside=engine, **{**values, **more})


def engine_for(context: typer.Context, for_ingest: bool = False, **more: Any) -> BlendEngine:
    """The engine that the options of a command describe."""
    with lasting_imports():
        from blendrag.corpus.recorded_model import model_for
        from blendrag.engine import BlendEngine

    values = given(context.params, (*EngineOptions.__annotations__, *SEARCH))
    if "max_new_tokens" in context.params:
        more.setdefault("max_new_tokens", most_tokens(context))
    store = context.params["store"] or settings().store
    trusts = bool(values.get("trust_remote_code"))
    model = model_for(context.params.get("model"), store, trusts, for_ingest)
    return BlendEngine(model, store, **{**values, **more})
