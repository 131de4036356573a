"""Options that several commands share, and how their texts become values.

Owns spelling and help. Owns no default: an option left out is ``None`` here, and the settings (or
the store's own manifest) decide.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from blendrag.errors import BlendragError, InvalidInputError
from blendrag.store import regular_files

#: Weights of a model that only a store names: either file.
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
#: Size limit of ``--prefix-file``.
MAX_PREFIX_BYTES = regular_files.MIB

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """``2GiB``, ``500MB``, ``1048576`` → bytes."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise typer.BadParameter(f"{text!r} is no size; write bytes, or 500MB, or 2GiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _mode(text: str | None) -> str | None:
    from blendrag.config import Mode

    if text is not None and text not in get_args(Mode):
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(get_args(Mode))}")
    return text


def _encoding(text: str | None) -> str | None:
    from blendrag.config import KVEncoding

    if text is not None and text not in get_args(KVEncoding):
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(get_args(KVEncoding))}")
    return text


def finite(number: float | None) -> float | None:
    """Refuse ``nan`` and ``inf``, which typer takes for numbers."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is no finite number")
    return number


def unset(text: str, **more: Any) -> Any:
    """An option that is ``None`` where it is left out; ``text`` is its help."""
    return typer.Option(help=text, show_default=False, **more)


def parse_ratio(text: str) -> float | str:
    """``0.2`` or ``auto``."""
    from blendrag.config import AUTO

    if text == AUTO:
        return text
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not 0.0 <= ratio <= 1.0:
        raise typer.BadParameter(f"{text!r} is no share in the range 0.0<=x<=1.0, and not {AUTO}")
    return ratio


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Hub id or directory of a causal LM, or demo. [default: the store's own, else demo]",
        show_default=False,
    ),
]
Store = Annotated[
    Path | None,
    typer.Option("--store", "-s", help="Directory of the KV store.", show_default=False),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="auto, float32, float16 or bfloat16.", show_default=False),
]
Device = Annotated[
    str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N.", show_default=False)
]
Lora = Annotated[
    Path | None, typer.Option("--lora", help="Directory of a PEFT adapter.", show_default=False)
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python files that come with --model or --embedder. Read them first.",
    ),
]
RamBytes = Annotated[
    int | None,
    typer.Option(
        "--ram-bytes",
        parser=parse_size,
        metavar="SIZE",
        help="Limit of the memory tier: 2GiB, 500MB, …",
        show_default=False,
    ),
]
DiskBytes = Annotated[
    int | None,
    typer.Option(
        "--disk-bytes",
        parser=parse_size,
        metavar="SIZE",
        help="Limit of the disk tier: 64GiB, …",
        show_default=False,
    ),
]
Encoding = Annotated[
    str | None,
    typer.Option(
        "--encoding",
        callback=_encoding,
        help="How a new store keeps KV: native, int8 or fp8.",
        show_default=False,
    ),
]
Embedder = Annotated[
    str | None,
    typer.Option(
        "--embedder",
        help="sentence-transformers model, or minilm-offline. [default: the store's own]",
        show_default=False,
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        "--mode", callback=_mode, help="blend, full, prefix or reuse.", show_default=False
    ),
]
AutoRatio = Annotated[
    float | None,
    typer.Option(
        "--ratio",
        parser=parse_ratio,
        metavar="SHARE|auto",
        help="Share of tokens recomputed; auto: as many as cost no time (see blendrag profile).",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Let the libraries underneath speak.")
]


def text_argument(text: str, what: str) -> str:
    """``text`` if it is valid Unicode; an argument of other bytes is refused here."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidInputError(f"{what} is not valid UTF-8; type it again") from exc
    return text


def prefix_text(path: Path | None) -> str | None:
    """What ``--prefix-file`` holds."""
    if path is None:
        return None
    try:
        text = regular_files.read_text(path, MAX_PREFIX_BYTES, follow=True)
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidInputError(
            f"--prefix-file {path} cannot be read ({reason}); expected a text file that holds the "
            "rendered prompt up to the first chunk"
        ) from exc
    if not text:
        raise InvalidInputError(f"--prefix-file {path} is empty; leave the option out for BOS")
    return text


def check_environment() -> None:
    """Refuse ``BLENDRAG_*`` variables that cannot be used, in one sentence."""
    from pydantic import ValidationError

    from blendrag.config import settings

    try:
        settings()
    except ValidationError as exc:
        first = exc.errors()[0]
        field = first["loc"][0]
        why = " or ".join(each["msg"] for each in exc.errors() if each["loc"][0] == field)
        raise InvalidInputError(
            f"BLENDRAG_{str(field).upper()}={first['input']} cannot be used ({why}); change or unset it"
        ) from exc


def model_for(
    model: str | None,
    store: Path | None,
    for_ingest: bool = False,
    trust_remote_code: bool = False,
) -> str | None:
    """The model asked for; else the one the store was ingested with; else ``None``.

    An ingest is not bound to the model of a store that holds nothing yet. Raises
    :class:`InvalidInputError` where code would be run of a model that only the store names.
    """
    from blendrag.config import settings

    if model is not None or "model" in settings().model_fields_set:
        return model
    if trust_remote_code:
        raise InvalidInputError(
            "--trust-remote-code was given without --model, and a store does not choose whose code is "
            "run; name the model, too"
        )
    return _model_of(store if store is not None else settings().store, for_ingest)


def _model_of(root: Path, needs_documents: bool) -> str | None:
    from blendrag.corpus.corpus import Corpus
    from blendrag.corpus.manifest import check_recorded

    try:
        with Corpus.open(root) as corpus:
            known = corpus.has_manifest and (len(corpus) or not needs_documents)
            model = corpus.manifest.model if known else None
    except BlendragError:
        return None  # whoever needs the corpus will say what is wrong with it
    if model is not None:
        check_recorded(model, root, "--model")
        if os.path.isdir(model) and not any(
            os.path.exists(os.path.join(model, name)) for name in SAFETENSORS
        ):
            raise InvalidInputError(
                f"store {root} names the model {model!r}, which has no {SAFETENSORS[0]}: other weights are "
                f"not loaded because a store says so; if you trust it, name it: --model {model}"
            )
    return model
