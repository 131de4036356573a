"""Killed and interrupted writers lose nothing that was acknowledged."""

import os
import signal

import pytest

from lab.soak.store import kills
from lab.soak.store.audit import PLENTY, SoakReport, audit
from lab.soak.store.children import PATIENCE_S, Child
from lab.soak.store.kills import Killing


@pytest.mark.slow
def test_everything_acknowledged_survives_kills_and_interrupts_of_two_writers(
    tmp_path, monkeypatch
):
    """Each kind of work, in small stores and large ones."""
    monkeypatch.setattr(kills, "ROUNDS_PER_STORE", 2)
    report = SoakReport()
    Killing(tmp_path, seed=4).run(report, 9)
    report.check()
    assert report.done["interrupts"] > 0


def test_the_audit_notices_lost_and_wrong_chunks_and_stray_files(lab, root, monkeypatch):
    lab.fill(root, (1, 2), limit_bytes=PLENTY)
    (root / "tmp" / f"{'0' * 16}.{'1' * 16}.part").touch()  # cleared by opening
    assert audit(root, [1, 2], [1, 2, 3], fresh=4).is_good
    assert audit(root, [1, 3], [1, 2, 3, 4]).lost == (3,)
    path = lab.file(root, 1)
    path.with_name(f"{lab.key(1)}.{'0' * 16}.kv").write_bytes(path.read_bytes())
    assert any("files: 4" in text for text in audit(root, [1], [2, 4]).complaints)
    monkeypatch.setattr("blendrag.store.reader.DiskReader._fill", lambda *args: None)
    assert audit(root, [2, 4], []).wrong == (2, 4)


@pytest.mark.parametrize(
    ("action", "patience_s", "complaint"),
    [
        (lambda teller: signal.pause(), 0.0, "hang: "),
        (lambda teller: os.kill(os.getpid(), signal.SIGKILL), PATIENCE_S, "crash: the child died"),
        (lambda teller: 1 / 0, PATIENCE_S, "crash: ZeroDivisionError"),
    ],
)
def test_a_hang_and_a_crash_of_a_child_are_told_apart(action, patience_s, complaint):
    (said,) = Child(action).wait(patience_s).complaints
    assert said.startswith(complaint)
