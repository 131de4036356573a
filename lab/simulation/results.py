"""What a simulation found: its table and its figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from blendrag.cli.output import count
from blendrag_lab.figure_styles import log_scale, styles
from blendrag_lab.plots import Series, draw, legend, panels, title
from blendrag_lab.tables import ResultTable, figure, table
from lab.simulation.replicas import ROUTING, Simulated, SimulatedCluster

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: From this share of its time on, a replica counts as overloaded: its queue hardly ever ends.
OVERLOADED = 0.97
#: A hit rate that changes by more between both halves of a run has not settled.
SETTLED = 0.02
RULE = "Simulated, not measured"


@dataclass(frozen=True)
class SimulationPoint:
    """One simulated cluster."""

    chunks: int
    replicas: int
    routing: str
    mean_ttft_ms: float
    p95_ttft_ms: float
    memory: float
    """Share of the chunks read from memory; likewise ``disk`` and ``remote``."""
    disk: float
    remote: float
    remote_bytes_per_s: float
    """Throughput of the remote for all replicas together."""
    busy: float
    """Share of the time in which a replica computes; ``busiest``: of the one that computes most."""
    busiest: float
    drift: float
    """Share read from the remote in the second half of the run minus that in the first."""
    replaced: float
    """Share of the disks that was replaced before requests counted."""


@dataclass(frozen=True)
class Simulation:
    about: str
    simulated: bool
    """Always true, for readers of the JSON."""
    assumptions: tuple[str, ...]
    full_prefill_ms: float
    service_ms: dict[str, float]
    """TTFT without waiting, with all chunks in one tier."""
    points: tuple[SimulationPoint, ...]


def point_of(
    cluster: SimulatedCluster, routing: str, found: Simulated, chunk_bytes: int
) -> SimulationPoint:
    top_k = cluster.demand.top_k
    missed = top_k - np.array(found.memory) - np.array(found.disk)  # [requests]
    half = len(missed) // 2
    return SimulationPoint(
        chunks=cluster.demand.chunks,
        replicas=cluster.replicas,
        routing=routing,
        mean_ttft_ms=1e3 * statistics.fmean(found.ttft_s),
        p95_ttft_ms=1e3 * float(np.quantile(found.ttft_s, 0.95)),
        memory=statistics.fmean(found.memory) / top_k,
        disk=statistics.fmean(found.disk) / top_k,
        remote=float(missed.mean()) / top_k,
        remote_bytes_per_s=float(missed.sum()) * chunk_bytes / found.seconds,
        busy=statistics.fmean(found.busy),
        busiest=max(found.busy),
        drift=float(missed[half:].mean() - missed[:half].mean()) / top_k,
        replaced=found.replaced,
    )


def result_table(result: Simulation) -> ResultTable:
    alone = ", ".join(f"{figure(ms)} ms from {tier}" for tier, ms in result.service_ms.items())
    notes = [
        f"Without waiting: {alone}; full prefill {figure(result.full_prefill_ms)} ms.",
        f"Assumed, not measured: {'; '.join(result.assumptions) or 'nothing'}.",
    ]
    if any(point.busiest > OVERLOADED for point in result.points):
        notes.append("* overloaded: the TTFT grows with the length of the run.")
    drifting = [point for point in result.points if abs(point.drift) > SETTLED]
    if drifting:
        notes.append(
            f"Not settled in {count(len(drifting), 'run')}: the share of remote reads still changes by up to "
            f"{max(abs(point.drift) for point in drifting):.1%}; give more --warm-requests."
        )
    # Tiers begin as random routing fills them: other routing reads too much until they are replaced.
    early = [p for p in result.points if p.routing in ("hash", "affinity") and p.remote > SETTLED]
    if early and min(p.replaced for p in early) < 1:
        notes.append(
            f"Routing by chunks may read less from the remote in the end: down to "
            f"{min(p.replaced for p in early):.0%} of the disks were replaced before requests counted; give "
            "more --warm-requests."
        )
    return table(
        [
            ("chunks", lambda point: f"{point.chunks:,}"),
            ("replicas", lambda point: str(point.replicas)),
            ("routing", lambda point: point.routing),
            ("mean TTFT ms (p95)", _ttft),
            ("memory", lambda point: f"{point.memory:.1%}"),
            ("disk", lambda point: f"{point.disk:.1%}"),
            ("remote", lambda point: f"{point.remote:.1%}"),
            ("remote GB/s", lambda point: figure(point.remote_bytes_per_s / 1e9)),
            ("busy (busiest)", lambda point: f"{point.busy:.0%} ({point.busiest:.0%})"),
        ],
        result.points,
        f"{RULE}: {result.about}",
        notes,
    )


def _ttft(point: SimulationPoint) -> str:
    overloaded = "*" if point.busiest > OVERLOADED else ""
    return f"{figure(point.mean_ttft_ms)} ({figure(point.p95_ttft_ms)}){overloaded}"


def result_figure(result: Simulation) -> Figure:
    """Mean TTFT with its 95th percentile, and the share of remote reads: over replicas, and over chunks.

    The one is drawn for the largest corpus, the other for the most replicas.
    """
    points = result.points
    most = {"replicas": max(p.replicas for p in points), "chunks": max(p.chunks for p in points)}
    varied = [x for x in most if len({getattr(p, x) for p in points}) > 1] or ["replicas"]
    drawn, axes = panels(2, len(varied))
    for row, x in enumerate(varied):
        other = "chunks" if x == "replicas" else "replicas"
        shown = [p for p in points if getattr(p, other) == most[other]]
        times, remote = axes[2 * row : 2 * row + 2]
        draw(times, [_line(shown, way, x, "mean_ttft_ms") for way in _ways(shown)])
        draw(remote, [_line(shown, way, x, "remote") for way in _ways(shown)])
        for panel in (times, remote):
            log_scale(panel, "x")
            panel.set_xlabel(f"{x} ({most[other]:,} {other})")
            title(panel, "simulated")
        log_scale(times)
        times.set_ylabel("mean TTFT, ms")
        remote.set(ylabel="share read from the remote", ylim=(0, None))
    legend(drawn, axes)
    return drawn


def _ways(points: Sequence[SimulationPoint]) -> list[str]:
    return list(dict.fromkeys(point.routing for point in points))


def _line(points: Sequence[SimulationPoint], routing: str, x: str, y: str) -> Series:
    rows = [point for point in points if point.routing == routing]
    style = styles([*ROUTING])[routing]
    return Series(
        routing, style, [getattr(row, x) for row in rows], [getattr(row, y) for row in rows]
    )
