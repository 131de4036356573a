"""``pytest --forks N``: collect once, then run the test files in N forks of the process.

A worker of pytest-xdist imports and collects everything itself, which takes 15 seconds. Forks share it. They
take files from one queue, each file as a whole, so that its fixtures are built once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from itertools import chain, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

#: A file's number in the queue.
NUMBER_BYTES = 2
#: Ends a fork after the test that it runs.
STOP = signal.SIGUSR1

Location = tuple[str, int | None, str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run the files in N forks")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Fork, and report what the forks send. A fork runs tests, and ends as every pytest does."""
    count = session.config.getoption("forks")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    files: dict[os.PathLike[str], list[pytest.Item]] = {}
    for item in session.items:
        files.setdefault(item.path, []).append(item)
    queue, end = os.pipe()
    for number in range(len(files)):
        os.write(end, number.to_bytes(NUMBER_BYTES, "big"))
    os.close(end)
    sys.stdout.flush()
    forks: dict[Connection, int] = {}
    for _ in range(min(count, len(files))):
        incoming, outgoing = Pipe(duplex=False)
        if not (pid := os.fork()):
            _report_to(outgoing, session)
            _run(session, _taken(queue, list(files.values())))
            return True
        outgoing.close()
        forks[incoming] = pid
    os.close(queue)
    try:
        _report_from(forks, session)
    finally:  # after Ctrl-C, which the terminal sends to the forks, too
        for incoming, pid in forks.items():
            incoming.close()
            os.kill(pid, STOP)
            os.waitpid(pid, 0)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


def _taken(queue: int, files: list[list[pytest.Item]]) -> Iterator[pytest.Item]:
    """The tests of the files that this fork takes."""
    while number := os.read(queue, NUMBER_BYTES):
        yield from files[int.from_bytes(number, "big")]


def _run(session: pytest.Session, items: Iterator[pytest.Item]) -> None:
    """As pytest does, which keeps the fixtures that the next test needs. So a fork takes the next file before
    the last test of a file."""
    for item, following in pairwise(chain(items, [None])):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break


def _report_to(outgoing: Connection, session: pytest.Session) -> None:
    """Send reports instead of printing them, and capture output apart from other forks."""
    signal.signal(STOP, lambda *_: setattr(session, "shouldstop", "stopped"))
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.register(_Sender(outgoing, config))


class _Sender:
    """Sends the reports of a test when the next one starts, with the name of that one."""

    def __init__(self, outgoing: Connection, config: pytest.Config) -> None:
        self.outgoing, self.config = outgoing, config
        self.reports: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        self.reports.append(hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logstart(self, nodeid: str, location: Location) -> None:
        self._send(nodeid, location)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._send()

    def _send(self, *starting: Any) -> None:
        self.outgoing.send_bytes(json.dumps([self.reports, starting]).encode())
        self.reports = []


def _report_from(forks: dict[Connection, int], session: pytest.Session) -> None:
    """Report until all forks have ended, and remove those that have."""
    hook = session.config.hook
    running: dict[Connection, tuple[str, Location]] = {}
    while forks:
        for incoming in wait(list(forks)):
            try:
                reports, running[incoming] = json.loads(incoming.recv_bytes())
            except EOFError:
                _, status = os.waitpid(forks.pop(incoming), 0)
                if running[incoming]:
                    report = _crash(os.waitstatus_to_exitcode(status), *running[incoming])
                    hook.pytest_runtest_logreport(report=report)
                continue
            for data in reports:
                report = hook.pytest_report_from_serializable(config=session.config, data=data)
                hook.pytest_runtest_logreport(report=report)
        if session.shouldfail:  # by --maxfail
            for pid in forks.values():
                os.kill(pid, STOP)


def _crash(code: int, nodeid: str, location: Location) -> pytest.TestReport:
    """Fail the test in which a fork ended."""
    said = f"the process ended with status {code}, and the tests behind this one in its file did not run"
    return pytest.TestReport(nodeid, location, {}, "failed", said, "call")
