"""The program of simulations: times from a profile or assumed, the table, the figure, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from blendrag.planning.profile import REMOTE, Tier, profiles
from cli.commands import invoke_program
from lab.simulation.results import Simulation, SimulationPoint, result_figure, result_table
from lab.simulation.service_times import REMOTES, assumed_profile, service_times
from lab.simulation.simulate import command

SMALL = (
    "--replicas", "2,3", "--chunks", "100,1e3", "--requests", "100",
    "--warm-requests", "50", "--ram-bytes", "2GB", "--disk-bytes", "4GB",
)  # fmt: skip


def simulated(*more: str) -> dict[str, Any]:
    result = invoke_program(command, *SMALL, "--json", *more)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def store_with_profile(folder: Path, *tiers: Tier) -> Path:
    profile = assumed_profile()
    profiles(folder, "0" * 64).keep(replace(profile, tiers=(*profile.tiers, *tiers), fixed_s=0.02))
    return folder


def test_every_combination_is_simulated_and_marked_so():
    found = TypeAdapter(Simulation).validate_python(simulated())
    assert found.simulated
    assert {(p.chunks, p.replicas, p.routing) for p in found.points} == {
        (chunks, replicas, routing)
        for chunks in (100, 1000)
        for replicas in (2, 3)
        for routing in ("random", "round-robin", "power-of-two", "hash", "affinity")
    }
    assert all(p.memory + p.disk + p.remote == pytest.approx(1) for p in found.points)
    assert all(0 < p.mean_ttft_ms <= p.p95_ttft_ms for p in found.points)
    shown = result_table(found).markdown()
    assert shown.startswith("Simulated, not measured")
    for assumed in ("8B model", "NVMe: 5 GB/s", "network: 3 GB/s"):
        assert assumed in shown
    axes = result_figure(found).axes
    assert [panel.get_title() for panel in axes] == ["simulated"] * 4
    lines: dict[Any, Any] = {line.get_label(): line for line in axes[1].get_lines()}
    affinity = [p for p in found.points if p.routing == "affinity" and p.chunks == 1000]
    assert list(lines["affinity"].get_ydata()) == [p.remote for p in affinity]


def test_the_same_seed_gives_the_same_numbers_and_another_others():
    few = ("--routing", "affinity", "--replicas", "2", "--chunks", "1000")
    assert simulated(*few) == simulated(*few)
    assert simulated(*few)["points"] != simulated(*few, "--seed", "1")["points"]


def test_the_table_names_overload_and_runs_that_have_not_settled():
    found = TypeAdapter(Simulation).validate_python(
        simulated("--replicas", "2", "--routing", "random")
    )
    bad = replace(found.points[0], busiest=0.99, drift=0.2)
    notes = "\n".join(result_table(replace(found, points=(bad,))).notes)
    assert "overloaded" in notes
    assert "Not settled in 1 run:" in notes
    settled: SimulationPoint = replace(bad, busiest=0.5, drift=0.0)
    assert "*" not in result_table(replace(found, points=(settled,))).markdown()
    early = replace(settled, routing="affinity", remote=0.5, replaced=0.25)
    assert (
        "25% of the disks were replaced" in result_table(replace(found, points=(early,))).notes[-1]
    )
    late = replace(early, replaced=2.0)
    assert "replaced" not in result_table(replace(found, points=(late,))).notes[-1]


def test_times_follow_the_tiers_of_the_estimate():
    times = service_times(None, "network", 0.3, 3)
    table = times.table()
    assert len(table) == 10
    assert table[3, 0] < table[0, 3] < table[0, 0] < times.full_prefill_s


def test_what_a_slow_remote_holds_is_computed(monkeypatch: pytest.MonkeyPatch):
    """With four reads at a time, reading three chunks from S3 takes longer than a full prefill."""
    monkeypatch.setitem(REMOTES, "s3", replace(REMOTES["s3"], read_s=30e-3 / 4))
    times = service_times(None, "s3", 0.3, 3)
    s3 = REMOTES["s3"].seconds(3 * times.chunk_bytes, 3 * times.profile.layers)
    assert times.full_prefill_s < s3
    assert times.seconds(0, 0) == pytest.approx(times.full_prefill_s)
    assert times.seconds(3, 0) < times.seconds(2, 0) <= times.seconds(0, 0)


def test_a_kept_profile_gives_the_times(tmp_path: Path):
    plain = store_with_profile(tmp_path / "plain")
    assert service_times(plain, None, 0.3, 3).seconds(3, 0) == pytest.approx(
        service_times(None, None, 0.3, 3).seconds(3, 0) + 0.02 - assumed_profile().fixed_s
    )
    assert [each.partition(":")[0] for each in service_times(plain, None, 0.3, 3).assumptions] == [
        "network"
    ]
    measured = store_with_profile(tmp_path / "measured", Tier(REMOTE, 1e9))
    times = service_times(measured, None, 0.3, 3)
    assert times.assumptions == ()
    assert times.seconds(0, 0) > service_times(plain, None, 0.3, 3).seconds(0, 0)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--replicas", "0"), "--replicas '0' must be whole numbers in [1, 1,000]"),
        (("--chunks", "many"), "--chunks 'many' must be whole numbers"),
        (("--chunks", "nan"), "--chunks 'nan' must be whole numbers"),
        (("--routing", "best"), "--routing 'best' is not one of random, round-robin"),
        (("--remote", "tape"), "--remote 'tape' is not one of measured, network, s3"),
        (("--remote", "measured"), "needs a profile with a remote"),
        (("--topic-chunks", "3"), "topics of 3 chunks cannot fill prompts of 6"),
        (("--chunks", "5"), "a corpus of 5 chunks is smaller than one request"),
        (("--disk-bytes", "1GB"), "a disk tier of 14 chunks"),
        (("--replicas", "1000", "--chunks", "1e9", "--disk-bytes", "10TB"), "at most 20,000,000"),
        (("--plot", "figure.pdf"), "--plot figure.pdf cannot be written"),
    ],
)
def test_bad_input_gets_one_sentence(given: tuple[str, ...], sentence: str):
    result = invoke_program(command, *SMALL, *given)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_store_without_profile_gets_one_sentence(tmp_path: Path):
    result = invoke_program(command, *SMALL, "--store", str(tmp_path))
    assert result.exit_code == 2
    assert "has no machine profile" in result.stderr
