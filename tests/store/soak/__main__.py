"""``make soak``: kills, mutations, failing system calls and power cuts, at any count.

Prints how far it is, then the counts, and as the last line one JSON object. Ctrl-C ends it with the
counts so far. Status 0 if everything was survived, 1 if not, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import tempfile
from pathlib import Path

import torch

import unpickling
from soak.faults import cut_everywhere, fail_everything
from soak.kills import Killing
from soak.mutations import BATCH, Fuzzing
from soak.report import Report
from soak.scenarios import SCENARIOS
from soak.tracer import unavailable


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=10_000, help="processes killed at work")
    parser.add_argument("--mutations", type=int, default=1_000_000, help="files and rows damaged")
    parser.add_argument(
        "--faults",
        type=int,
        default=None,
        help="failing system calls per operation; all by default",
    )
    parser.add_argument("--cuts", type=int, default=4, help="mixtures per power cut; 0 for none")
    parser.add_argument("--seed", type=int, default=None, help="of chance; a random one by default")
    parser.add_argument("--dir", type=Path, default=_memory(), help="where the stores are made")
    parser.add_argument("--json", type=Path, default=None, help="write the JSON object there, too")
    return parser.parse_args()


def _memory() -> Path:
    """In memory where there is such a place: what is lost with the power is simulated."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def _run(given: argparse.Namespace, place: Path, seed: int, report: Report) -> None:
    reason = unavailable()
    if reason is None and given.faults != 0:
        fail_everything(place, SCENARIOS, report, given.faults)
    if reason is None and given.cuts:
        cut_everywhere(place, SCENARIOS, report, given.cuts, seed)
    if reason is not None:
        report.say(f"no failing system calls and no power cuts: {reason}")
    # in turns, so that an interrupted run has had some of both
    killing, fuzzing = Killing(place, seed), Fuzzing(place, seed)
    while (kills := given.kills - report.done["kills"]) > 0:
        killing.run(report, min(kills, 20))
        share = report.done["kills"] / given.kills * given.mutations
        fuzzing.run(report, BATCH * int((share - report.done["mutations"]) // BATCH))
    fuzzing.run(report, given.mutations - report.done["mutations"])


def main() -> int:
    """Exit status."""
    given = _arguments()
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    unpickling.arm()
    report = Report(sys.stdout, {"kills": given.kills, "mutations": given.mutations})
    report.say(f"soak with seed {seed} in {given.dir}")
    status = 0
    with tempfile.TemporaryDirectory(
        prefix="blendrag-soak-", dir=given.dir, ignore_cleanup_errors=True
    ) as place:
        try:
            _run(given, Path(place), seed, report)
        except KeyboardInterrupt:
            report.say("interrupted: the counts so far")
            status = 130
    report.say(report.line())
    summary = json.dumps({"seed": seed, "interrupted": status == 130, **report.as_json()})
    report.say(summary)
    if given.json is not None:
        given.json.write_text(summary + "\n")
    return status or int(not report.is_good)


if __name__ == "__main__":
    sys.exit(main())
