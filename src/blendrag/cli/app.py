"""The command line: short commands, and the registration of all others."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag import __version__
from blendrag.cli import options, output
from blendrag.cli.ask import ask, chat
from blendrag.cli.cache import app as cache_commands
from blendrag.cli.calibrate import calibrate
from blendrag.cli.demo import demo
from blendrag.cli.extras import add_commands
from blendrag.cli.groups import AskingCommand, NamingCommand, SuggestingGroup, name_values
from blendrag.cli.ingest import ingest, list_documents, remove
from blendrag.cli.lifecycle import DONE, REFUSED_MODEL, begin, reporting
from blendrag.cli.models import app as models_commands
from blendrag.cli.output import count, duration, echo
from blendrag.cli.profile import profile
from blendrag.cli.progress import StatusLine
from blendrag.cli.schema import app as schema_commands
from blendrag.cli.search import search
from blendrag.cli.serve import serve
from blendrag.cli.store import app as store_commands
from blendrag.store.durable import readable_size

if TYPE_CHECKING:
    from blendrag.engine.decode_weights import Formats
    from blendrag.fusor.decode_agreement import DecodeAgreement
    from blendrag.fusor.gate import Verification


app = typer.Typer(
    name="blendrag",
    cls=SuggestingGroup,
    help="Answer questions over documents with a local Hugging Face model and precomputed KV.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(asked: bool) -> None:
    if asked:
        echo(f"blendrag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@reporting
def verify(
    model: Annotated[str, typer.Argument(help="Hub id, directory, or demo.", show_default=False)],
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: Annotated[str | None, options.shared("lora")] = None,
    writer: Annotated[str | None, options.shared("writer", "none")] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Measure whether a model's stored KV can be reused. Exit status 3 if not, 2 if a writer does not fit."""
    begin(verbose, "the model was not verified")
    from blendrag.config import settings
    from blendrag.engine.decode_weights import compare
    from blendrag.fusor.gate import verify as run_gate
    from blendrag.model.decode_weights import CHOICES
    from blendrag.model.loading import load_adapter
    from blendrag.model.writer import NONE, FittedWriter, Writer

    given = str(writer or settings().writer or NONE)
    fits = None if given == NONE else Writer.load(given)
    with StatusLine(f"loading {model}") as line:
        adapter = load_adapter(
            model,
            dtype or settings().dtype,
            device or settings().device,
            str(lora) if lora else None,
            trust_remote_code,
        )
        if fits is not None and adapter.refusal is None:
            with adapter.lock:
                FittedWriter(fits, adapter)
        line.show("checking whether loaded KV gives the logits of a prefill")
        result = run_gate(
            adapter,
            lambda tokens, seconds: line.show(
                f"checking on a prompt of {count(tokens, 'token')}, about {duration(seconds)} left"
            ),
        )
        weights: dict[str, DecodeAgreement | str] = {}
        measured: dict[Formats, DecodeAgreement] = {}
        if result.blendable:
            for name in CHOICES:
                text = f"comparing {name} decode weights with the model's own"
                line.show(text)
                watch = partial(_show_share, line, text)
                weights[name] = compare(adapter, name, measured, watch)
    if json:
        fields = {
            name: found if isinstance(found, str) else asdict(found) | {"share": found.share}
            for name, found in weights.items()
        }
        about = fits.as_dict() if fits is not None else None
        output.print_json({**result.as_dict(), "decode_weights": fields, "writer": about})
    else:
        _print_verification(model, result)
        if fits is not None and result.blendable:
            echo(f"  {fits.label} fits this model; the checks above are without it")
        _print_decode_weights(weights)
    return DONE if result.blendable else REFUSED_MODEL


def _show_share(line: StatusLine, text: str, share: float) -> None:
    line.show(f"{text}; {share:.0%} done", share, 1.0)


def _print_verification(model: str, result: Verification) -> None:
    echo(f"{model}: {result.verdict}", f"  {result.reason}")
    if result.layers:
        kinds = Counter(result.layers)
        states = {"decay", "matrix", "convolution"} & kinds.keys()
        composed = f"; what a chunk does to a running state is a {' or '.join(sorted(states))}"
        echo(
            f"  layers: {', '.join(f'{n} {kind}' for kind, n in kinds.items())} (stored keys of rotary "
            "layers are rotated to their place in a prompt, position-free ones are used as they are"
            f"{composed if states else ''})"
        )
    if result.subset_logit_diff is None:
        return
    echo(
        f"  largest change of a logit from a prefill without blendrag, on {result.prompt_tokens} random "
        f"tokens (at most {result.allowed_logit_diff:.3g} counts as equal):"
    )
    if result.max_logit_diff is None:
        echo(f"    chunks composed: {result.subset_logit_diff:.3g}")
    else:
        echo(f"    everything recomputed: {result.max_logit_diff:.3g}")
        echo(f"    a fifth recomputed, the rest loaded: {result.subset_logit_diff:.3g}")
    echo(
        f"    the same with disturbed KV: {result.perturbed_logit_diff:.3g} (must be far more: it shows "
        "that wrong KV would be noticed)"
    )
    equal = "yes" if result.greedy_equal else "no, which only float32 requires"
    echo(f"  the next 32 tokens are those of the model without blendrag: {equal}")


def _print_decode_weights(weights: dict[str, DecodeAgreement | str]) -> None:
    """Why the model decodes with its own weights, or a table."""
    for why in sorted({found for found in weights.values() if isinstance(found, str)}):
        echo(f"  decodes with its own weights: {why}")
    named: dict[int, list[str]] = defaultdict(list)
    for name, found in weights.items():
        named[id(found)].append(name)  # both are 4 bits, if the model was unpacked from them
    for found in weights.values():
        names = named.pop(id(found), [])
        if not names or isinstance(found, str):
            continue
        formats = ", ".join(f"{count} {kind}" for kind, count in found.layers.items())
        echo(
            f"  decoding with {' or '.join(names)} weights, {readable_size(found.size_bytes)} more, "
            f"opened in {found.opening_s:.1f} s: "
            f"{found.native_s * 1e3:.0f} → {found.packed_s * 1e3:.0f} ms per token, the same token in "
            f"{found.share:.1%} of {found.tokens} steps, KL {found.kl:.4f}; layers: {formats}"
        )
        if found.head_agreed and not found.suffices:  # 0: the head has no copy
            echo(
                f"    only the LM head packed: the same token in {found.head_share:.1%} of the steps"
            )


for command in (ingest, remove, search, ask, chat, serve, verify, demo, calibrate, profile):
    app.command(cls=AskingCommand if command in (search, ask, chat) else NamingCommand)(command)
app.command("list")(list_documents)
app.add_typer(schema_commands)
app.add_typer(store_commands)
app.add_typer(cache_commands)
app.add_typer(models_commands)
add_commands(app)

name_values(app)
