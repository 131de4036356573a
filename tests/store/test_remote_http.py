"""The remote tier over HTTP: a small S3 server whose faults cost a bounded wait and no wrong byte."""

from __future__ import annotations

import contextlib
import math

import pytest
from s3 import S3, Process, Server, environment

from blendrag.corpus.corpus import Corpus
from blendrag.corpus.shared import collection
from blendrag.corpus.shared.collection import collect_remote
from blendrag.corpus.shared.sharing import Keys, follow, publish
from blendrag.errors import CorruptKVError, StoreUnavailableError
from blendrag.store.base import WantedKV
from blendrag.store.remote import objects
from blendrag.store.remote.claims import MARK
from blendrag.store.remote.objects import RemoteObjects
from blendrag.store.remote.root import RemoteRoot
from blendrag.store.remote.tier import RemoteTier, expected_load_s, request_ahead
from blendrag.store.tiered import open_store
from corpus.small_corpus import make_corpus, put
from lab.soak.remote_attacks import attack, texts

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow


@pytest.fixture
def server(monkeypatch):
    with Server().running() as made:
        for name, value in environment(made.server_port).items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def machine(lab, tmp_path):
    with contextlib.ExitStack() as opened:

        def make(name, timeout_s=30.0):
            def remote():
                return RemoteTier("s3://bucket/prefix", None, timeout_s)

            store = open_store(tmp_path / name, 0, 1 << 30, remote=remote)
            return opened.enter_context(contextlib.closing(lab.agree(store)))

        yield make


def filled(lab, machine, timeout_s=30.0):
    """A machine whose local store is empty, over a remote with chunks 1 and 2."""
    one = machine("one")
    for number in (1, 2):
        lab.put(one, number)
    one.flush()
    return machine("two", timeout_s)


def test_chunks_come_back_over_http(lab, server, machine):
    two = filled(lab, machine)
    assert lab.right(two) == [1, 2]
    assert two.trouble == ""


def test_a_refused_request_is_repeated(lab, server, machine):
    two = filled(lab, machine)
    server.fault = "503 once"
    assert lab.is_right(two, 1)


@pytest.mark.parametrize("fault", ["503", "hang", "cut", "trickle", "flip"])
def test_a_fault_is_a_miss_after_a_bounded_wait(lab, server, machine, fault):
    two = filled(lab, machine, 30.0 if fault == "flip" else 3.0)
    reader = lab.open(two, 1)
    server.fault = fault
    with pytest.raises((StoreUnavailableError, CorruptKVError)):
        lab.read(reader)
    assert lab.open(two, 1) is None
    assert bool(two.trouble) == (
        fault != "flip"
    )  # nothing else is asked, or only that chunk is not
    server.fault = ""
    if fault == "flip":
        assert lab.is_right(two, 2)


def test_the_cause_of_a_failure_is_said_and_how_long_the_remote_is_not_asked(monkeypatch, caplog):
    for name, value in environment(1).items():  # where nobody listens
        monkeypatch.setenv(name, value)
    tier = RemoteTier("s3://bucket/prefix", None, 20.0)  # it gives up after about a second
    assert "fails (Connection refused); check that it can be reached" in tier.trouble
    assert "it is not asked for 30 s" in caplog.text
    tier.close()


def test_a_missing_bucket_is_said_in_one_sentence(server):
    with pytest.raises(StoreUnavailableError, match="there is no such bucket"):
        RemoteTier("s3://elsewhere/prefix", None, 30.0)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("RequestTimeTooSkewed", r"which is this machine's time.*set the clock"),
        (
            "AccessDenied",
            r"refuses access or finds no credentials \(AccessDenied\); set the variables",
        ),
    ],
)
def test_a_refusal_is_said_in_one_sentence(server, monkeypatch, code, said):
    error = f"<Error><Code>{code}</Code><Message>No.\nNo.</Message></Error>".encode()
    monkeypatch.setattr(S3, "do_GET", lambda self: self.reply(403, error))
    with pytest.raises(StoreUnavailableError, match=said):
        RemoteTier("s3://bucket/prefix", None, 30.0)


def test_how_long_loading_takes_is_told_by_the_first_requests(lab, server, machine):
    two = filled(lab, machine)
    readers = [lab.open(two, number) for number in (1, 2)]
    assert 0 < expected_load_s(readers) < 20.0
    request_ahead(readers)
    assert all(lab.gives(reader, lab.kv(n)) for n, reader in enumerate(readers, 1))


def test_a_first_request_that_takes_too_long_is_not_waited_for_but_kept(lab, server, machine):
    two = filled(lab, machine)
    server.fault = "hang"
    wanted = [WantedKV(lab.namespace, lab.key(1), lab.tokens)]
    (reader,) = two.open_all(wanted, lab.layout, lambda: 0.01)
    assert not server.go_on.is_set()
    assert expected_load_s([reader]) == math.inf
    server.fault = ""
    server.go_on.set()
    reader.is_wanted = True
    reader.close()
    two.drain()
    assert lab.is_right(two.disk, 1)
    assert two.trouble == ""
    assert lab.open(two, 3) is None


def test_a_pointer_is_replaced_by_one_of_those_who_have_seen_it(server):
    with contextlib.closing(RemoteObjects("s3://bucket/prefix", 30.0)) as there:
        assert there.replace("pointer", b"1", None)
        assert not there.replace("pointer", b"2", None)
        seen = there.get("pointer")
        assert there.replace("pointer", b"2", seen)
        assert not there.replace("pointer", b"3", seen)
        assert there.replace("pointer", b"2", seen)  # a repeated request of the one who was first
        assert there.get("pointer").data == b"2"


def test_a_write_without_condition_that_is_refused_is_an_error(server, monkeypatch):
    def refuse(request):
        request.body()
        request.reply(412, b"<Error><Code>LeaseIdMissing</Code></Error>")

    monkeypatch.setattr(S3, "do_PUT", refuse)
    with contextlib.closing(RemoteObjects("s3://bucket/prefix", 30.0)) as there:
        assert not there.put("chunk", b"1", if_absent=True)
        with pytest.raises(StoreUnavailableError, match="LeaseIdMissing"):
            there.put("chunk", b"1", if_absent=False)


def test_a_corpus_is_published_and_followed_over_http(server, tmp_path):
    make_corpus(tmp_path / "one")
    with RemoteRoot("s3://bucket/prefix", None, 30.0) as remote:
        keys = Keys("0" * 64, frozenset())
        assert publish(tmp_path / "one", remote, lambda *_: keys, lambda _: frozenset()).changed
        assert follow(tmp_path / "two", remote).added == 9


def test_flipped_bits_and_a_frozen_server_give_no_wrong_answer(tmp_path):
    outcome = attack(60, 1, seed=5, directory=tmp_path, faults=("frozen",))
    assert outcome.counts["failures"] == 0, outcome.details
    assert outcome.counts["bits flipped"] >= 60
    assert outcome.counts["KV refused"] > 9
    assert outcome.counts["KV right"] > 9
    assert outcome.counts["corpus refused"] == 3
    assert outcome.counts["frozen refused"] == 6
    assert outcome.counts["answer right while frozen"] == 1


def test_what_was_copied_or_published_survives_kills_of_the_server(tmp_path):
    outcome = attack(0, 0, 3, tmp_path, kills=2)
    assert outcome.counts["kills survived"] == 2, outcome.details
    assert outcome.is_good, outcome.details


def test_a_stopped_server_ends_every_command_with_an_error_and_the_next_one_works(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(collection, "RENEW_S", 0.0)
    root, keys = tmp_path / "one", Keys("", frozenset())
    make_corpus(root)
    with contextlib.closing(Process()) as process:
        for name, value in environment(process.port).items():
            monkeypatch.setenv(name, value)
        commands = {
            "publish": lambda remote: publish(root, remote, lambda *_: keys, lambda _: frozenset()),
            "follow": lambda remote: follow(tmp_path / "two", remote),
            "collect": lambda remote: collect_remote(remote, 3600),
        }
        for stops_after in (1, 6):
            with RemoteRoot("s3://bucket/prefix", None, 30.0) as remote:
                commands["publish"](remote)
            for command in commands.values():
                with Corpus.open(root) as corpus:
                    put(corpus, 20 + stops_after)
                left, begin = [stops_after], RemoteObjects._begin
                with contextlib.ExitStack() as stopping, monkeypatch.context() as patch:

                    def counted(objects, work, left=left, begin=begin, stopping=stopping):
                        if not left[0]:
                            stopping.enter_context(process.suffering("frozen"))
                        left[0] -= 1
                        return begin(objects, work)

                    patch.setattr(RemoteObjects, "_begin", counted)
                    patch.setattr(objects, "WRITE_S", 0.5)
                    with (
                        RemoteRoot("s3://bucket/prefix", None, 0.5) as remote,
                        contextlib.suppress(StoreUnavailableError),
                    ):
                        command(remote)
                        assert left[0] >= 0, "nothing was asked after it was stopped"
            with RemoteRoot("s3://bucket/prefix", None, 30.0) as remote:
                remote.objects.delete(MARK)  # an hour passes
                commands["publish"](remote)
                commands["follow"](remote)
                commands["collect"](remote)
        assert texts(tmp_path / "two") == texts(root)
