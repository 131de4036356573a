"""Every supported file becomes documents; every other file is refused with a reason."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from blendrag.errors import InvalidInputError, UnreadableDocumentError
from blendrag.store import open_store
from blendrag.text.readers import Document, digest_of, read_documents, scan_inputs


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "text", "title"),
    [
        ("the_north-cape.txt", "\ufeffOne.\r\nTwo.\r", "One.\nTwo.\n", "the north cape"),
        ("a.md", "```\n# not this\n```\n## The *cape* ##\n# Later\n", None, "The *cape*"),
        ("no-heading.markdown", "#tag is no heading", None, "no heading"),
    ],
)
def test_the_title_is_the_first_heading_or_the_file_name(
    tmp_path: Path, name: str, content: str, text: str | None, title: str
) -> None:
    path = write(tmp_path / name, content)
    assert list(read_documents(path)) == [Document(path.as_posix(), text or content, title, {})]


def test_html_keeps_blocks_and_drops_scripts(tmp_path: Path) -> None:
    html = (
        "<html><head><title> A\n title </title><style>p{}</style></head><body><h1>Head</h1>"
        "<p>One <b>bold</b>\n word.</p><script>var x = 1;</script><!-- gone -->"
        "<p>Two<br>lines</p><ul><li>first</li><li>second</li></ul>"
        "<table><tr><td>a</td><td>b</td></tr></table><pre>x\n  y</pre></body></html>"
    )
    (document,) = read_documents(write(tmp_path / "a.HTML", html))
    assert document.title == "A title"
    assert document.text == (
        "Head\n\nOne bold word.\n\nTwo\nlines\n\nfirst\n\nsecond\n\na b\n\nx\n  y"
    )


def test_deeply_nested_html_is_read(tmp_path: Path) -> None:
    html = "<div>" * 1100 + "deep" + "</div>" * 1100
    (document,) = read_documents(write(tmp_path / "a.html", html))
    assert document.text == "deep"


def test_json_lines_carry_title_id_and_metadata(tmp_path: Path) -> None:
    lines = [
        {"text": "One.", "title": "First", "id": "x", "year": 1871, "tags": ["a"], "none": None},
        {"text": "Two.", "id": 7},
        {"text": "Three."},
    ]
    path = write(tmp_path / "a.jsonl", "\n\n".join(json.dumps(line) for line in lines))
    first, second, third = read_documents(path)
    assert first == Document(
        f"{path.as_posix()}#x", "One.", "First", {"id": "x", "year": 1871, "tags": '["a"]'}
    )
    assert second.source.endswith("#7")
    assert third.source.endswith("#5")
    assert third.title == "a"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"text": "ok"}\n{"text": ', "line 2 is not valid JSON"),
        ('{"text": "ok"}\n[1]', "line 2 is not an object"),
        ('{"title": "x"}', 'line 1 is not an object with a string under "text"'),
        ('{"text": " "}', "line 1 has an empty"),
        ('{"text": "a", "id": 1}\n{"text": "b", "id": "1"}', "line 2 repeats an id"),
        ('{"text": "\\ud800"}', "line 1 contains a lone surrogate"),
        ("[" * 100_000, "line 1 is not valid JSON"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, content: str, reason: str) -> None:
    with pytest.raises(UnreadableDocumentError, match=f"{reason}.*; 1 bad line skipped, [01] read"):
        list(read_documents(write(tmp_path / "a.jsonl", content)))


def test_good_json_lines_are_read_past_bad_ones(tmp_path: Path) -> None:
    good = [f'{{"text": "line {number}"}}' for number in range(1, 6)]
    lines = [good[0], '{"text": ', good[2], '{"text": "x", "id": 9}', '{"text": "y", "id": 9}']
    path = write(tmp_path / "a.jsonl", "\n".join([*lines, "", "[]", good[4]]))
    documents = read_documents(path)
    texts = [next(documents).text for _ in range(4)]
    with pytest.raises(UnreadableDocumentError) as caught:
        next(documents)
    assert texts == ["line 1", "line 3", "x", "line 5"]
    assert str(caught.value).startswith(f"{path}: line 2 is not valid JSON (")
    assert str(caught.value).endswith("; 3 bad lines skipped, 4 read")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n\t", "is empty"),
        ("a.txt", b"abc\0def", "is binary"),
        ("a.md", b"caf\xe9", "is not UTF-8 \\(byte 3\\)"),
        ("a.jsonl", b"\n\n", "is empty"),
        ("a.htm", b"<script>x</script>", "contains no text"),
        ("a.pdf", b"%PDF", "suffix '.pdf' is not supported"),
        ("noext", b"text", "suffix '' is not supported"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(UnreadableDocumentError, match=reason) as caught:
        list(read_documents(path))
    assert str(path) in str(caught.value)


def test_missing_and_odd_files_are_refused_without_blocking(tmp_path: Path) -> None:
    with pytest.raises(UnreadableDocumentError, match="cannot be read"):
        list(read_documents(tmp_path / "gone.txt"))
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UnreadableDocumentError, match="not a regular file"):
        list(read_documents(tmp_path / "pipe.txt"))


def test_a_name_that_is_not_utf8_is_refused_in_words(tmp_path: Path) -> None:
    path = write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")), "text")
    with pytest.raises(UnreadableDocumentError, match="rename it") as caught:
        list(read_documents(path))
    str(caught.value).encode("utf-8")


def test_directories_are_searched_in_order_and_hidden_ones_left_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/y.pdf", ".git/x.txt", "a/.hidden.md", "c.JSONL"):
        write(tmp_path / name, "x")
    (tmp_path / "loop").symlink_to(tmp_path)
    inputs = scan_inputs([tmp_path, tmp_path / "b.txt"])
    assert inputs.files == [tmp_path / name for name in ("b.txt", "c.JSONL", "a/z.md")]
    assert [p.name for p in inputs.unsupported if p.name != "loop"] == ["y.pdf"]


def test_a_kv_store_below_a_directory_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "x")
    write(tmp_path / "format" / "b.txt", "x")
    write(tmp_path / "c" / "format", "no store")
    os.mkfifo(tmp_path / "format" / "format")
    open_store(tmp_path / "kv", ram_bytes=0, disk_bytes=None).close()
    assert any(path.is_file() for path in (tmp_path / "kv").iterdir())
    inputs = scan_inputs([tmp_path])
    assert [path.name for path in inputs.files] == ["a.txt", "b.txt"]
    assert inputs.unsupported == [tmp_path / "c" / "format", tmp_path / "format" / "format"]


def test_a_file_named_explicitly_is_kept_and_a_missing_one_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pdf", "x")
    assert scan_inputs([tmp_path, path]) == ([path], [])
    with pytest.raises(InvalidInputError, match="does not exist"):
        scan_inputs([tmp_path / "gone"])


def test_the_digest_changes_with_text_title_and_metadata_only() -> None:
    base = Document("a", "text", "title", {"x": 1, "y": 2})
    assert digest_of(base) == digest_of(Document("b", "text", "title", {"y": 2, "x": 1}))
    changes = (
        {"text": "texts"},
        {"title": "titles"},
        {"metadata": {"x": 1}},
        {"metadata": {"x": True, "y": 2}},
    )
    others = [replace(base, **change) for change in changes]
    assert len({digest_of(document) for document in [base, *others]}) == 5
