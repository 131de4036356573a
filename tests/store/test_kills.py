import os
import random
import signal
import time

import pytest
from soak.audit import PLENTY, audit, in_child, make_chunks, put
from soak.kills import Killing, Worker
from soak.report import Report, checked

from blendrag.store import DiskStore


def test_everything_acknowledged_survives_kills_and_interrupts_of_two_writers(tmp_path):
    report = Report()
    Killing(tmp_path, seed=1).run(report, 24)
    checked(report)
    assert report.done["interrupts"] > 0


def filled(root, *numbers):
    make_chunks(numbers)
    store = DiskStore(root, PLENTY)
    for number in numbers:
        put(store, number)
    store.close()


def test_the_audit_notices_what_is_lost_and_what_is_wrong(lab, root, monkeypatch):
    filled(root, 1, 2)
    assert audit(root, [1, 2], [1, 2, 3], fresh=4).is_good
    assert audit(root, [1, 3], [1, 2, 3]).lost == (3,)
    monkeypatch.setattr("blendrag.store.reader.DiskReader._fill", lambda *args: None)
    assert audit(root, [1, 2], []).wrong == (1, 2, 4)[:2]


def test_the_audit_notices_a_stray_file_and_leftovers(lab, root):
    filled(root, 1)
    (root / "tmp" / f"{'0' * 16}.{'1' * 16}.part").touch()
    assert audit(root, [1], []).is_good  # recovered
    (path,) = lab.payloads(root)
    path.with_name(f"{lab.key(1)}.{'0' * 16}.kv").write_bytes(path.read_bytes())
    assert any("files: 2" in text for text in audit(root, [1], []).complaints)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (lambda: time.sleep(60), "hang: "),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "crash: the child died"),
        (lambda: 1 / 0, "crash: ZeroDivisionError"),
    ],
)
def test_a_hang_and_a_crash_of_the_reader_are_told_apart(action, said):
    answer, failure = in_child(action, timeout_s=0.5)
    assert answer is None
    assert failure.startswith(said)


class _Dropped:
    """Signals its own process while Python is in a place from where no exception comes out."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_that_python_swallows_comes_once_more():
    def work(teller):
        dropped = _Dropped()
        del dropped
        while True:
            time.sleep(0.01)

    worker = Worker(work, interruptible=True)
    worker.interrupt(0, random.Random(0))
    assert worker.kill().complaints == []
