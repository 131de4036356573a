"""Every option that several commands share, and the engine that these options describe.

An option that is not given is ``None``, and the settings or the store decide. Help texts repeat defaults of
:mod:`blendrag.config`, because importing it would double the time of ``--help``; a test compares them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from blendrag.errors import InvalidInputError
from blendrag.store import regular_files
from blendrag.wording import quoted

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine, Options

#: Longest answer on a terminal, unless an option or a variable says otherwise.
ANSWER_TOKENS = 1024

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


# -- values ---------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """``2GiB``, ``500MB``, ``1048576`` → bytes."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise typer.BadParameter(f"{quoted(text)} is not a size; write 1048576, 500MB or 2GiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


#: Python's spellings, which are no JSON. As texts all three would be true.
_PYTHON = {"True": True, "False": False, "None": None}


def template_arguments(given: Sequence[str] | None) -> dict[str, Any]:
    """``["enable_thinking=false"]``, or JSON objects → arguments of the chat template."""
    made: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if text.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                made |= json.loads(text)
                continue
        elif name.strip() and equals:
            made[name.strip()] = _PYTHON.get(value, value)
            with suppress(ValueError, RecursionError):
                made[name.strip()] = json.loads(value)
            continue
        raise InvalidInputError(
            f"--chat-template-kwargs {quoted(text)}, expected NAME=VALUE or a JSON object; write "
            "reasoning_effort=low or enable_thinking=false"
        )
    return made


def _one_of(literal: str) -> Callable[[str | None], str | None]:
    """Accept the values of a ``Literal`` of :mod:`blendrag.config`."""

    def check(text: str | None) -> str | None:
        from blendrag import config

        choices = get_args(getattr(config, literal))
        if text is not None and text not in choices:
            raise typer.BadParameter(f"{quoted(text)} is not one of {', '.join(choices)}")
        return text

    return check


def read_text(option: str, path: Path, max_bytes: int, content: str) -> str:
    """The text of a file named by ``option``, which should hold ``content``."""
    try:
        text = regular_files.read_text(path, max_bytes, follow=True)
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidInputError(
            f"{option} {path} cannot be read ({reason}); expected a text file with {content}"
        ) from exc
    if not text.strip():
        raise InvalidInputError(f"{option} {path} is empty; expected {content}, or no {option}")
    return text


# -- options --------------------------------------------------------------------------------------


def optional(text: str, *names: str, **more: Any) -> Any:
    """An option that is ``None`` if it is not given; ``text`` is its help."""
    return typer.Option(*names, help=text, show_default=False, **more)


def number(
    text: str, low: float, high: float | None = None, kind: type[float] = float, word: str = ""
) -> Any:
    """An option that takes a finite number of at least ``low`` and at most ``high``, or ``word``."""
    ends = f"{low:g}..{'' if high is None else f'{high:g}'}"

    def parse(given: str) -> float | str:
        if word and given == word:
            return given
        try:
            value = kind(given)
            fits = math.isfinite(value) and low <= value <= (math.inf if high is None else high)
        except (ValueError, OverflowError):
            fits = False
        if not fits:
            what = "a whole number" if kind is int else "a number"
            limits = f"of at least {low:g}" if high is None else f"in [{low:g}, {high:g}]"
            alternative = f" or {word!r}" if word else ""
            raise typer.BadParameter(f"{quoted(given)} must be {what} {limits}{alternative}")
        return value

    return typer.Option(help=text, parser=parse, metavar=f"{ends}|{word}" if word else ends)


def size(text: str, *names: str) -> Any:
    return optional(text, *names, parser=parse_size, metavar="SIZE")


Model = Annotated[
    str | None,
    optional(
        "Hub id or directory of a causal LM, GGUF file, or demo. [default: the store's model]",
        "--model",
        "-m",
    ),
]
Store = Annotated[
    Path | None, optional("Directory of the KV store. [default: blendrag-store]", "--store", "-s")
]
Dtype = Annotated[str | None, optional("auto, float32, float16 or bfloat16.")]
Device = Annotated[str | None, optional("auto, cpu, cuda or cuda:N.")]
Lora = Annotated[Path | None, optional("Directory of a PEFT adapter.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python files that come with --model or --embedder. Read them first.",
    ),
]
RamBytes = Annotated[int | None, size("Limit of the memory tier: 2GiB, 500MB, …")]
DiskBytes = Annotated[int | None, size("Limit of the disk tier: 64GiB, …")]
Remote = Annotated[
    str | None,
    optional("Object store shared by machines: s3://bucket/prefix, gs://, az:// or file:///dir."),
]
MaxBytes = Annotated[int | None, size("Size to reach: 2GiB, 500MB, … [default: the store's limit]")]
Encoding = Annotated[
    str | None,
    optional("How a new store keeps KV: native or int8.", callback=_one_of("KVEncoding")),
]
Embedder = Annotated[
    str | None,
    optional("sentence-transformers model, or minilm-offline. [default: the store's, else MiniLM]"),
]
Mode = Annotated[
    str | None,
    optional("blend, full, prefix or reuse. [default: blend]", callback=_one_of("Mode")),
]
Policy = Annotated[
    str | None,
    optional(
        "Which tokens are recomputed: query, hkvd, … [default: what blendrag calibrate found, else query]"
    ),
]
Schedule = Annotated[
    str | None,
    optional(
        "constant, linear, geometric[:g], first:m or one ratio per layer. [default: constant]"
    ),
]
Ratio = Annotated[float | None, number("Share of tokens recomputed. [default: 0.3]", 0, 1)]
AutoRatio = Annotated[
    float | None,
    number(
        "Share of tokens recomputed; auto: as many as cost no time (see blendrag profile). "
        "[default: 0.3]",
        0,
        1,
        word="auto",
    ),
]
MinRatio = Annotated[
    float | None, number("Lowest ratio that --ratio auto may choose. [default: 0.3]", 0, 1)
]
TopK = Annotated[int | None, number("Chunks in a prompt. [default: 6]", 1, kind=int)]
MaxNewTokens = Annotated[
    int | None,
    number(f"Longest answer in tokens. [default: {ANSWER_TOKENS}]", 1, kind=int),
]
Temperature = Annotated[float | None, number("0 decodes greedily.", 0)]
Template = Annotated[
    list[str] | None,
    optional(
        "An argument of the model's chat template: reasoning_effort=low, or a JSON object; repeatable.",
        "--chat-template-kwargs",
        metavar="NAME=VALUE",
    ),
]
Thinking = Annotated[
    bool | None,
    optional(
        "Whether the model thinks before it answers. [default: what its chat template does]",
        "--thinking/--no-thinking",
    ),
]
Sources = Annotated[
    bool, typer.Option("--sources/--no-sources", help="Show the passages that were read.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show library logs.")]


#: Options that go to the engine's constructor as they are given.
ENGINE_OPTIONS = (
    "chunk_tokens", "embedder", "ram_bytes", "disk_bytes", "remote", "kv_encoding", "dtype", "device",
    "trust_remote_code",
)  # fmt: skip


#: Options of a request that are given as they are.
REQUEST_OPTIONS = (
    "mode", "policy", "schedule", "ratio", "min_ratio", "max_new_tokens", "temperature", "enable_thinking",
)  # fmt: skip


def request_options(context: typer.Context, **more: Any) -> Options:
    """The request options of a command."""
    from blendrag.engine import Options

    given = context.params
    more["chat_template_kwargs"] = template_arguments(given.get("chat_template_kwargs"))
    return Options(**{name: given[name] for name in REQUEST_OPTIONS if name in given}, **more)


def engine_for(context: typer.Context, for_ingest: bool = False, **more: Any) -> BlendEngine:
    """The engine that the options of a command describe."""
    from blendrag.config import settings
    from blendrag.corpus.recorded_model import model_for
    from blendrag.engine import BlendEngine

    given = context.params
    if "max_new_tokens" in given:
        more.setdefault("max_new_tokens", settings().max_new_tokens or ANSWER_TOKENS)
    store, lora = given["store"] or settings().store, given.get("lora")
    trusts = given.get("trust_remote_code", False)
    return BlendEngine(
        model_for(given["model"], store, trusts, for_ingest),
        store,
        lora=str(lora) if lora else None,
        **more,
        **{name: given[name] for name in ENGINE_OPTIONS if name in given},
    )
