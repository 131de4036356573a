"""``make soak``: kills, mutations, failing system calls and power cuts.

Prints progress, then the counts, and as the last line one JSON object. Ctrl-C ends it with the counts so
far. The exit status is 0 if everything was survived, 1 if not, 130 after Ctrl-C.
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
from lab.soak.store import remote_power
from lab.soak.store.audit import SoakReport
from lab.soak.store.corpus_faults import CORPUS_OPERATIONS, fail_corpus
from lab.soak.store.faults import OPERATIONS, cut_everywhere, fail_everything
from lab.soak.store.fuzz import BATCH, StoreFuzzing
from lab.soak.store.kills import Killing
from lab.soak.store.tracer import unavailable


def _arguments() -> argparse.Namespace:
    memory = Path("/dev/shm")  # faster, and the power cuts are simulated
    directory = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=10_000, help="killed processes")
    parser.add_argument("--mutations", type=int, default=1_000_000, help="damaged files and rows")
    parser.add_argument("--faults", type=int, help="failing calls per operation; all by default")
    parser.add_argument("--cuts", type=int, default=4, help="mixtures per power cut; 0 for no cuts")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="random seed")
    parser.add_argument("--dir", type=Path, default=directory, help="where stores are made")
    parser.add_argument("--json", type=Path, help="also write the JSON object to this file")
    return parser.parse_args()


def _run(given: argparse.Namespace, directory: Path, report: SoakReport) -> None:
    reason = unavailable()
    if reason is not None:
        report.say(f"no failing system calls and no power cuts: {reason}")
    for name in OPERATIONS if reason is None else ():
        if given.faults != 0:
            fail_everything(directory, name, report, given.faults)
        if given.cuts:
            cut_everywhere(directory, name, report, given.cuts, given.seed)
    for name in CORPUS_OPERATIONS if reason is None and given.faults != 0 else ():
        fail_corpus(directory, name, report, given.faults)
    if given.cuts:
        remote_power.cut_everywhere(directory, report, given.cuts, given.seed)
    # in turns, so that an interrupted run has had some of both
    killing, fuzzing = Killing(directory, given.seed), StoreFuzzing(directory, given.seed)
    while (kills := given.kills - report.done["kills"]) > 0:
        killing.run(report, min(kills, 20))
        share = report.done["kills"] / given.kills * given.mutations
        fuzzing.run(report, BATCH * int((share - report.done["mutations"]) // BATCH))
    fuzzing.run(report, given.mutations - report.done["mutations"])


def main() -> int:
    """Exit status."""
    given = _arguments()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    unpickling.arm()
    report, status = SoakReport(sys.stdout), 0
    report.say(f"soak with seed {given.seed} in {given.dir}")
    with tempfile.TemporaryDirectory(
        prefix="blendrag-soak-", dir=given.dir, ignore_cleanup_errors=True
    ) as directory:
        try:
            _run(given, Path(directory), report)
        except KeyboardInterrupt:
            report.say("interrupted: the counts so far")
            status = 130
    report.say(report.line())
    summary = json.dumps({"seed": given.seed, "interrupted": status == 130, **report.as_json()})
    report.say(summary)
    if given.json is not None:
        given.json.write_text(summary + "\n")
    return status or int(not report.is_good)


if __name__ == "__main__":
    sys.exit(main())
