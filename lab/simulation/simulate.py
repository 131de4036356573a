"""``python -m lab.simulation.simulate``: options → simulated clusters → a table, JSON or a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from blendrag.cli import interrupt, options, output
from blendrag.cli.lifecycle import DONE, begin, reporting
from blendrag.cli.options import require_plot
from blendrag.cli.progress import StatusLine
from blendrag.errors import InvalidInputError
from blendrag.store.durable import readable_size
from blendrag_lab.plots import write_png
from blendrag_lab.tables import figure
from blendrag_ray.routing import QUEUED_SHARE
from lab.simulation.popularity import Demand
from lab.simulation.replicas import ROUTING, SimulatedCluster, simulate
from lab.simulation.results import Simulation, point_of, result_figure, result_table
from lab.simulation.service_times import parse_counts, service_times

MAX_REPLICAS, MAX_CHUNKS = 1000, 10**9
#: Chunks on the disks of all replicas; each takes about 300 bytes of memory here.
MAX_HELD = 20_000_000


@reporting
def command(
    replicas: Annotated[str, typer.Option(help="Replicas, e.g. 1,3,10,30,100.")] = "3,10,30",
    chunks: Annotated[str, typer.Option(help="Chunks of the corpus, e.g. 1e4,1e6,1e8.")] = "1e6",
    routing: Annotated[
        str | None,
        options.optional(
            "random, round-robin, power-of-two, hash, affinity; comma-separated. [default: all]"
        ),
    ] = None,
    zipf: Annotated[float, options.number("Exponent of the popularity; 0 is uniform.", 0, 4)] = 1.0,
    topic_chunks: Annotated[
        int,
        options.number(
            "A request's chunks come from one topic of so many; 1: from anywhere.", 1, kind=int
        ),
    ] = 1,
    load: Annotated[
        float,
        options.number("Request rate; 1 is the most that full prefill can answer.", 0.01, 100),
    ] = 1.2,
    requests: Annotated[int, options.number("Requests that count.", 100, kind=int)] = 20_000,
    warm_requests: Annotated[
        int, options.number("Requests before them, for tiers to settle.", 0, kind=int)
    ] = 40_000,
    top_k: Annotated[int, options.number("Chunks in a prompt.", 1, 255, int)] = 6,
    ratio: Annotated[float, options.number("Recompute ratio r.", 0, 1)] = 0.3,
    ram_bytes: Annotated[int, options.size("Memory tier of a replica. [default: 64GiB]")] = "64GiB",  # type: ignore[assignment]
    disk_bytes: Annotated[int, options.size("Disk tier of a replica. [default: 1TB]")] = "1TB",  # type: ignore[assignment]
    remote: Annotated[
        str | None,
        options.optional("network, s3 or measured. [default: measured if it was, else network]"),
    ] = None,
    store: Annotated[
        Path | None,
        options.optional(
            "KV store whose machine profile gives the times. [default: an assumed 8B model on a GPU]",
            "--store",
            "-s",
        ),
    ] = None,
    queued_share: Annotated[
        float,
        options.number("What affinity pays for a queued request, in requests' bytes.", 0, 100),
    ] = QUEUED_SHARE,
    seed: Annotated[int, options.number("Random seed.", 0, kind=int)] = 0,
    plot: Annotated[Path | None, options.optional("Draw the result into this PNG.")] = None,
    json: options.Json = False,
) -> int:
    """Simulate replicas behind a router: TTFT and hit rate. Nothing is measured.

    Times are those of a machine profile (--store) or assumed. Every combination of --replicas, --chunks and
    --routing is simulated.
    """
    begin(verbose=False, if_interrupted="the simulation was abandoned; nothing was written")
    require_plot(plot)
    many = parse_counts("--replicas", replicas, 1, MAX_REPLICAS)
    corpora = parse_counts("--chunks", chunks, 1, MAX_CHUNKS)
    ways = list(ROUTING) if routing is None else [name.strip() for name in routing.split(",")]
    for name in ways:
        if name not in ROUTING:
            raise InvalidInputError(f"--routing {name!r} is not one of {', '.join(ROUTING)}")
    times = service_times(store, remote, ratio, top_k)
    memory_chunks, disk_chunks = (size // times.chunk_bytes for size in (ram_bytes, disk_bytes))
    _check(many[-1], corpora, top_k, topic_chunks, memory_chunks, disk_chunks, times.chunk_bytes)
    service_s, rate = times.table(), load / times.full_prefill_s
    points = []
    runs = [(n, r, way) for n in corpora for r in many for way in ways]
    with StatusLine("simulating") as line:
        for done, (size, count, way) in enumerate(runs):
            cluster = SimulatedCluster(
                count, Demand(size, zipf, top_k, topic_chunks), memory_chunks, disk_chunks, service_s,
                rate * count, queued_share * top_k,
            )  # fmt: skip

            def watch(
                answered: int, done: int = done, about: str = f"{way}, {count} replicas"
            ) -> None:
                each = requests + warm_requests
                text = f"{about}, {answered:,} of {each:,} requests, run {done + 1} of {len(runs)}"
                line.show(text, done * each + answered, len(runs) * each)

            found = simulate(cluster, way, requests, warm_requests, seed, watch)
            points.append(point_of(cluster, way, found, times.chunk_bytes))
    drawn = f"chunks by Zipf {zipf:g}"
    if topic_chunks > 1:
        drawn = f"topics of {topic_chunks} chunks by Zipf {zipf:g}"
    where = times.profile.conditions
    about = (
        f"{where.model} in {where.dtype} on {where.device}, r = {ratio:g}, {top_k} chunks of "
        f"{times.profile.chunk_tokens} tokens ({readable_size(times.chunk_bytes)}) a request; {drawn}; per "
        f"replica {figure(rate)} requests/s ({load:g} × full prefill's limit), {memory_chunks:,} chunks in "
        f"memory, {disk_chunks:,} on disk"
    )
    tiers = {"memory": (top_k, 0), "disk": (0, top_k), "remote": (0, 0)}
    result = Simulation(
        about,
        True,
        times.assumptions,
        1e3 * times.full_prefill_s,
        {tier: 1e3 * service_s[split] for tier, split in tiers.items()},
        tuple(points),
    )
    interrupt.expect("the simulation is complete")
    if json:
        output.print_json(asdict(result))
    else:
        result_table(result).print()
    if plot is not None:
        write_png(result_figure(result), plot)
    return DONE


def _check(
    replicas: int,
    corpora: Sequence[int],
    top_k: int,
    topic_chunks: int,
    memory_chunks: int,
    disk_chunks: int,
    chunk_bytes: int,
) -> None:
    """Raises :class:`InvalidInputError` for what cannot be simulated."""
    if 1 < topic_chunks < top_k:
        raise InvalidInputError(
            f"topics of {topic_chunks} chunks cannot fill prompts of {top_k}; make --topic-chunks {top_k} or "
            "more, or 1"
        )
    least = max(top_k, topic_chunks)
    if corpora[0] < least:
        raise InvalidInputError(
            f"a corpus of {corpora[0]:,} chunks is smaller than one request or topic; make --chunks {least} "
            "or more"
        )
    if not memory_chunks <= disk_chunks >= top_k:
        raise InvalidInputError(
            f"a disk tier of {disk_chunks:,} chunks ({readable_size(chunk_bytes)} each) cannot hold what is "
            f"in memory ({memory_chunks:,}) and one request ({top_k}); make --disk-bytes larger"
        )
    held = replicas * min(disk_chunks, corpora[-1])
    if held > MAX_HELD:
        raise InvalidInputError(
            f"{replicas} replicas hold {held:,} chunks, and at most {MAX_HELD:,} can be simulated; simulate "
            "fewer --replicas or a smaller --disk-bytes"
        )


if __name__ == "__main__":
    typer.run(command)
