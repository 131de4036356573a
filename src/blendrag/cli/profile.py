"""``blendrag profile``: parse, measure or remember, say what loading and computing take on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendrag.cli import interrupt, options, output
from blendrag.cli.plots import profile_figure, require_plot, write_png
from blendrag.cli.starting import begin, engine_for
from blendrag.cli.status import DONE, reporting, say

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine
    from blendrag.engine.profiling import ProfileReport
    from blendrag.planning.profile import Profile
    from blendrag.planning.storage import Device, StorageChoice

#: Seconds between two lines of progress where there is no terminal.
LINE_EVERY_S = 5.0
#: What a month is priced for where the store is empty.
SOME_CHUNKS = 1000


@reporting
def profile(
    model: options.Model = None,
    store: options.Store = None,
    directories: Annotated[
        list[Path] | None,
        typer.Option(
            "--dir", help="Time reading from this directory, too; repeatable.", show_default=False
        ),
    ] = None,
    devices: Annotated[
        Path | None,
        options.unset(
            "JSON or TOML list of devices (name, throughput, price_per_gb_month): name the cheapest "
            "that adds no latency."
        ),
    ] = None,
    plot: Annotated[Path | None, options.unset("Draw the two latencies into this PNG.")] = None,
    policy: Annotated[str | None, options.unset("Policy that plot and devices are for.")] = None,
    ratio: Annotated[
        float | None,
        options.unset("Ratio of --devices.", min=0.0, max=1.0, callback=options.finite),
    ] = None,
    top_k: Annotated[int | None, options.unset("Chunks in a usual prompt.", min=1)] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure, although a profile is kept.")
    ] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    lora: options.Lora = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Measure what loading and computing take on this machine, for --ratio auto. Once; it is remembered."""
    begin(verbose, "nothing was kept; a profile is whole or is not used")
    from blendrag.config import settings
    from blendrag.fusor.selection import make_policy

    listed = _devices(devices)
    usual = Usual(
        policy or settings().policy,
        settings().fixed_ratio if ratio is None else ratio,
        top_k or settings().top_k,
    )
    make_policy(usual.policy)  # fail before any work
    require_plot(plot)
    with engine_for(
        model, store, lora, trust_remote_code=trust_remote_code, dtype=dtype, device=device
    ) as engine:
        report = engine.profile(directories or (), again, Steps())
        _say(report)
        choice = _choice(engine, report.profile, listed, usual)
    interrupt.expect("the profile is kept" if report.kept else "nothing was kept")
    if json:
        output.print_json(_fields(report, choice))
    else:
        _print(report.profile)
        if choice is not None:
            _print_choice(choice, usual)
    if plot is not None:
        write_png(profile_figure(report.profile, usual.policy, usual.chunks), plot)
    return DONE


class Usual:
    """The prompt that plots and devices are judged by."""

    def __init__(self, policy: str, ratio: float, chunks: int) -> None:
        self.policy, self.ratio, self.chunks = policy, ratio, chunks
        self.of = ""
        """What is paid for, in words."""


class Steps:
    """Says on stderr what is measured: every step on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        self._live = Console(stderr=True).is_terminal
        self._said = time.perf_counter()

    def __call__(self, what: str, done: int, steps: int) -> None:
        now = time.perf_counter()
        if self._live or now - self._said >= LINE_EVERY_S:
            self._said = now
            say("progress", f"{what}, {done} of {steps} steps done")


def _devices(path: Path | None) -> tuple[Device, ...]:
    from blendrag.planning.storage import read_devices

    return read_devices(path) if path is not None else ()


def _choice(
    engine: BlendEngine, found: Profile, devices: tuple[Device, ...], usual: Usual
) -> StorageChoice | None:
    if not devices:
        return None
    from blendrag.engine.profiling import storage_choice

    stored = engine.stats().size_bytes
    usual.of = "what the store holds" if stored else f"{SOME_CHUNKS:,} chunks"
    corpus_bytes = stored or SOME_CHUNKS * sum(found.layer_bytes)
    return storage_choice(found, devices, corpus_bytes, usual.policy, usual.ratio, usual.chunks)


def _say(report: ProfileReport) -> None:
    if report.replaces:
        say("note", f"the profile kept is of {report.replaces}, so this machine was measured now")
    from blendrag.planning.profile import COLD, DISK

    untimed = report.profile.tier(DISK) is None
    if report.is_new and not untimed and all(tier.name != COLD for tier in report.profile.tiers):
        say(
            "note",
            "the system keeps files in memory whatever it is told, so reading a cold disk was not timed "
            "and is taken for reading a warm one",
        )
    if not report.kept:
        what = "reading from its disk is not timed, the profile" if untimed else "the profile"
        say(
            "note",
            f"the store cannot be written, so {what} is not kept: ratio auto goes by what was kept before, "
            "if anything",
        )
    if not report.is_new:
        say("note", "measured before and remembered; --again measures anew")


def _fields(report: ProfileReport, choice: StorageChoice | None) -> dict[str, Any]:
    from dataclasses import asdict

    fields = {
        "profile": report.profile.as_dict(),
        "is_new": report.is_new,
        "kept": report.kept,
        "replaces": report.replaces,
    }
    return fields if choice is None else {**fields, "storage": asdict(choice)}


def _print(found: Profile) -> None:
    where = found.conditions
    typer.echo(
        f"{where.model} in {where.dtype} on {where.device}, {where.threads} threads, {where.machine}; "
        f"measured in {output.duration(found.took_s)}"
    )
    lengths = sorted({int(rows) for rows in found.prefill.rows})
    typer.echo("  prefill: " + ", ".join(f"{n} tokens {_ms(found.prefill_s(n))}" for n in lengths))
    context, layers = lengths[-1] / 2, found.layers
    rows = [int(r) for r in found.layer.rows if r <= lengths[-1]]
    typer.echo(
        f"  {layers} layers by rows, a row seeing {context:.0f} keys: "
        + ", ".join(f"{n} {_ms(layers * found.layer(n, context))}" for n in rows)
    )
    chunk_bytes = sum(found.layer_bytes)
    for tier in found.tiers:
        typer.echo(
            f"  {tier.name}: {tier.bytes_per_s / 1e9:.2f} GB/s, a chunk of {found.chunk_tokens} tokens "
            f"({output.megabytes(chunk_bytes)}) in {_ms(tier.seconds(chunk_bytes, layers))}"
        )
    if found.device_bytes_per_s is not None:
        typer.echo(f"  host to device: {found.device_bytes_per_s / 1e9:.2f} GB/s")


def _print_choice(choice: StorageChoice, usual: Usual) -> None:
    typer.echo(f"devices, for {usual.chunks} chunks, {usual.policy} at ratio {usual.ratio:g}:")
    for each in choice.rated:
        verdict = "adds no latency" if each.hides else f"{_ms(each.waiting_s)} of waiting"
        typer.echo(
            f"  {each.device.name}: first token after {_ms(each.ttft_s)}, {verdict}, "
            f"{each.cost_per_month:,.4g} a month for {usual.of}"
        )
    if choice.best is not None:
        typer.echo(f"cheapest that adds no latency: {choice.best.device.name}")
    else:
        typer.echo(f"each adds latency; the fastest is {choice.fastest.device.name}")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
