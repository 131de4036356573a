"""Export and import: what goes into an archive, what is taken out of one, and what is not."""

import errno
import io
import os
import random
import shutil
import signal
import struct
import tarfile

import pytest

from blendrag.errors import BlendragError, InvalidInputError, StoreFullError, StoreUnavailableError
from blendrag.store import DiskStore, maintenance
from blendrag.store.files import PayloadFiles
from blendrag.store.maintenance.archive import FIRST, LAST


@pytest.fixture
def filled(lab, root):
    """A closed store of four chunks; number 2 is pinned."""
    fill(lab, root, range(4), pinned=(2,))
    return root


@pytest.fixture
def archive(filled, tmp_path):
    """An export of all of it."""
    maintenance.export(filled, tmp_path / "kv.tar")
    return tmp_path / "kv.tar"


@pytest.fixture
def target(tmp_path):
    """Where there is no store yet."""
    return tmp_path / "target"


def fill(lab, root, numbers, pinned=(), limit_bytes=1 << 30):
    store = DiskStore(root, limit_bytes)
    for number in numbers:
        lab.put(store, number)
    for number in pinned:
        store.pin(lab.namespace, lab.key(number))
    store.close()


def right(lab, root, numbers=range(10)):
    store = DiskStore(root, None)
    try:
        assert store.stats().entries == len(lab.payloads(root))
        return [number for number in numbers if lab.is_right(store, number)]
    finally:
        store.close()


def payload(lab, root, number):
    (path,) = (root / "kv").rglob(f"{lab.key(number)}.*.kv")
    return path


def members(archive):
    """Name and bytes of every member, as a stock tar sees them."""
    with tarfile.open(archive, "r:") as tar:
        return [(each.name, tar.extractfile(each).read()) for each in tar]


def write_tar(path, contents, fmt=tarfile.USTAR_FORMAT):
    """``contents``: pairs of name and bytes, or members of any other kind."""
    with tarfile.open(path, "w", format=fmt) as tar:
        for each in contents:
            if isinstance(each, tarfile.TarInfo):
                tar.addfile(each)
                continue
            name, data = each
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


# -- export -------------------------------------------------------------------------------------


def test_an_archive_is_a_plain_tar_of_payloads_with_the_pinned_ones_first(lab, filled, archive):
    names = [name for name, _ in members(archive)]
    assert names[0] == FIRST
    assert names[-1] == LAST
    assert names[1] == f"pinned/{lab.namespace}/{lab.key(2)}.kv"
    assert sorted(names[2:-1]) == sorted(
        f"kv/{lab.namespace}/{lab.key(number)}.kv" for number in (0, 1, 3)
    )
    for name, data in members(archive)[1:-1]:
        key = name.split("/")[2].removesuffix(".kv")
        (path,) = (filled / "kv").rglob(f"{key}.*.kv")
        assert data == path.read_bytes()


def test_exporting_again_gives_the_same_bytes_and_replaces_the_archive(filled, archive):
    before = archive.read_bytes()
    report = maintenance.export(filled, archive)
    assert archive.read_bytes() == before
    assert (report.payloads, report.pinned, report.left_out) == (4, 1, ())
    assert os.listdir(archive.parent) == sorted(os.listdir(archive.parent), key=str.lower)
    assert not [name for name in os.listdir(archive.parent) if name.endswith(".part")]


def test_exports_of_equal_stores_are_equal(lab, archive, tmp_path):
    fill(lab, tmp_path / "other", reversed(range(4)), pinned=(2,))
    maintenance.export(tmp_path / "other", tmp_path / "other.tar")
    assert (tmp_path / "other.tar").read_bytes() == archive.read_bytes()


def test_an_export_changes_nothing_in_the_store_and_tells_how_far_it_is(lab, filled, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in filled.rglob("*")}
    told = []
    maintenance.export(filled, tmp_path / "kv.tar", watch=lambda *step: told.append(step))
    assert {path: path.stat().st_mtime_ns for path in filled.rglob("*")} == before
    assert told == [(n * lab.entry_bytes, 4 * lab.entry_bytes) for n in range(1, 5)]


def test_only_the_namespace_asked_for_is_exported(lab, filled, tmp_path):
    store = DiskStore(filled, None)
    store.put(lab.key("other"), lab.key(7), lab.kv(7))
    store.close()
    report = maintenance.export(filled, tmp_path / "kv.tar", lab.key("other"))
    assert report.payloads == 1
    assert members(tmp_path / "kv.tar")[1][0] == f"kv/{lab.key('other')}/{lab.key(7)}.kv"


@pytest.mark.parametrize("offset", [20, 5000, -1])
def test_a_damaged_payload_is_left_out_and_the_archive_is_whole(
    lab, filled, tmp_path, target, offset
):
    data = bytearray(payload(lab, filled, 1).read_bytes())
    data[offset] ^= 1
    payload(lab, filled, 1).write_bytes(data)
    report = maintenance.export(filled, tmp_path / "kv.tar")
    assert (report.payloads, len(report.left_out)) == (3, 1)
    assert lab.key(1) in report.left_out[0]
    assert payload(lab, filled, 1).exists()
    assert maintenance.take_in(target, tmp_path / "kv.tar").is_complete
    assert right(lab, target) == [0, 2, 3]


def test_an_archive_is_whole_although_reads_are_cut_short(lab, filled, archive, monkeypatch):
    short, whole = os.pread, archive.read_bytes()
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: short(fd, min(size, 100), offset))
    maintenance.export(filled, archive)
    assert archive.read_bytes() == whole


def test_a_header_that_fails_when_it_is_copied_is_a_damaged_payload_and_no_fault_of_the_archive(
    lab, filled, tmp_path, monkeypatch
):
    real, failing = os.pread, payload(lab, filled, 1)
    seen = []

    def pread(fd, size, offset):
        if os.readlink(f"/proc/self/fd/{fd}") == str(failing):
            seen.append(offset)
            if seen.count(0) == 3:  # after its length, and all of it
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    report = maintenance.export(filled, tmp_path / "kv.tar")
    assert report.payloads == 3
    (fault,) = report.left_out
    assert "cannot be read (Input/output error)" in fault


@pytest.mark.parametrize("content", [b"", b"a letter", bytes(2048)])
def test_a_file_that_is_no_earlier_export_is_not_replaced(filled, tmp_path, content):
    letter = tmp_path / "letter"
    letter.write_bytes(content)
    with pytest.raises(InvalidInputError, match="is not replaced"):
        maintenance.export(filled, letter)
    assert letter.read_bytes() == content


def test_an_archive_is_not_written_into_the_store_or_where_nothing_can_be(filled, tmp_path):
    with pytest.raises(InvalidInputError, match="lies in store"):
        maintenance.export(filled, filled / "kv" / "kv.tar")
    (tmp_path / "link").symlink_to(filled)
    with pytest.raises(InvalidInputError, match="lies in store"):
        maintenance.export(filled, tmp_path / "link" / "kv.tar")
    with pytest.raises(InvalidInputError, match="cannot be written"):
        maintenance.export(filled, tmp_path / "nowhere" / "kv.tar")
    with pytest.raises(InvalidInputError, match="is not replaced"):
        maintenance.export(filled, tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_leaves_no_archive_and_the_earlier_one(
    filled, archive, monkeypatch, code
):
    before = archive.read_bytes()

    def fail(fd):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreFullError if code == errno.ENOSPC else InvalidInputError) as caught:
        maintenance.export(filled, archive)
    assert str(archive) in str(caught.value)
    assert archive.read_bytes() == before
    assert not [name for name in os.listdir(archive.parent) if name.endswith(".part")]


def test_what_is_evicted_during_an_export_is_not_in_it(lab, filled, tmp_path, target):
    def evict(done, total):
        for path in lab.payloads(filled):
            path.unlink()

    report = maintenance.export(filled, tmp_path / "kv.tar", watch=evict)
    assert (report.payloads, report.left_out) == (1, ())
    assert maintenance.take_in(target, tmp_path / "kv.tar").is_complete


# -- import -------------------------------------------------------------------------------------


def test_an_import_makes_a_store_with_the_same_chunks_and_pins(lab, archive, target):
    told = []
    report = maintenance.take_in(target, archive, watch=lambda *step: told.append(step))
    assert report.is_complete
    assert (report.imported, report.already_there, report.pinned) == (4, 0, 1)
    assert report.imported_bytes == 4 * lab.entry_bytes
    assert told[-1][0] <= told[-1][1] == archive.stat().st_size
    assert maintenance.collect(target, 0).left == 1
    assert right(lab, target) == [2]


def test_an_import_is_repeated_without_effect_and_adds_what_is_missing(lab, archive, target):
    fill(lab, target, [0, 7])
    first = maintenance.take_in(target, archive)
    before = {path: path.stat().st_mtime_ns for path in lab.payloads(target)}
    second = maintenance.take_in(target, archive)
    assert (first.imported, first.already_there) == (3, 1)
    assert (second.imported, second.already_there, second.pinned) == (0, 4, 1)
    assert {path: path.stat().st_mtime_ns for path in lab.payloads(target)} == before
    assert right(lab, target) == [0, 1, 2, 3, 7]


def test_an_import_brings_back_what_was_damaged_and_set_aside(lab, filled, archive):
    payload(lab, filled, 1).write_bytes(b"damaged")
    maintenance.check(filled, repair=True)
    assert maintenance.take_in(filled, archive).imported == 1
    assert right(lab, filled) == [0, 1, 2, 3]


def test_a_limit_given_is_remembered_and_what_does_not_fit_is_said(lab, filled, archive, target):
    report = maintenance.take_in(target, archive, disk_bytes=2 * lab.entry_bytes)
    assert not report.is_complete
    assert "--disk-bytes" in report.stopped
    assert report.imported == 2
    assert maintenance.survey(target).limit_bytes == 2 * lab.entry_bytes
    assert len(right(lab, target)) == 2
    assert maintenance.take_in(target, archive, disk_bytes=4 * lab.entry_bytes).imported == 2
    assert right(lab, target) == [0, 1, 2, 3]


def test_an_import_makes_room_as_an_ingest_does(lab, archive, target):
    fill(lab, target, range(5, 8), limit_bytes=5 * lab.entry_bytes)
    assert maintenance.take_in(target, archive).is_complete
    assert right(lab, target) == [0, 1, 2, 3, 7]


def test_a_full_disk_stops_an_import_and_what_was_taken_in_stays(lab, archive, target, monkeypatch):
    real, writes = PayloadFiles.write, []

    def failing(self, *args):
        writes.append(0)
        if len(writes) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, *args)

    monkeypatch.setattr(PayloadFiles, "write", failing)
    report = maintenance.take_in(target, archive)
    assert "no space left" in report.stopped
    assert report.imported == 2
    monkeypatch.undo()
    assert maintenance.take_in(target, archive).is_complete


@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_a_kill_during_an_import_leaves_whole_chunks_only(lab, archive, target, fork, when):
    def import_and_die():
        real, renames = os.rename, []

        def dying(*args, **kwargs):
            renames.append(0)
            if len(renames) == when:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*args, **kwargs)

        os.rename = dying
        maintenance.take_in(target, archive)

    _, status = os.waitpid(fork(import_and_die), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert len(right(lab, target)) == when - 1
    assert list((target / "tmp").iterdir()) == []
    assert maintenance.take_in(target, archive).is_complete
    assert right(lab, target) == [0, 1, 2, 3]


# -- archives that are not what export wrote ------------------------------------------------------


def test_an_archive_cut_anywhere_gives_what_is_whole_and_says_so(lab, archive, tmp_path):
    data = archive.read_bytes()
    cut = tmp_path / "cut.tar"
    generator = random.Random(5)
    member = lab.entry_bytes + 512
    edges = [1024 + n * member for n in range(5)] + [len(data) - 1024 - 512 - n for n in (0, 1)]
    for size in [*edges, *generator.sample(range(1024, len(data) - 1024 - 512), 20)]:
        cut.write_bytes(data[:size])
        target = tmp_path / f"cut-{size}"
        report = maintenance.take_in(target, cut)
        whole = min((size - 1024) // member, 4)
        assert (report.imported, report.rejected) == (whole, []), size
        assert "is not whole" in report.stopped
        assert len(right(lab, target)) == whole
        shutil.rmtree(target)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 550])
def test_an_archive_cut_in_its_first_member_makes_no_store(archive, target, size):
    archive.write_bytes(archive.read_bytes()[:size])
    with pytest.raises(InvalidInputError, match="is no archive"):
        maintenance.take_in(target, archive)
    assert not target.exists()


def test_what_is_no_archive_is_refused_in_a_sentence_and_makes_no_store(tmp_path, target, lab):
    (tmp_path / "text").write_bytes(b"a letter" * 999)
    write_tar(tmp_path / "other.tar", [("letter.txt", b"a letter")])
    write_tar(tmp_path / "empty.tar", [])
    (tmp_path / "folder").mkdir()
    with tarfile.open(tmp_path / "packed.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo(FIRST))
    write_tar(tmp_path / "list.tar", [(FIRST, b"[1]")])
    write_tar(tmp_path / "deep.tar", [(FIRST, b"[" * 4000)])
    write_tar(tmp_path / "large.tar", [(FIRST, b" " * 5000)])
    names = (
        "text", "other.tar", "empty.tar", "folder", "packed.tar.gz", "list.tar", "deep.tar",
        "large.tar", "nothing",
    )  # fmt: skip
    for name in names:
        with pytest.raises(InvalidInputError) as caught:
            maintenance.take_in(target, tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not target.exists()


@pytest.mark.parametrize("field", ["blendrag_store_export", "kv_format"])
def test_an_archive_of_another_version_is_refused(archive, tmp_path, target, field):
    contents = members(archive)
    contents[0] = (
        FIRST,
        contents[0][1].replace(f'"{field}": 1'.encode(), b'"%s": 2' % field.encode()),
    )
    newer = write_tar(tmp_path / "newer.tar", contents)
    with pytest.raises(InvalidInputError, match=f"{field} is 2, expected 1"):
        maintenance.take_in(target, newer)


def link(name, kind=tarfile.SYMTYPE, to="/etc/passwd"):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, to
    return member


def test_names_that_export_never_gives_end_the_import_and_touch_nothing(
    lab, archive, tmp_path, target
):
    contents = members(archive)
    good = contents[1][1]
    name = f"kv/{lab.namespace}/{lab.key(2)}.kv"
    hostile = [
        (f"../{name}", good),
        (f"/{name}", good),
        (f"kv/{lab.namespace}/../../../escaped.kv", good),
        (f"kv/{lab.namespace}/{lab.key(2).upper()}.kv", good),
        (f"{name}\n", good),
        ("format", b"blendrag-kv 1\n"),
        ("disk-bytes", b"1\n"),
        (f"verified/{lab.namespace}.json", b"{}"),
        link(name),
        link(name, tarfile.LNKTYPE, "format"),
        link(name, tarfile.DIRTYPE, ""),
        link(name, tarfile.FIFOTYPE, ""),
        link(name, tarfile.CHRTYPE, ""),
    ]
    for number, member in enumerate(hostile):
        path = write_tar(
            tmp_path / f"{number}.tar", [contents[0], contents[2], member, *contents[3:]]
        )
        report = maintenance.take_in(target / str(number), path)
        assert "is not whole" in report.stopped, member
        assert report.imported == 1
        assert len(right(lab, target / str(number))) == 1
        assert not list((target / str(number)).rglob("*.json"))
    assert not list(tmp_path.rglob("escaped*"))


@pytest.mark.parametrize("fmt", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_extended_headers_are_not_understood_and_end_the_import(
    lab, archive, tmp_path, target, fmt
):
    contents = members(archive)
    with tarfile.open(tmp_path / "x.tar", "w", format=fmt) as tar:
        for name, data in contents:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.pax_headers = {"comment": "hello"} if name == contents[2][0] else {}
            member.uname = ""
            tar.addfile(member, io.BytesIO(data))
    report = maintenance.take_in(target, tmp_path / "x.tar")
    assert "not a plain file" in report.stopped
    assert lab.payloads(target) == []


def test_payloads_that_lie_are_rejected_and_the_others_taken_in(lab, archive, tmp_path, target):
    contents = members(archive)
    names, data = [name for name, _ in contents], [bytes(each) for _, each in contents]
    flipped = bytearray(data[1])
    flipped[-1] ^= 1
    liar = bytearray(data[2])
    liar[:8] = struct.pack("<Q", 1 << 63)
    forged = [
        contents[0],
        (names[1], bytes(flipped)),
        (names[2], bytes(liar)),
        (names[3], data[4]),  # another chunk's bytes
        (names[4], data[4] + b"more"),
        (f"kv/{lab.key('other')}/{lab.key(0)}.kv", data[2]),  # another namespace's
        (f"kv/{lab.namespace}/{lab.key(7)}.kv", b""),
        (f"kv/{lab.namespace}/{lab.key(8)}.kv", b"short"),
    ]
    total = sum(len(each) for _, each in forged[1:])
    forged.append((LAST, b'{"payloads": 7, "bytes": %d}' % total))
    report = maintenance.take_in(target, write_tar(tmp_path / "forged.tar", forged))
    assert (report.imported, len(report.rejected), report.stopped) == (0, 7, "")
    assert not report.is_complete
    assert lab.payloads(target) == []
    assert list((target / "tmp").glob("*.part")) == []
    assert list((target / "pinned").iterdir()) == []
    assert maintenance.take_in(target, archive).is_complete
    assert right(lab, target) == [0, 1, 2, 3]


def test_an_archive_that_lacks_a_payload_it_should_hold_says_so(lab, archive, tmp_path, target):
    contents = members(archive)
    del contents[3]
    report = maintenance.take_in(target, write_tar(tmp_path / "short.tar", contents))
    assert report.imported == 3
    assert "it should hold 4 payloads" in report.stopped


def test_a_payload_larger_than_the_rest_of_the_archive_evicts_nothing(lab, archive, target):
    fill(lab, target, [7], limit_bytes=lab.entry_bytes)
    archive.write_bytes(archive.read_bytes()[: 1024 + 512 + 5000])
    assert "ends early" in maintenance.take_in(target, archive).stopped
    assert right(lab, target) == [7]


def test_random_mutations_of_an_archive_never_give_wrong_bytes(lab, archive, tmp_path):
    data, generator = archive.read_bytes(), random.Random(3)
    damaged = tmp_path / "damaged.tar"
    outcomes = set()
    for number in range(40):
        changed = bytearray(data)
        for _ in range(generator.choice((1, 3))):
            # headers and the first bytes of payloads, where it hurts most
            block = (
                generator.randrange(0, len(data) // 512) * 512
                if number % 2
                else (
                    generator.choice(
                        [0, 512, *(1024 + n * (lab.entry_bytes + 512) for n in range(5))]
                    )
                )
            )
            changed[block + generator.randrange(512)] = generator.randrange(256)
        damaged.write_bytes(changed)
        target = tmp_path / "mutated"
        try:
            report = maintenance.take_in(target, damaged)
        except InvalidInputError:
            outcomes.add("refused")
            assert not target.exists()
            continue
        outcomes.add("whole" if report.is_complete else "damaged")
        assert len(right(lab, target)) == len(lab.payloads(target)) == report.imported
        shutil.rmtree(target)
    assert outcomes >= {"refused", "damaged"}


def test_an_import_into_what_is_no_store_touches_nothing(archive, tmp_path, filled):
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "letter.txt").write_text("text", encoding="utf-8")
    (tmp_path / "file").write_text("text", encoding="utf-8")
    for name, words in (("documents", "holds no store"), ("file", "is a file")):
        with pytest.raises(StoreUnavailableError, match=words):
            maintenance.take_in(tmp_path / name, archive)
    assert os.listdir(tmp_path / "documents") == ["letter.txt"]
    (filled / "format").write_text("blendrag-kv 2\n", encoding="ascii")
    with pytest.raises(BlendragError, match="newer"):
        maintenance.take_in(filled, archive)


def test_an_import_into_an_empty_directory_makes_a_store_there(lab, archive, target):
    target.mkdir()
    assert maintenance.take_in(target, archive).is_complete
    assert right(lab, target) == [0, 1, 2, 3]


def test_a_pipe_is_no_archive_and_is_not_waited_for(lab, filled, target, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    before = lab.descriptors()
    with pytest.raises(InvalidInputError, match=r"cannot be read \(it is no regular file\)"):
        maintenance.take_in(target, pipe)
    assert not target.exists()
    with pytest.raises(InvalidInputError, match="no archive of an earlier export"):
        maintenance.export(filled, pipe)
    assert lab.descriptors() == before
