"""``blendrag profile``: measure what loading and computing take on this machine, or print what is kept."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendrag.cli import interrupt, options
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.output import duration, echo, milliseconds, print_json, say
from blendrag.cli.progress import StatusLine
from blendrag.store.durable import readable_size

if TYPE_CHECKING:
    from blendrag.engine.profiling import ProfileReport
    from blendrag.planning.profile import Profile
    from blendrag.planning.storage import StorageChoice

#: Chunks whose storage is priced if the store is empty.
SOME_CHUNKS = 1000
#: Ratios of the figure.
RATIOS = tuple(i / 20 for i in range(21))
USUAL_RATIO = 0.3


@reporting
@options.takes(*options.ENGINE, "policy", "top_k")
def profile(
    context: typer.Context,
    directories: Annotated[
        list[Path] | None,
        options.optional("Time reading from this directory too; repeatable.", "--dir"),
    ] = None,
    plot: Annotated[Path | None, options.optional("Draw both latencies into this PNG.")] = None,
    ratio: options.FixedRatio = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure even if a profile is kept.")
    ] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Measure loading and computing once, for --ratio auto.

    --policy, --ratio and --top-k set the prompt that --plot and the table of storage devices are for.
    """
    begin(
        verbose,
        "an incomplete profile is not used; the same command goes on after its last complete round",
    )
    from blendrag.config import settings
    from blendrag.fusor.selection import make_policy
    from blendrag.planning.storage import choose_storage

    policy = str(make_policy(context.params["policy"] or settings().policy))  # fail before any work
    ratio = settings().fixed_ratio if ratio is None else ratio
    chunks = context.params["top_k"] or settings().top_k
    options.require_plot(plot)
    with options.engine_for(context) as engine:
        with StatusLine() as line:

            def show(what: str, done: int, steps: int) -> None:
                # a share: how many steps there are depends on how much the times differ
                line.show(f"{what}; {done / max(1, steps):.0%} done", done, steps)

            report = engine.profile(directories or (), again, show)
        found = report.profile
        stored_bytes = engine.stats().size_bytes or SOME_CHUNKS * sum(found.layer_bytes)
        choice = choose_storage(found, policy, ratio, chunks, stored_bytes)
    _say_notes(report)
    interrupt.expect("the profile is kept" if report.kept else "nothing was kept")
    if json:
        print_json(asdict(report) | {"storage": asdict(choice)})
    else:
        _print(found)
        echo(f"storage for {chunks} chunks, {policy} at ratio {ratio:g}:")
        _print_choice(choice)
    if plot is not None:
        _write_figure(plot, found, policy, chunks)
    return DONE


def _say_notes(report: ProfileReport) -> None:
    from blendrag.planning.profile import COLD, DISK

    if report.replaces:
        say("note", f"the kept profile is of {report.replaces}, so this machine was measured now")
    untimed = report.profile.tier(DISK) is None
    if report.is_new and not untimed and all(tier.name != COLD for tier in report.profile.tiers):
        say(
            "note",
            "this system keeps files in memory, so reading from a cold disk was not timed; it is assumed to "
            "be as fast as from a warm one",
        )
    if not report.kept:
        untimed_too = "reading from its disk was not timed and " if untimed else ""
        say(
            "note",
            f"the store cannot be written, so {untimed_too}the profile was not kept; ratio=auto uses the "
            "profile kept before, if any",
        )
    if not report.is_new:
        say("note", "this is the kept profile; measure again with --again")


def _print(found: Profile) -> None:
    where = found.conditions
    echo(
        f"{where.model} in {where.dtype} on {where.device}, {where.threads} threads, {where.machine}; "
        f"measured in {duration(found.took_s)}"
    )
    lengths = sorted({int(rows) for rows in found.prefill.rows})
    prefills = (f"{n} tokens {milliseconds(found.prefill_s(n))}" for n in lengths)
    echo("  prefill: " + ", ".join(prefills))
    context, layers = lengths[-1] / 2, found.layers
    rows = [int(r) for r in found.layer.rows if r <= lengths[-1]]
    echo(
        f"  {layers} layers by rows, each row with {context:.0f} keys: "
        + ", ".join(f"{n} {milliseconds(layers * found.layer(n, context))}" for n in rows)
    )
    chunk_bytes = sum(found.layer_bytes)
    for tier in found.tiers:
        echo(
            f"  {tier.name}: {tier.bytes_per_s / 1e9:.2f} GB/s, a chunk of {found.chunk_tokens} tokens "
            f"({readable_size(chunk_bytes)}) in {milliseconds(tier.seconds(chunk_bytes, layers))}"
        )
    if found.device_bytes_per_s is not None:
        echo(f"  host to device: {found.device_bytes_per_s / 1e9:.2f} GB/s")


def _print_choice(choice: StorageChoice) -> None:
    for each in choice.rated:
        waits = "adds no latency" if each.hides else f"{milliseconds(each.waiting_s)} of waiting"
        echo(
            f"  {each.device.name}: first token after {milliseconds(each.ttft_s)}, {waits}, "
            f"{_price(each.cost_per_month)} a month"
        )
    if choice.best is not None:
        echo(f"cheapest that adds no latency: {choice.best.device.name}")
    else:
        echo(f"each adds latency; the fastest is {choice.fastest.device.name}")


def _price(dollars: float) -> str:
    return f"${dollars:,.2f}" if dollars >= 0.01 else "less than $0.01"


def _write_figure(path: Path, found: Profile, policy: str, chunks: int) -> None:
    """Draw time to recompute and time to load (figure 10a of the paper): by ratio, and by size of the KV."""
    from matplotlib.figure import Figure

    from blendrag.planning.storage import usual_estimate, usual_prompt

    def compute_ms(chunks: int, ratio: float) -> float:
        """For a prompt whose KV is already loaded."""
        estimate, counts = usual_estimate(found, policy, ratio, chunks)
        return 1e3 * estimate.at(counts).compute_s

    numbers = sorted({1, 2, 4, chunks, 2 * chunks})
    chunk_bytes = sum(found.layer_bytes)
    sizes = [n * chunk_bytes / 1e6 for n in numbers]
    figure = Figure(figsize=(9, 3), layout="constrained")
    by_ratio, by_size = figure.subplots(1, 2)
    by_ratio.plot(RATIOS, [compute_ms(chunks, r) for r in RATIOS], "k*-")
    by_size.plot(sizes, [compute_ms(n, USUAL_RATIO) for n in numbers], "k*-", label="recompute")
    prefills = [1e3 * found.prefill_s(usual_prompt(found, policy, n).tokens) for n in numbers]
    by_size.plot(sizes, prefills, "D--", color="grey", label="full prefill")
    for tier in found.tiers:
        name = tier.name if len(tier.name) <= 24 else f"…{tier.name[-23:]}"
        loads = [1e3 * n * tier.seconds(chunk_bytes, found.layers) for n in numbers]
        (line,) = by_size.plot(sizes, loads, "o-", label=f"load, {name}")
        by_ratio.axhline(loads[numbers.index(chunks)], color=line.get_color())
    by_ratio.set(xlabel="recompute ratio r", ylabel="milliseconds", ylim=(0, None))
    by_ratio.set_title(f"{chunks} chunks of {found.chunk_tokens} tokens")
    by_size.set(xlabel="stored KV of the prompt's chunks, MB", xscale="log", yscale="log")
    by_size.set_title(f"recompute at r = {USUAL_RATIO}")
    figure.legend(loc="outside right center")
    figure.savefig(path, dpi=144)
