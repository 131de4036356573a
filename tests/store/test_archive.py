"""Export and import: what goes into an archive, and what is accepted from one."""

import contextlib
import errno
import io
import os
import random
import shutil
import struct
import tarfile

import pytest

from blendrag.errors import BlendragError, InvalidInputError, StoreFullError, StoreUnavailableError
from blendrag.store.disk import DiskStore
from blendrag.store.maintenance import check, collect, export_archive, import_archive, survey
from blendrag.store.maintenance.archive import FIRST, LAST
from blendrag.store.payload_files import PayloadFiles


@pytest.fixture
def filled(lab, root):
    """A closed store of four chunks; number 2 is pinned."""
    lab.fill(root, range(4), pinned=(2,))
    return root


@pytest.fixture
def archive(filled, tmp_path):
    """An export of all of it."""
    export_archive(filled, tmp_path / "kv.tar")
    return tmp_path / "kv.tar"


@pytest.fixture
def target(tmp_path):
    """A path without a store."""
    return tmp_path / "target"


def members(archive):
    """Name and bytes of every member, as read by tarfile."""
    with tarfile.open(archive, "r:") as tar:
        return [(each.name, tar.extractfile(each).read()) for each in tar]


def write_tar(path, contents):
    """``contents``: pairs of name and bytes, or other members."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for each in contents:
            name, data = each if isinstance(each, tuple) else (each, b"")
            member = tarfile.TarInfo(name) if isinstance(name, str) else name
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def link(name, kind=tarfile.SYMTYPE, to="/etc/passwd"):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, to
    return member


def part_files(directory):
    return [name for name in os.listdir(directory) if name.endswith(".part")]


# -- export ------------------------------------------------------------------------------------------


def test_an_archive_is_a_plain_tar_with_pinned_payloads_first(lab, filled, archive):
    contents = members(archive)
    names = [name for name, _ in contents]
    assert (names[0], names[-1]) == (FIRST, LAST)
    assert names[1] == f"pinned/{lab.namespace}/{lab.key(2)}.kv"
    assert sorted(names[2:-1]) == sorted(f"kv/{lab.namespace}/{lab.key(n)}.kv" for n in (0, 1, 3))
    for name, data in contents[1:-1]:
        key = name.split("/")[2].removesuffix(".kv")
        (path,) = (filled / "kv").rglob(f"{key}.*.kv")
        assert data == path.read_bytes()


def test_equal_stores_give_equal_archives_and_an_archive_is_replaced(
    lab, filled, archive, tmp_path, monkeypatch
):
    before, steps = archive.read_bytes(), []
    lab.fill(tmp_path / "other", reversed(range(4)), pinned=(2,))
    export_archive(tmp_path / "other", tmp_path / "other.tar")
    assert (tmp_path / "other.tar").read_bytes() == before
    files = {path: path.stat().st_mtime_ns for path in filled.rglob("*")}
    real = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: real(fd, min(size, 100)))  # short reads
    report = export_archive(filled, archive, progress=lambda *step: steps.append(step))
    assert archive.read_bytes() == before
    assert (report.payloads, report.pinned, report.left_out) == (4, 1, [])
    assert part_files(archive.parent) == []
    assert {path: path.stat().st_mtime_ns for path in filled.rglob("*")} == files
    assert steps == [(n * lab.entry_bytes, 4 * lab.entry_bytes) for n in range(1, 5)]


def test_one_namespace_can_be_exported(lab, filled, tmp_path):
    with contextlib.closing(DiskStore(filled, None)) as store:
        store.put(lab.key("other"), lab.key(7), lab.kv(7))
    assert export_archive(filled, tmp_path / "kv.tar", lab.key("other")).payloads == 1
    assert members(tmp_path / "kv.tar")[1][0] == f"kv/{lab.key('other')}/{lab.key(7)}.kv"


def test_damaged_payloads_are_left_out_of_a_complete_archive(lab, filled, tmp_path, target):
    for number, offset in ((0, 20), (1, 5000), (3, -1)):
        lab.flip(lab.file(filled, number), offset)
    report = export_archive(filled, tmp_path / "kv.tar")
    assert (report.payloads, len(report.left_out)) == (1, 3)
    assert all(any(lab.key(n) in each for each in report.left_out) for n in (0, 1, 3))
    assert len(lab.payloads(filled)) == 4
    assert import_archive(target, tmp_path / "kv.tar").is_complete
    assert lab.intact(target) == [2]


@pytest.mark.parametrize("content", [b"", b"a letter", bytes(2048), None])
def test_a_file_that_is_not_an_archive_is_not_replaced(lab, filled, tmp_path, content):
    letter = tmp_path / "letter"
    before = lab.descriptors()
    if content is None:
        os.mkfifo(letter)
    else:
        letter.write_bytes(content)
    with pytest.raises(InvalidInputError, match="is not replaced"):
        export_archive(filled, letter)
    assert letter.is_fifo() or letter.read_bytes() == content
    assert lab.descriptors() <= before


def test_an_archive_is_not_written_into_the_store_or_a_missing_directory(filled, tmp_path):
    (tmp_path / "link").symlink_to(filled)
    for path, words in (
        (filled / "kv" / "kv.tar", "is inside store"),
        (tmp_path / "link" / "kv.tar", "is inside store"),
        (tmp_path / "nowhere" / "kv.tar", "cannot be written"),
        (tmp_path, "is not replaced"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            export_archive(filled, path)


@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, StoreFullError), (errno.EIO, InvalidInputError)]
)
def test_a_failing_disk_leaves_the_earlier_archive(filled, archive, failing, code, error):
    before = archive.read_bytes()
    with failing("fsync", code=code), pytest.raises(error) as caught:
        export_archive(filled, archive)
    assert str(archive) in str(caught.value)
    assert archive.read_bytes() == before
    assert part_files(archive.parent) == []


def test_payloads_evicted_during_an_export_are_not_in_it(lab, filled, tmp_path, target):
    def evict(done, total):
        for path in lab.payloads(filled):
            path.unlink()

    report = export_archive(filled, tmp_path / "kv.tar", progress=evict)
    assert (report.payloads, report.left_out) == (1, [])
    assert import_archive(target, tmp_path / "kv.tar").is_complete


# -- import ------------------------------------------------------------------------------------------


def test_an_import_creates_a_store_with_the_same_chunks_and_pins(lab, archive, target):
    steps = []
    report = import_archive(target, archive, progress=lambda *step: steps.append(step))
    assert report.is_complete
    assert (report.imported, report.already_there, report.pinned) == (4, 0, 1)
    assert report.imported_bytes == 4 * lab.entry_bytes
    assert steps[-1][0] <= steps[-1][1] == archive.stat().st_size
    assert lab.intact(target) == [0, 1, 2, 3]
    assert collect(target, 0).left == 1
    assert lab.intact(target) == [2]


def test_an_import_adds_what_is_missing_evicts_the_oldest_and_can_be_repeated(lab, archive, target):
    lab.flip(lab.file(lab.fill(target, [6, 0, 1, 7], limit_bytes=5 * lab.entry_bytes), 1))
    check(target, repair=True)  # 1 is in the quarantine
    first = import_archive(target, archive)
    before = {path: path.stat().st_mtime_ns for path in lab.payloads(target)}
    second = import_archive(target, archive)
    assert (first.imported, first.already_there) == (3, 1)
    assert (second.imported, second.already_there, second.pinned) == (0, 4, 1)
    assert {path: path.stat().st_mtime_ns for path in lab.payloads(target)} == before
    assert lab.intact(target) == [0, 1, 2, 3, 7]


def test_a_given_limit_is_remembered_and_ends_the_import(lab, archive, target):
    report = import_archive(target, archive, disk_bytes=2 * lab.entry_bytes)
    assert not report.is_complete
    assert "raise disk_bytes" in report.stopped
    assert report.imported == 2
    assert survey(target).limit_bytes == 2 * lab.entry_bytes
    assert len(lab.intact(target)) == 2
    assert import_archive(target, archive, disk_bytes=4 * lab.entry_bytes).imported == 2
    assert lab.intact(target) == [0, 1, 2, 3]


def test_a_full_disk_ends_an_import_and_keeps_what_was_imported(lab, archive, target, monkeypatch):
    real, writes = PayloadFiles.write, []

    def failing(self, *args):
        writes.append(0)
        if len(writes) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, *args)

    monkeypatch.setattr(PayloadFiles, "write", failing)
    report = import_archive(target, archive)
    assert "no space left" in report.stopped
    assert report.imported == 2
    monkeypatch.undo()
    assert import_archive(target, archive).is_complete


def test_a_kill_during_an_import_leaves_whole_chunks(lab, archive, target, killed):
    killed(lambda: import_archive(target, archive), PayloadFiles, "sync", 3)
    assert len(list((target / "tmp").iterdir())) == 1  # the marker of the dead writer
    assert lab.payloads(target)
    assert len(lab.intact(target)) == 3
    assert list((target / "tmp").iterdir()) == []
    assert import_archive(target, archive).is_complete


def test_an_import_into_a_directory_that_is_not_a_store_touches_nothing(
    lab, archive, tmp_path, filled, target
):
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "letter.txt").write_text("text", encoding="utf-8")
    (tmp_path / "file").write_text("text", encoding="utf-8")
    for name, words in (("documents", "holds no store"), ("file", "is a file")):
        with pytest.raises(StoreUnavailableError, match=words):
            import_archive(tmp_path / name, archive)
    assert os.listdir(tmp_path / "documents") == ["letter.txt"]
    (filled / "format").write_text("blendrag-kv 2\n", encoding="ascii")
    with pytest.raises(BlendragError, match="newer"):
        import_archive(filled, archive)
    target.mkdir()  # an empty directory becomes a store
    assert import_archive(target, archive).is_complete


# -- hostile archives --------------------------------------------------------------------------------


def test_a_cut_archive_gives_its_whole_payloads_and_an_error(lab, archive, tmp_path):
    data = archive.read_bytes()
    cut, target, generator = tmp_path / "cut.tar", tmp_path / "cut", random.Random(5)
    member, end = lab.entry_bytes + 512, len(data) - 1024 - 512
    edges = [1024 + n * member for n in range(5)] + [end, end - 1]
    for size in [*edges, *generator.sample(range(1024, end), 5)]:
        cut.write_bytes(data[:size])
        report = import_archive(target, cut)
        whole = min((size - 1024) // member, 4)
        assert (report.imported, report.rejected) == (whole, []), size
        assert "is incomplete" in report.stopped
        assert len(lab.intact(target)) == whole
        shutil.rmtree(target)


def test_files_that_are_not_archives_are_refused_and_no_store_is_created(archive, tmp_path, target):
    others = tmp_path / "others"
    (others / "folder").mkdir(parents=True)
    os.mkfifo(others / "pipe")
    for size in (0, 1, 511, 512, 550):
        (others / f"cut-{size}").write_bytes(archive.read_bytes()[:size])
    (others / "text").write_bytes(b"a letter" * 999)
    with tarfile.open(others / "packed.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo(FIRST))
    write_tar(others / "other.tar", [("letter.txt", b"a letter")])
    write_tar(others / "empty.tar", [])
    write_tar(others / "pax", [link("pax", tarfile.XGLTYPE, ""), (FIRST, b"{}")])
    for name, data in (("list", b"[1]"), ("deep", b"[" * 4000), ("large", b" " * 5000)):
        write_tar(others / name, [(FIRST, data)])
    for path in [*others.iterdir(), others / "nothing"]:
        with pytest.raises(InvalidInputError) as caught:
            import_archive(target, path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not target.exists()


@pytest.mark.parametrize("field", ["blendrag_store_export", "kv_format"])
def test_an_archive_of_another_version_is_refused(archive, tmp_path, target, field):
    contents = members(archive)
    newer = contents[0][1].replace(f'"{field}": 1'.encode(), f'"{field}": 2'.encode())
    write_tar(tmp_path / "newer.tar", [(FIRST, newer), *contents[1:]])
    with pytest.raises(InvalidInputError, match=f"{field} is 2, expected 1"):
        import_archive(target, tmp_path / "newer.tar")


def test_unknown_names_end_the_import_and_touch_nothing(lab, archive, tmp_path, target):
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
        *(link(name, kind, "") for kind in (tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)),
        link("././@LongLink", tarfile.GNUTYPE_LONGNAME, ""),
        link("extended", tarfile.XHDTYPE, ""),
    ]
    for number, member in enumerate(hostile):
        store = target / str(number)
        changed = [*contents[:2], member, *contents[2:]]
        report = import_archive(store, write_tar(tmp_path / "h.tar", changed))
        assert "is incomplete" in report.stopped, member
        assert report.imported == len(lab.payloads(store)) == 1
        assert not list(store.rglob("*.json"))
    assert not list(tmp_path.rglob("escaped*"))


def test_payloads_that_fail_verification_are_rejected(lab, archive, tmp_path, target):
    first, one, two, three, four, _ = members(archive)
    forged = [
        (one[0], one[1][:-1] + bytes([one[1][-1] ^ 1])),
        (two[0], struct.pack("<Q", 1 << 63) + two[1][8:]),
        (three[0], four[1]),  # another chunk's bytes
        (four[0], four[1] + b"more"),
        (f"kv/{lab.key('other')}/{lab.key(0)}.kv", two[1]),  # another namespace's
        (f"kv/{lab.namespace}/{lab.key(7)}.kv", b""),
        (f"kv/{lab.namespace}/{lab.key(8)}.kv", b"short"),
    ]
    end = (LAST, b'{"payloads": 7, "bytes": %d}' % sum(len(data) for _, data in forged))
    report = import_archive(target, write_tar(tmp_path / "forged.tar", [first, *forged, end]))
    assert (report.imported, len(report.rejected), report.stopped) == (0, 7, "")
    assert not report.is_complete
    assert lab.payloads(target) == []
    assert list((target / "tmp").glob("*.part")) == list((target / "pinned").iterdir()) == []
    assert import_archive(target, archive).is_complete


def test_a_missing_or_cut_payload_is_noticed_and_evicts_nothing(lab, archive, tmp_path, target):
    contents = members(archive)
    del contents[3]
    report = import_archive(tmp_path / "other", write_tar(tmp_path / "short.tar", contents))
    assert report.imported == 3
    assert "it should hold 4 payloads" in report.stopped
    lab.fill(target, [7], limit_bytes=lab.entry_bytes)
    archive.write_bytes(archive.read_bytes()[: 1024 + 512 + 5000])
    assert "ends early" in import_archive(target, archive).stopped
    assert lab.intact(target) == [7]


def test_random_mutations_of_an_archive_never_give_wrong_bytes(lab, archive, tmp_path):
    data, generator, target = archive.read_bytes(), random.Random(3), tmp_path / "mutated"
    headers = [0, 512, *(1024 + n * (lab.entry_bytes + 512) for n in range(5))]
    outcomes = set()
    for number in range(20):
        changed = bytearray(data)
        for _ in range(generator.choice((1, 3))):
            blocks = range(0, len(data), 512) if number % 2 else headers
            changed[generator.choice(blocks) + generator.randrange(512)] = generator.randrange(256)
        (tmp_path / "damaged.tar").write_bytes(changed)
        try:
            report = import_archive(target, tmp_path / "damaged.tar")
        except InvalidInputError:
            outcomes.add("refused")
            assert not target.exists()
            continue
        outcomes.add("whole" if report.is_complete else "damaged")
        assert len(lab.intact(target)) == len(lab.payloads(target)) == report.imported
        shutil.rmtree(target)
    assert outcomes >= {"refused", "damaged"}
